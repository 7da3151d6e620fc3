"""Warm-up of a loaded model: runs a few steps to compile its kernels before anybody waits for an answer.

A kernel is compiled on its first launch, one to three seconds each the first time on a machine. So the work of a chat
is run once over padding: prompts of every size class with its own kernels, flushes of whole pages, tokens of two
answers or a checked draft, and decoded tokens, captured and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from models.progress import Progress, ProgressCallback
from runtime.backends.decoder import Step
from runtime.backends.triton.compiling import compile_together
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.kernels.gemv import ROWS
from runtime.text.sampling import Sampler, SamplingOptions

_DECODED = (2, 1, 1)
"""Rows of the steps that decode: of several rows, whose compensation has its own kernels; then single tokens, the first
launched, the second captured, replayed and sampled."""
_COMPILING = "compiling the GPU's kernels, which takes up to a minute the first time"
_STARTING = "starting the GPU's kernels"
_DRAWN = SamplingOptions(seed=0, top_k=40, min_p=0.05, logprobs=1)
"""A draw with all filters: the driver loads torch's kernels on first use."""


def warm_up(decoder: TritonDecoder, progress: ProgressCallback) -> None:
    """Compile what is not in the cache, then run the steps; slot 0 of the cache is empty before and after.

    Args:
        decoder: A loaded model.
        progress: Receives reports of the phase `compile`.

    Raises:
        BackendError: a kernel cannot be compiled or launched here.
        OutOfMemoryError: the device does not have enough memory.
    """

    def say(done: int, total: int) -> None:
        progress(Progress(phase="compile", done=done, total=total, unit="kernels", message=_COMPILING))

    if decoder.side is not None:  # on a card
        compile_together((partial(decoder.start, step) for step in _varied(decoder)), say)
        decoder.cache.clear(0)
    steps = list(steps_of(decoder))
    for done, step in enumerate(steps):
        progress(Progress(phase="compile", done=done, total=len(steps), unit="steps", message=_STARTING))
        if int(step.positions[0]) == 0:
            decoder.cache.clear(0)
        if done == len(steps) - 1:
            decoder.draw(step, [Sampler(_DRAWN).order()])
        else:
            decoder.forward(step)
    decoder.cache.clear(0)


def steps_of(decoder: TritonDecoder) -> Iterator[Step]:
    """Prompts of 1, 2, 4, ... rows and of the maximum, until a page is flushed, then decoded tokens."""
    options, kind = decoder.options, decoder.cache.kind
    rows, context = options.max_rows, options.context
    at = 0
    for M in (*(1 << i for i in range(rows.bit_length()) if 1 << i < rows), rows):
        if context >= M:
            at = at if at + M <= context else 0
            yield _step(at, M, prefill=True)
            at += M
    paged = kind.unpaged + kind.page if kind.windowed else 0
    while at < paged and at + rows < context:
        yield _step(at, rows, prefill=True)
        at += rows
    for M in _DECODED:
        if min(context, rows) >= M:
            at = at if at + M <= context else 0
            yield _step(at, M, prefill=False)
            at += M


def _varied(decoder: TritonDecoder) -> Iterator[Step]:
    """A few steps that need almost all kernels: a decoded token, two, and prompts of each way to multiply."""
    options, at = decoder.options, 0
    for M, prefill in ((1, False), (2, False), (1, True), (2, True), (ROWS, True), (2 * ROWS, True)):
        if at + M <= options.context and options.max_rows >= M:
            yield _step(at, M, prefill=prefill)
            at += M


def _step(start: int, M: int, *, prefill: bool) -> Step:
    return Step.of(np.zeros(M, np.int32), start, [M - 1], prefill=prefill)
