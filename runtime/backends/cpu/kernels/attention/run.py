"""A run of attention: query heads of a few rows of one sequence that share a key-value head, and their partial results.

A *partial result* is unnormalized attention over part of the context: float32 [D padded to 16], then the largest score
and the sum of the weights, in units of e^(score - largest).
"""

from __future__ import annotations

from typing import NamedTuple

import numba

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import set_float, store_floats, zero_floats

LOWEST = -1e30
"""Initial largest score of a query that has seen nothing."""


class Queries(NamedTuple):
    """The query heads of a run."""

    at: int
    """Address of the first row's first head, float32 [heads, D], rotated and divided by sqrt(D)."""
    stride: int
    """Bytes from row to row."""
    rows: int
    """Rows, at consecutive positions."""
    heads: int
    """Query heads of a row."""
    dim: int
    """D."""
    position: int
    """Position of the first row."""
    window: int
    """Visible tokens, including the query's own; 0 = all."""
    cap: float
    """Soft cap of the scores; 0 = none."""


class Sums(NamedTuple):
    """Partial results of a run."""

    at: int
    """Address of the first row's first head."""
    row: int
    """Bytes from row to row."""
    head: int
    """Bytes from head to head."""


@kernel
def padded_channels(dim: int) -> int:
    """D padded to 16."""
    return (dim + 15) // 16 * 16


@kernel
def part_bytes(dim: int) -> int:
    """Bytes of a partial result."""
    return 4 * (padded_channels(dim) + 16)


@kernel
def seen_by(queries: Queries, row: int, start: int, count: int) -> tuple[int, int]:
    """The range of the `count` tokens from position `start` on that a row sees: first, end."""
    behind = queries.position - start + row + 1
    return (0 if queries.window == 0 else max(0, behind - queries.window)), min(behind, count)


@kernel
def clear_sums(queries: Queries, sums: Sums) -> None:
    """Clear the partial results of a run."""
    padded = padded_channels(queries.dim)
    for row in range(queries.rows):
        for head in range(queries.heads):
            to = sums.at + row * sums.row + head * sums.head
            for d in range(0, padded, 16):
                store_floats(to + 4 * d, zero_floats())
            set_float(to + 4 * padded, numba.float32(LOWEST))
            set_float(to + 4 * padded + 4, numba.float32(0.0))
