"""Sliding-window perplexity of a text, for any decoder and for the full-precision checkpoint.

By default, every position of a window is run as a decoded token. As a chat, the first half of a window is prefilled as
the engine prefills a prompt, and the second half is decoded and scored token by token, as the engine decodes an answer.
Where a text begins with the model's beginning-of-sequence token, every window does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from runtime.backends.decoder import Decoder, Step
from runtime.errors import Cancelled, RequestError

if TYPE_CHECKING:
    from models.oracle import Weights as FullWeights

FloatArray = npt.NDArray[np.floating]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Result of an evaluation."""

    perplexity: float
    """exp(nll_sum / tokens)."""
    nll_sum: float
    """Sum of the negative log-likelihoods of the scored tokens, in nats."""
    tokens: int
    """Number of scored tokens."""
    recall: float | None
    """Mean recall of the selector against exact top-k, if the decoder measures it."""
    seconds: float
    """Wall time."""
    window_nll: tuple[float, ...] = ()
    """Each window's share of `nll_sum`, in the order of `windows`: for paired comparisons on the same text."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window over tokens start .. end - 1 of a text: start .. prompt - 1 are prefilled, first .. end - 1 scored."""

    start: int
    end: int
    first: int
    prompt: int


def windows(count: int, window: int, stride: int, *, as_chat: bool = False) -> Iterator[Window]:
    """The windows of a text.

    A window of `window` tokens starts every `stride` tokens and scores the tokens that no earlier window scored. The
    first token of a window has no context, so it is not scored; with stride == window that leaves out one token of
    every window. The last window is the one that reaches the end of the text. As a chat, the first half of a window is
    its prompt, which is not scored either; with stride == window / 2 only the first prompt is left out.

    Args:
        count: Tokens of the text.
        window: Tokens of a window, at least 2.
        stride: Tokens from one window's start to the next, in [1, window].
        as_chat: Whether the first half of a window is a prompt; otherwise there are no prompts.

    Raises:
        RequestError: a window or stride outside its range, or a text of fewer than two tokens.
    """
    if window < 2:
        raise RequestError(f"window is {window}; it must be at least 2 tokens")
    if not 1 <= stride <= window:
        raise RequestError(f"stride is {stride}; it must be from 1 to the window of {window} tokens")
    if count < 2:
        raise RequestError(f"the text has {count} tokens; at least 2 are needed to score one")
    return _windows(count, window, stride, as_chat)


def _windows(count: int, window: int, stride: int, as_chat: bool) -> Iterator[Window]:
    scored = 0
    for start in range(0, count, stride):
        end = min(start + window, count)
        prompt = start + (end - start) // 2 if as_chat else start
        first = max(scored, prompt, start + 1)
        if first < end:
            yield Window(start, end, first, prompt)
        scored = end
        if end == count:
            return


def perplexity(
    decoder: Decoder,
    tokens: Sequence[int],
    window: int,
    stride: int,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
    *,
    as_chat: bool = False,
    rows: int = 1,
) -> EvalResult:
    """Perplexity of a decoder; every position is compensated by its own activations, as in decoding.

    As a chat, a prompt is handled as in the engine, and decoding takes one token a step. Otherwise many positions share
    a step. A cache with a window in full precision reads as in decoding, since no step crosses the point where decoding
    would flush the next page.

    Args:
        decoder: The loaded model; slot 0 is used and overwritten.
        tokens: The text, encoded with the tokenizer's own special tokens.
        window: Tokens of a window, at most the decoder's context.
        stride: Tokens between windows.
        progress: Called after every window.
        cancelled: Polled between steps.
        as_chat: Whether the first half of each window is prefilled as a prompt and the second half decoded.
        rows: Positions of a step of that second half, each compensated by its own activations; 1 as in decoding. More
            are faster.

    Raises:
        RequestError: a window or stride outside its range, a text that is too short, or a foreign token.
        Cancelled: `cancelled` said so.
        InvalidActivationError: the model computed NaN or infinity.
    """
    if window > decoder.options.context:
        raise RequestError(f"window is {window}, more than the context of {decoder.options.context} tokens")
    text = _checked(tokens, decoder.spec.vocab_size)

    def score(part: Window) -> float:
        scored = scores(decoder, text, part, rows if as_chat else None, cancelled)
        return sum(negative_log_likelihood(logits, targets) for logits, targets in scored)

    with decoder.session():
        parts = windows(text.size, window, stride, as_chat=as_chat)
        return _evaluate(score, text, parts, progress, lambda: decoder.recall)


def full_precision_perplexity(
    checkpoint: FullWeights,
    tokens: Sequence[int],
    window: int,
    stride: int,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
    *,
    as_chat: bool = False,
) -> EvalResult:
    """The same perplexity for the checkpoint before quantization, in float32.

    Args:
        checkpoint: An open `models.checkpoint.Checkpoint`.
        tokens: As in `perplexity`.
        window: As in `perplexity`.
        stride: As in `perplexity`.
        progress: Called after every window.
        cancelled: Polled between windows.
        as_chat: Whether to score the same tokens as an evaluation as a chat; they are computed alike.

    Raises:
        RequestError: as in `perplexity`.
        Cancelled: `cancelled` said so.
    """
    import torch

    from models.oracle import Oracle

    oracle = Oracle(checkpoint)
    text = _checked(tokens, checkpoint.spec.vocab_size)

    def score(part: Window) -> float:
        _check(cancelled)
        rows = list(range(part.first - 1 - part.start, part.end - 1 - part.start))
        tokens = tokens_of(text, part, checkpoint.spec.bos_token_id)[None, :-1]
        logits = oracle.logits(torch.from_numpy(tokens), rows=rows)[0]
        return negative_log_likelihood(logits.float().numpy(), text[part.first : part.end])

    return _evaluate(score, text, windows(text.size, window, stride, as_chat=as_chat), progress, lambda: None)


def negative_log_likelihood(logits: FloatArray, targets: Int64Array) -> float:
    """Sum over rows of -log softmax(logits)[target].

    Args:
        logits: floating point [R, V].
        targets: int64 [R].

    Returns:
        Nats, summed in float64.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalizers = np.log(np.exp(shifted).sum(axis=1))
    return float((normalizers - shifted[np.arange(targets.size), targets]).sum())


def tokens_of(text: Int64Array, part: Window, bos: int | None) -> Int64Array:
    """A window's tokens, as llama.cpp's perplexity takes them; Gemma 3 270M loses 0.6 to 1 nats a token otherwise.

    Args:
        text: int64 [S] tokens.
        part: The window.
        bos: The model's beginning-of-sequence token. Where the text begins with it, it takes the place of the window's
            first token, which no window scores.

    Returns:
        int64 [part.end - part.start].
    """
    tokens = text[part.start : part.end].copy()
    if text[0] == bos:
        tokens[0] = text[0]
    return tokens


def scores(
    decoder: Decoder,
    text: Int64Array,
    part: Window,
    decoded: int | None,
    cancelled: Callable[[], bool],
    *,
    prefilled: int | None = None,
) -> Iterator[tuple[FloatArray, Int64Array]]:
    """Logits [R, V] and targets [R] of a window's scored tokens, step by step; the next step overwrites the logits.

    The window's last token is not run: nothing after it is scored.

    Args:
        decoder: The loaded model, in a session.
        text: int64 [S] tokens.
        part: The window.
        decoded: Most rows of a step behind the prompt; None: as many as a step can have.
        cancelled: Asked between steps.
        prefilled: Most rows of a step of the prompt; None: as many as a step can have.

    Raises:
        Cancelled: `cancelled` said so.
    """
    tokens = tokens_of(text, part, decoder.spec.bos_token_id)
    for at, end, prompt in _steps(decoder, part, decoded, prefilled):
        _check(cancelled)
        wanted, place = np.arange(max(part.first - 1, at), end), at - part.start
        logits = decoder.forward(Step.of(tokens[place : end - part.start], place, wanted - at, prefill=prompt))
        if wanted.size:
            yield logits, text[wanted + 1]


def _steps(
    decoder: Decoder, part: Window, decoded: int | None, prefilled: int | None
) -> Iterator[tuple[int, int, bool]]:
    """The steps of a window: first token, end, and whether they are prompt rows.

    The cache limits each step, so run each before requesting the next. `decoded` and `prefilled` are as in `scores`.
    """
    end, most, cache = part.start, decoder.options.max_rows, decoder.cache
    cache.clear(0)
    while end < part.end - 1:
        at, prompt = end, end < part.prompt
        until = most if prompt else min(most, cache.rows_until_flush(0))
        limit = prefilled if prompt else decoded
        rows = until if limit is None else min(limit, until)
        end = min(at + rows, part.prompt if prompt else part.end - 1)
        yield at, end, prompt


def _evaluate(
    score: Callable[[Window], float],
    text: Int64Array,
    parts: Iterator[Window],
    progress: ProgressCallback,
    recall: Callable[[], float | None],
) -> EvalResult:
    """Sum the scores of all windows, reporting progress in tokens."""
    begin = time.perf_counter()
    nll, count, scores = 0.0, 0, []
    for part in parts:
        scores.append(score(part))
        nll += scores[-1]
        count += part.end - part.first
        message = f"perplexity {safe_exp(nll / count):.2f} after {count} of about {text.size} tokens"
        progress(Progress(phase="eval", done=part.end, total=text.size, unit="tokens", message=message))
    seconds = time.perf_counter() - begin
    return EvalResult(
        perplexity=safe_exp(nll / count),
        nll_sum=nll,
        tokens=count,
        recall=recall(),
        seconds=seconds,
        window_nll=tuple(scores),
    )


def safe_exp(value: float) -> float:
    """The exponential, or infinity on overflow: a collapsed model must not abort its evaluation."""
    return math.exp(value) if value < math.log(1.7e308) else math.inf


def _checked(tokens: Sequence[int], vocabulary: int) -> Int64Array:
    """The tokens as an array; raises RequestError for tokens outside the vocabulary."""
    text = np.asarray(tokens, np.int64)
    if text.size and not (text.min() >= 0 and text.max() < vocabulary):
        raise RequestError(
            f"the text contains a token outside the model's vocabulary of {vocabulary}: another model's tokenizer?"
        )
    return text


def _check(cancelled: Callable[[], bool]) -> None:
    """Raise Cancelled if the caller wants to stop."""
    if cancelled():
        raise Cancelled("the evaluation was cancelled")
