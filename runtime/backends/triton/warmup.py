"""Warm-up of a loaded model: its kernels compiled together, then the steps of a chat run, captured and replayed.

Triton compiles a kernel at its first launch, one to three seconds each, one after another. Here the launches of some
steps first start nothing; their kernels are compiled in threads, as Triton's compiler and assembler let Python go on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from triton import AsyncCompileMode, FutureKernel, knobs
from triton.runtime.jit import JITFunction

from models.progress import Progress, ProgressCallback
from runtime.backends.decoder import Step
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.kernels.gemv import ROWS
from runtime.text.sampling import Sampler, SamplingOptions

MOST = 16
"""Threads at most: the steps of a model need about as many kernels."""
_ALONE = threading.Lock()
"""One thread at a time has its launches replaced."""
_DECODED = (2, 1, 1)
"""Rows of the steps that decode: of several rows, whose compensation has its own kernels; then single tokens, the first
launched, the second captured, replayed and sampled."""
LOOKED_AT = 2 * ROWS
"""Tokens whose activations are looked at."""
_COMPILING = "compiling the GPU's kernels, which takes up to a minute the first time"
_STARTING = "starting the GPU's kernels"
_DRAWN = SamplingOptions(seed=0, top_k=40, min_p=0.05, logprobs=1)
"""A draw with all filters: the driver loads torch's kernels on first use."""


def compile_together(launches: Iterable[Callable[[], object]], done: Callable[[int, int], object]) -> int:
    """Compile the kernels that some launches need and that are not in the cache on disk. Returns how many.

    If those of the first are in the cache, all are taken to be. What does not compile is left: its first launch says
    why. `done` is called with how many kernels are ready, and how many there are so far.
    """
    compiled = 0

    def note(*, cache_hit: bool, **_: Any) -> None:
        nonlocal compiled
        compiled += not cache_hit

    first, *others = launches
    with _ALONE, ThreadPoolExecutor(min(MOST, os.cpu_count() or 1)) as pool, _noted(note):
        for some in ([first], others):
            with _nothing_launched(), AsyncCompileMode(pool, ignore_errors=True) as mode:
                try:
                    for launch in some:
                        launch()
                    for number, _ in enumerate(as_completed(mode.raw_futures), 1):
                        done(number, len(mode.raw_futures))
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for future in mode.raw_futures:
                        if future.cancelled():
                            future.set_running_or_notify_cancel()  # the mode waits for all of them
                    raise
            if not compiled:
                break
    return compiled


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """Within, this thread's launches only ask for code. What fails or is stopped is compiled at its next launch."""
    run, asked, mine = JITFunction.run, set[JITFunction[Any]](), threading.get_ident()

    def ask(kernel: JITFunction[Any], *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != mine:
            return run(kernel, *arguments, **options)
        asked.add(kernel)
        run(kernel, *arguments, **options | {"warmup": True})
        return None

    JITFunction.run = ask
    try:
        yield
    finally:
        JITFunction.run = run
        for kernel in asked:
            for cache, *_ in kernel.device_caches.values():
                for key in [key for key, one in cache.items() if isinstance(one, FutureKernel) and one.kernel is None]:
                    del cache[key]


@contextmanager
def _noted(note: Callable[..., None]) -> Iterator[None]:
    """Within, `note` hears of everything that is compiled, or found in the cache."""
    before, knobs.compilation.listener = knobs.compilation.listener, note
    try:
        yield
    finally:
        knobs.compilation.listener = before


def warm_up(decoder: TritonDecoder, progress: ProgressCallback) -> None:
    """Compile what is not in the cache, then run the steps; slot 0 of the cache is empty before and after.

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
        if done == len(steps) - 1 and decoder.spec.has_head:
            decoder.draw(step, [Sampler(_DRAWN).draw_inputs()])
        else:
            decoder.forward(step)
    decoder.cache.clear(0)


def count_limited(decoder: TritonDecoder) -> None:
    """Count what half precision limits in the first tokens of a prompt, where models have their largest activations.

    A part of a model that goes on from another's stream is left out.
    """
    M = min(LOOKED_AT, decoder.options.max_rows, decoder.options.context)
    if decoder.spec.embeds:
        decoder.count_limited(Step.of(np.arange(M) % decoder.spec.vocab_size, 0, [M - 1], prefill=True))
        decoder.cache.clear(0)


def steps_of(decoder: TritonDecoder) -> Iterator[Step]:
    """Prompts of 1, 2, 4, ... rows and of the maximum, until a page is flushed, then decoded tokens."""
    options, kind = decoder.options, decoder.cache.kind
    rows, context = options.max_rows, options.context
    at = 0
    for M in (*(1 << i for i in range(rows.bit_length()) if 1 << i < rows), rows):
        if context >= M:
            at = at if at + M <= context else 0
            yield _step(decoder, at, M, prefill=True)
            at += M
    paged = kind.unpaged + kind.page if kind.windowed else 0
    while at < paged and at + rows < context:
        yield _step(decoder, at, rows, prefill=True)
        at += rows
    for M in _DECODED:
        if min(context, rows) >= M:
            at = at if at + M <= context else 0
            yield _step(decoder, at, M, prefill=False)
            at += M


def _varied(decoder: TritonDecoder) -> Iterator[Step]:
    """A few steps that need almost all kernels: a decoded token, two, and prompts of each way to multiply."""
    options, at = decoder.options, 0
    for M, prefill in ((1, False), (2, False), (1, True), (2, True), (ROWS, True), (2 * ROWS, True)):
        if at + M <= options.context and options.max_rows >= M:
            yield _step(decoder, at, M, prefill=prefill)
            at += M


def _step(decoder: TritonDecoder, start: int, M: int, *, prefill: bool) -> Step:
    stream = None if decoder.spec.embeds else np.ones((M, decoder.spec.hidden_size), np.float32)
    return Step.of(np.zeros(M, np.int32), start, [M - 1], stream=stream, prefill=prefill)
