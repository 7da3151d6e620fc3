"""A shared thread pool for all cores, since starting threads for every matrix would cost milliseconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

Part = TypeVar("Part")
Found = TypeVar("Found")


def each(work: Callable[[Part], Found], parts: Sequence[Part]) -> list[Found]:
    """Call `work` with every part, from as many threads as there are cores.

    Args:
        work: Processes a part; numpy, numba and torch release the GIL. It must not call `each` itself.
        parts: The parts.

    Returns:
        The results, in the order of the parts.

    Raises:
        Exception: the error of the first part that failed, once all others are done.
    """
    if len(parts) <= 1 or _cores() <= 1:
        return [work(part) for part in parts]
    futures = [_pool().submit(work, part) for part in parts]
    wait(futures)
    return [future.result() for future in futures]


def _cores() -> int:
    return os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores(), thread_name_prefix="models")
