"""Row by row work on all cores: rows are independent, so the result does not depend on how they are shared out."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

CHUNK = 1 << 18
"""Weights handled at a time by a thread, so that the search stays in the processor's cache."""


def each_chunk(rows: int, width: int, work: Callable[[slice], None]) -> None:
    """Call `work` with ranges of rows that together are all of them, from as many threads as there are cores.

    Args:
        rows: Number of rows.
        width: Length of a row; decides how many rows make a chunk.
        work: Handles one range. numpy lets other threads run meanwhile. What it raises is raised here.
    """
    step = max(1, CHUNK // max(1, width))
    chunks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    threads = min(len(chunks), os.cpu_count() or 1)
    if threads <= 1:
        for chunk in chunks:
            work(chunk)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, chunk) for chunk in chunks]:
            done.result()
