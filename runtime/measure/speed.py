"""Speed of a loaded model: time to first token, prefill and decode speed, compared with the memory bandwidth.

Works on any `Decoder`. The text is random tokens: the speed of a dense model does not depend on its input.
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
from runtime.kv.groups import bytes_of_token
from runtime.kv.kinds import KINDS, CacheKind, bytes_per_token, window_token_bytes

_WARM_STEPS = 3
_FILLED_BY_PREFILL = 512
"""Tokens to prefill when filling a context; copies of their pages fill the rest. A multiple of all page sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured speeds of a decoder."""

    prompt_tokens: int
    """Tokens of the prompt."""
    decode_tokens: int
    """Tokens decoded after it, one per step."""
    ttft_s: float
    """Seconds from the prompt to the first token of the answer."""
    prefill_tokens_per_s: float
    """Prompt tokens divided by the seconds of their steps."""
    decode_tokens_per_s: float
    """The inverse of the median step time."""
    bytes_per_token: int
    """Bytes read per decoded token: all weights, and the cache at the middle of the decoded stretch."""
    kv_bytes_per_token: int
    """Bytes of pages for each token of a conversation that fills the context."""

    def percent_of_limit(self, gb_s: float) -> float:
        """Decode speed as a percentage of a read bandwidth in 10^9 bytes per second."""
        return 100 * self.decode_tokens_per_s * self.bytes_per_token / (gb_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedAt:
    """Measured decode speed with a given number of tokens in the cache."""

    tokens: int
    """Tokens in the cache before the first decoded one."""
    decode_tokens: int
    """Tokens decoded after them, one per step."""
    decode_tokens_per_s: float
    """The inverse of the median step time."""
    bytes_per_token: int
    """Bytes read per decoded token: all weights, and the cache."""
    kv_bytes: int
    """Bytes of these tokens in the cache, those in half precision included."""


def default_lengths(max_context: int) -> tuple[int, int]:
    """Default numbers of prompt and decoded tokens: 256 and 128 if the context allows."""
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
    """Measure a decoder. Overwrites slot 0.

    Args:
        decoder: A loaded model.
        prompt_tokens: Tokens to prefill, at least 1.
        decode_tokens: Tokens to decode, at least 1.
        seed: Seed of the random prompt.
        progress: Called with a report for every step.
        cancelled: Polled before every step.

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
    kind, options = KINDS[decoder.options.kv], decoder.options
    kv_per_token = bytes_of_token(kind, decoder.spec, context=options.context, max_rows=options.max_rows)
    return Speed(
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        ttft_s=ttft,
        prefill_tokens_per_s=prompt_tokens / ttft,
        decode_tokens_per_s=1 / statistics.median(steps),
        bytes_per_token=decoder.weight_bytes + _kv_read(kind, decoder.spec, prompt_tokens + decode_tokens // 2),
        kv_bytes_per_token=round(kv_per_token),
    )


def measure_at(
    decoder: Decoder,
    *,
    tokens: int,
    decode_tokens: int,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> SpeedAt:
    """Measure decoding with a given cache length, without prefilling a prompt of that length.

    Args:
        decoder: A loaded model; slot 0 is overwritten.
        tokens: Tokens in the cache, at least 1; see `fill`.
        decode_tokens: Tokens to decode, at least 1.
        progress: Called with a report for every step.
        cancelled: Polled before every step.

    Raises:
        RequestError: a length is not positive, or the cache cannot be filled.
        ContextOverflowError: the two together exceed the decoder's context.
        Cancelled: `cancelled` said so.
    """
    if tokens < 1 or decode_tokens < 1:
        raise RequestError("at least one token in the cache and one decoded token are needed to measure a speed")
    _check_context(decoder, f"{tokens} tokens in the cache", tokens, decode_tokens)
    warm = min(_WARM_STEPS, decoder.options.context - tokens - decode_tokens)
    runner, kind = _Runner(decoder, progress, cancelled, warm + decode_tokens), KINDS[decoder.options.kv]
    with decoder.session():
        first = fill(decoder, tokens, cancelled=cancelled)
        held = decoder.cache.slot_bytes(0)
        steps = runner.decode(first, tokens, warm + decode_tokens)[warm:]  # a state cannot go back to the first
    return SpeedAt(
        tokens=tokens,
        decode_tokens=decode_tokens,
        decode_tokens_per_s=1 / statistics.median(steps),
        bytes_per_token=decoder.weight_bytes + _kv_read(kind, decoder.spec, tokens + decode_tokens // 2),
        kv_bytes=round(held),
    )


def fill(decoder: Decoder, tokens: int, seed: int = 0, cancelled: Callable[[], bool] = never_cancelled) -> int:
    """Fill slot 0 with a short random prompt and copies of its pages, which are not meaningful text.

    Reading such a cache takes as long as reading a real one of the same length: every copy is a separate page.

    Args:
        decoder: A loaded model.
        tokens: Number of tokens, at least 1.
        seed: Seed of the random tokens.
        cancelled: Polled before every step.

    Returns:
        The most likely next token.

    Raises:
        RequestError: copies are needed, and the backend's cache does not support them.
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
    """Peak resident memory of this process, mapped weights included."""
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
    """Raise ContextOverflowError if the tokens and those decoded after them do not fit."""
    if tokens + decode_tokens > decoder.options.context:
        raise ContextOverflowError(
            f"{before} and {decode_tokens} decoded tokens exceed the context of "
            f"{decoder.options.context} tokens: ask for fewer, or a longer context"
        )


def _kv_read(kind: CacheKind, spec: ModelSpec, position: int) -> int:
    """Bytes of the cache that one token at `position` reads: the visible part of every layer.

    If the kind keeps recent tokens in half precision, half a page more than it keeps is assumed, since pages are
    flushed as a whole.
    """
    paged = bytes_per_token(kind, spec)
    recent, half = (kind.unpaged + kind.page // 2, window_token_bytes(kind, spec)) if kind.windowed else (0, 0)
    total = 0.0
    windows = [spec.windows[layer] for layer in spec.attention_layers]
    for window in windows:
        seen = min(position + 1, window or position + 1)
        total += min(seen, recent) * half + max(0, seen - recent) * paged
    return round(total / max(1, len(windows)))


class _Runner:
    """Runs slot 0 of a decoder."""

    def __init__(self, decoder: Decoder, progress: ProgressCallback, cancelled: Callable[[], bool], total: int) -> None:
        self._decoder = decoder
        self._progress = progress
        self._cancelled = cancelled
        self._total = total
        self.done = 0

    def prefill(self, tokens: Int32Array, begin: int = 0) -> int:
        """Run a prompt from a position on. Returns the most likely next token."""
        chunk = self._decoder.options.max_rows
        token = 0
        for start in range(0, len(tokens), chunk):
            rows = tokens[start : start + chunk]
            last = start + len(rows) == len(tokens)
            token = self._step(rows, begin + start, [len(rows) - 1] if last else [], prefill=True)
            self._report(len(rows))
        return token

    def decode(self, token: int, position: int, count: int) -> list[float]:
        """Decode greedily. Returns the seconds of each step."""
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
