"""Candidate values of `n_tb` and `k_chunk`: those that the compensation kernel can use.

Source: QDEC A.1, A.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.errors import ShapeError

CHUNK = 1024
"""Input channels that one local selection covers."""
SEGMENT = 256
"""Output channels of one 128-byte request: 32 threads, one 32-bit word with 8 four-bit residuals each."""
_STATIC_BYTES = 128
_STAGING_BYTES = 16384
_SEGMENT_BYTES = 512
_CANDIDATE_BYTES = 128
_SELECTED_BYTES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """The way a block fits the fetch into its shared memory."""

    fallback: bool
    """Whether the selected channels stay in global memory because they don't fit in shared memory."""
    passes: int
    """Number of passes over the channels, each for a part of the outputs."""


def chunks(k: int) -> int:
    """Number of local selections over K input channels."""
    return -(-k // CHUNK)


def segments(n: int) -> int:
    """Number of 128-byte requests for one residual row of N outputs."""
    return -(-n // SEGMENT)


def n_tb_candidates(n: int, k: int) -> tuple[int, ...]:
    """Thread block counts that no smaller count matches, ascending.

    Args:
        n: Output channels N of the layer.
        k: Input channels K of the layer.

    Raises:
        ShapeError: a size below 1.

    Source: QDEC A.1: one block per chunk at most for the selection, or a count that leaves no block without a segment.
    """
    if min(n, k) < 1:
        raise ShapeError(f"a layer of {n} outputs and {k} inputs has no channels to compensate")
    s = segments(n)
    fetching = {count for count in range(1, s + 1) if -(-s // -(-s // count)) == count}
    return tuple(sorted(fetching | set(range(1, chunks(k) + 1))))


def k_chunk_limit(n: int, k: int, n_tb: int, shared_bytes: int) -> int:
    """The largest `k_chunk` whose buffers fit into a block's shared memory; 0 if none does.

    The selection needs 128 bytes a channel and its chunk of activations. The fetch never bounds `k_chunk`, only
    its speed: where the selected channels do not fit they stay in global memory, and where the partial sums
    do not fit the outputs are split into passes (see `fetch_plan`).

    Args:
        n: Output channels N.
        k: Input channels K.
        n_tb: Thread blocks that share the layer.
        shared_bytes: Shared memory of one block.

    Source: QDEC A.2.
    """
    if fetch_plan(n, k, n_tb, 1, shared_bytes) is None:
        return 0
    return max(0, min(CHUNK, (shared_bytes - _STATIC_BYTES - 2 * CHUNK) // _CANDIDATE_BYTES))


def fetch_plan(n: int, k: int, n_tb: int, k_chunk: int, shared_bytes: int) -> FetchPlan | None:
    """The plan to fetch `k_chunk` channels per chunk; None if not even one segment fits.

    Raises:
        ShapeError: a size below 1, or no block.

    Source: QDEC A.1 (passes), A.2 (bytes and fallback).
    """
    if min(n, k, n_tb) < 1:
        raise ShapeError(f"{n_tb} thread blocks cannot fetch a layer of {n} outputs and {k} inputs")
    free = shared_bytes - _STATIC_BYTES - _STAGING_BYTES
    own = -(-segments(n) // n_tb)
    if _SELECTED_BYTES * k_chunk * chunks(k) + _SEGMENT_BYTES * own <= free:
        return FetchPlan(fallback=False, passes=1)
    at_once = free // _SEGMENT_BYTES
    return FetchPlan(fallback=True, passes=-(-own // at_once)) if at_once > 0 else None
