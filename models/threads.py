"""A shared thread pool for all cores, since starting threads for every matrix would cost milliseconds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

Part = TypeVar("Part")
Found = TypeVar("Found")

_NAME = "models-each"


def each(work: Callable[[Part], Found], parts: Sequence[Part]) -> list[Found]:
    """Call `work` with every part, from as many threads as there are cores.

    Args:
        work: Processes a part; numpy, numba and torch release the GIL. Calls of `each` in it take its thread alone.
        parts: The parts.

    Returns:
        The results, in the order of the parts.

    Raises:
        Exception: the error of the first part that failed, once all others are done.
    """
    if len(parts) <= 1 or _cores() <= 1 or threading.current_thread().name.startswith(_NAME):
        return [work(part) for part in parts]
    futures = [_pool().submit(work, part) for part in parts]
    wait(futures)
    return [future.result() for future in futures]


def _cores() -> int:
    return os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores(), thread_name_prefix=_NAME)


CHUNK = 1 << 18
"""Weights processed at a time per thread, so that the search stays in the processor's cache."""


def each_chunk(rows: int, width: int, work: Callable[[slice], None]) -> None:
    """Call `work` with ranges of rows that together are all of them, from as many threads as there are cores.

    Args:
        rows: Number of rows.
        width: Length of a row; decides how many rows make a chunk.
        work: Handles one range. numpy lets other threads run meanwhile. What it raises is raised here.
    """
    step = max(1, CHUNK // max(1, width))
    chunks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    each(work, chunks)
