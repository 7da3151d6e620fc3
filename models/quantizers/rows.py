"""Row-wise work on all cores: rows are independent, so the result does not depend on how they are split."""

from __future__ import annotations

from collections.abc import Callable

from models.threads import each

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
