"""Compilation of kernels several at a time, before anything is launched.

Triton compiles a kernel at its first launch, one to three seconds each, one after another. Here the launches of some
steps start nothing; their kernels are compiled in threads, as Triton's compiler and assembler let Python go on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, FutureKernel, knobs
from triton.runtime.jit import JITFunction

MOST = 16
"""Threads at most: the steps of a model need about as many kernels."""
_ALONE = threading.Lock()
"""One thread at a time has its launches replaced."""


def compile_together(launches: Iterable[Callable[[], object]], done: Callable[[int, int], object]) -> int:
    """Compile the kernels that some launches need and that are not in the cache on disk.

    What does not compile is left: its first launch says why.

    Args:
        launches: Start kernels, whose launches here start nothing. If those of the first are in the cache, all are
            taken to be.
        done: Called with how many kernels are ready, and how many there are so far.

    Returns:
        How many were compiled.
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
