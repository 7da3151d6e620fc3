"""How fast a loaded model is here: time to the first token, prefill and decode speed, beside the memory's own limit.

Works on any `Decoder`. The text is random tokens: the time of a dense model does not depend on what it reads.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from models.spec import ModelSpec
from runtime.backends.decoder import Decoder, Int32Array, Step
from runtime.errors import Cancelled, ContextOverflowError, RequestError
from runtime.kv.kinds import KINDS, CacheKind, bytes_per_token, window_token_bytes

_WARM_STEPS = 3
_FILLED_BY_PREFILL = 512
"""Tokens that are prefilled where a context is filled; copies of their pages fill the rest. A multiple of all pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What was measured of one decoder."""

    prompt_tokens: int
    """Tokens of the prompt."""
    decode_tokens: int
    """Tokens decoded after it, each in a step of its own."""
    ttft_s: float
    """Seconds from the prompt to its first answered token."""
    prefill_tokens_per_s: float
    """Prompt tokens by the seconds of their steps."""
    decode_tokens_per_s: float
    """One over the median step."""
    bytes_per_token: int
    """Bytes that one decoded token must read: all weights, and the cache at half of the decoded stretch."""
    kv_bytes_per_token: int
    """Bytes that one token takes in the cache, once it is in a page."""

    def percent_of_limit(self, gb_s: float) -> float:
        """Decode speed against a read bandwidth in 10^9 bytes per second."""
        return 100 * self.decode_tokens_per_s * self.bytes_per_token / (gb_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedAt:
    """What was measured of one decoder with so many tokens in its cache."""

    tokens: int
    """Tokens in the cache before the first decoded one."""
    decode_tokens: int
    """Tokens decoded after them, each in a step of its own."""
    decode_tokens_per_s: float
    """One over the median step."""
    bytes_per_token: int
    """Bytes that one decoded token must read: all weights, and the cache."""
    kv_bytes: int
    """Bytes that the tokens take in the cache, those in half precision included."""


def default_lengths(max_context: int) -> tuple[int, int]:
    """Prompt and decoded tokens to measure with, where nothing is asked for: 256 and 128 if the context allows."""
    prompt = max(1, min(256, max_context // 2))
    return prompt, max(1, min(128, max_context - prompt))


def measure(
    decoder: Decoder,
    *,
    prompt_tokens: int,
    decode_tokens: int,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Speed:
    """Measure one decoder; its slot 0 is overwritten.

    Args:
        decoder: A loaded model.
        prompt_tokens: Tokens to prefill, at least 1.
        decode_tokens: Tokens to decode, at least 1.
        seed: Of the random prompt.
        progress: Receives a report for every step.
        cancelled: Asked before every step.

    Raises:
        RequestError: a length is not positive.
        ContextOverflowError: the two together exceed the decoder's context.
        Cancelled: `cancelled` said so.
    """
    if prompt_tokens < 1 or decode_tokens < 1:
        raise RequestError("at least one prompt token and one decoded token are needed to measure a speed")
    total = prompt_tokens + decode_tokens
    _check_context(decoder, f"{prompt_tokens} prompt", prompt_tokens, decode_tokens)
    prompt = np.random.default_rng(seed).integers(0, decoder.spec.vocab_size, prompt_tokens).astype(np.int32)
    runner = _Runner(decoder, progress, cancelled, total)
    with decoder.session():
        warm = prompt[: decoder.options.max_rows]
        runner.prefill(warm)
        runner.decode(0, len(warm), min(_WARM_STEPS, decode_tokens))
        runner.done = 0
        began = time.perf_counter()
        first = runner.prefill(prompt)
        ttft = time.perf_counter() - began
        steps = runner.decode(first, prompt_tokens, decode_tokens)
    kind = KINDS[decoder.options.kv]
    kv_per_token = round(bytes_per_token(kind, decoder.spec))
    return Speed(
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        ttft_s=ttft,
        prefill_tokens_per_s=prompt_tokens / ttft,
        decode_tokens_per_s=1 / statistics.median(steps),
        bytes_per_token=decoder.weight_bytes + _kv_read(kind, decoder.spec, prompt_tokens + decode_tokens // 2),
        kv_bytes_per_token=kv_per_token,
    )


def measure_at(
    decoder: Decoder,
    *,
    tokens: int,
    decode_tokens: int,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> SpeedAt:
    """Measure decoding with so many tokens in the cache, without the prompt that would put them there.

    Args:
        decoder: A loaded model; its slot 0 is overwritten.
        tokens: Tokens in the cache, at least 1; see `fill`.
        decode_tokens: Tokens to decode, at least 1.
        seed: Of the random tokens.
        progress: Receives a report for every step.
        cancelled: Asked before every step.

    Raises:
        RequestError: a length is not positive, or the cache cannot be filled.
        ContextOverflowError: the two together exceed the decoder's context.
        Cancelled: `cancelled` said so.
    """
    if tokens < 1 or decode_tokens < 1:
        raise RequestError("at least one token in the cache and one decoded token are needed to measure a speed")
    _check_context(decoder, f"{tokens} tokens in the cache", tokens, decode_tokens)
    runner, kind = _Runner(decoder, progress, cancelled, decode_tokens), KINDS[decoder.options.kv]
    with decoder.session():
        first = fill(decoder, tokens, seed, cancelled)
        held = decoder.cache.slot_bytes(0)
        runner.decode(first, tokens, min(_WARM_STEPS, decode_tokens))
        runner.done = 0
        steps = runner.decode(first, tokens, decode_tokens)
    return SpeedAt(
        tokens=tokens,
        decode_tokens=decode_tokens,
        decode_tokens_per_s=1 / statistics.median(steps),
        bytes_per_token=decoder.weight_bytes + _kv_read(kind, decoder.spec, tokens + decode_tokens // 2),
        kv_bytes=round(held),
    )


def fill(decoder: Decoder, tokens: int, seed: int = 0, cancelled: Callable[[], bool] = never_cancelled) -> int:
    """Put so many tokens into slot 0: a short prompt of random ones, and copies of its pages, which are no text.

    Reading such a cache takes as long as reading a real one of the same length: every page is a page of its own.

    Args:
        decoder: A loaded model.
        tokens: Tokens, at least 1.
        seed: Of the random tokens.
        cancelled: Asked before every step.

    Returns:
        The likeliest next token.

    Raises:
        RequestError: so many tokens need copies, and the backend's cache cannot make them.
        Cancelled: `cancelled` said so.
    """
    count = min(tokens, 2 * _FILLED_BY_PREFILL)
    prompt = np.random.default_rng(seed).integers(0, decoder.spec.vocab_size, count).astype(np.int32)
    runner = _Runner(decoder, ignore_progress, cancelled, tokens)
    if tokens <= prompt.size:
        return runner.prefill(prompt)
    cache, rest = decoder.cache, tokens % _FILLED_BY_PREFILL
    first = runner.prefill(prompt[:_FILLED_BY_PREFILL])
    cache.lengthen(0, tokens - rest)
    return runner.prefill(prompt[:rest], tokens - rest) if rest else first


def peak_memory_bytes() -> int:
    """The most memory that this process had resident so far, mapped weights included."""
    status = Path("/proc/self/status")
    if status.is_file():
        lines = (line.split() for line in status.read_text(encoding="utf-8").splitlines())
        peaks = [int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:"]
        if peaks:
            return peaks[0]
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _check_context(decoder: Decoder, before: str, tokens: int, decode_tokens: int) -> None:
    """Raise ContextOverflowError where so many tokens and those decoded after them do not fit."""
    if tokens + decode_tokens > decoder.options.context:
        raise ContextOverflowError(
            f"{before} and {decode_tokens} decoded tokens exceed the context of "
            f"{decoder.options.context} tokens: ask for fewer, or a longer context"
        )


def _kv_read(kind: CacheKind, spec: ModelSpec, position: int) -> int:
    """Bytes of the cache that one token at `position` reads: in every layer what its sliding window shows.

    Of these tokens, the latest are in half precision where the kind keeps such; half a page more than it keeps, for
    pages are cut off as a whole.
    """
    paged = bytes_per_token(kind, spec)
    recent, half = (kind.unpaged + kind.page // 2, window_token_bytes(kind, spec)) if kind.windowed else (0, 0)
    total = 0.0
    for window in spec.windows:
        seen = min(position + 1, window or position + 1)
        total += min(seen, recent) * half + max(0, seen - recent) * paged
    return round(total / len(spec.windows))


class _Runner:
    """Feeds a decoder's slot 0."""

    def __init__(self, decoder: Decoder, progress: ProgressCallback, cancelled: Callable[[], bool], total: int) -> None:
        self._decoder = decoder
        self._progress = progress
        self._cancelled = cancelled
        self._total = total
        self.done = 0

    def prefill(self, tokens: Int32Array, begin: int = 0) -> int:
        """Run a prompt from a position on. Returns the likeliest next token."""
        chunk = self._decoder.options.max_rows
        token = 0
        for start in range(0, len(tokens), chunk):
            rows = tokens[start : start + chunk]
            last = start + len(rows) == len(tokens)
            token = self._step(rows, begin + start, [len(rows) - 1] if last else [], prefill=True)
            self._report(len(rows))
        return token

    def decode(self, token: int, position: int, count: int) -> list[float]:
        """Decode greedily. Returns the seconds of every step."""
        seconds = []
        for i in range(count):
            began = time.perf_counter()
            token = self._step(np.array([token], np.int32), position + i, [0])
            seconds.append(time.perf_counter() - began)
            self._report(1)
        return seconds

    def _step(self, tokens: Int32Array, start: int, logit_rows: list[int], *, prefill: bool = False) -> int:
        if self._cancelled():
            raise Cancelled("the measurement was stopped")
        logits = self._decoder.forward(Step.of(tokens, start, logit_rows, prefill=prefill))
        return int(logits[0].argmax()) if logit_rows else 0

    def _report(self, count: int) -> None:
        self.done += count
        message = f"{self.done} of {self._total} tokens"
        self._progress(Progress(phase="measure", done=self.done, total=self._total, unit="tokens", message=message))
