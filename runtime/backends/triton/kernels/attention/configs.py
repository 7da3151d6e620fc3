"""How attention is launched: which tile, how many splits. Data only, chosen from shapes alone so that graphs replay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from runtime.backends.triton.kernels.cache.pages import power_of_two

SPLIT_ROWS = 8
"""Steps of at most so many rows, decoded tokens and drafts to be verified, are split finely along the context."""
FEW_TILE_ROWS = 64
"""Rows of the matrix products of such a step at most: its rows stand together, so that keys are read once for them."""
DECODE_PROGRAMS = 256
"""Programs that a step of few rows is split into, where its context allows: two for each multiprocessor of a large GPU,
more for a small one, so that enough reads are in flight to keep memory busy."""
TILED_PROGRAMS = 128
"""The same for a step of many rows, whose programs have more work each."""
MAX_SPLITS = 64
"""Most splits of one row: the merge holds them all in registers."""
DOT_ROWS = 16
"""Fewest rows of a matrix product of the tensor cores."""
TILE_ROWS = 128
"""Rows of the matrix products in a step of many rows. At least as many rows as channels: the compiler then gives every
warp rows of its own, and each holds only these of q."""
BLOCKS_AHEAD = {16: 2, 8: 2, 4: 3, 2: 3}
"""Blocks of the cache that a program of one decoded token keeps on their way to it, by the bits of a number: 24 to 64
KiB. Fewer leave the memory of a large GPU idle while a block is worked on; more don't fit beside others in a small one.
"""
LONG_STEP = 128
"""Steps of more rows take half of TILE_ROWS up to 64 channels: there the whole tile, not split, spills registers."""
WIDE_TILE_ROWS = 32
"""The same where a head is wider than 128 channels: more rows would not fit in registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """One way to launch attention."""

    block_m: int
    """Rows of a matrix product: `rows` rows of the step times the query heads of one key-value head, padded."""
    rows: int
    """Rows of the step that one program handles."""
    block_t: int
    """Positions of the cache in one iteration."""
    block_d: int
    """Head dimension, padded to a power of two."""
    splits: int
    """Programs among which the positions that a tile of rows sees are divided; 1 = nothing to merge."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Stages of the pipeline that fetches keys and values ahead."""


@lru_cache(maxsize=1024)
def launch_config(
    M: int, group: int, kv_heads: int, dim: int, seen: int, *, bits: int = 16, planes: int = 1, corrected: bool = False
) -> LaunchConfig:
    """How to launch attention of a shape.

    Args:
        M: Rows of the step.
        group: Query heads of a key-value head, H / H_kv.
        kv_heads: H_kv.
        dim: D.
        seen: Most positions that a row can see: the capacity of the cache, or the window where that is smaller.
        bits: Bits of a number in a page that are read.
        planes: Planes that they are joined from.
        corrected: Whether GEAR's corrections are added to them, for which registers must be left.

    Returns:
        The choice; nothing in it depends on positions.
    """
    block_d = max(16, power_of_two(dim))
    few = M <= SPLIT_ROWS
    narrow = TILE_ROWS // 2 if block_d <= 64 and M > LONG_STEP else TILE_ROWS
    tile = WIDE_TILE_ROWS if block_d > 128 else narrow
    if few:
        tile = min(max(DOT_ROWS, power_of_two(M * group)), tile, FEW_TILE_ROWS)
    if corrected:
        tile = DOT_ROWS
    block_m = max(tile, power_of_two(group))
    rows = min(M, block_m // group)
    block_t = 64 if few and block_d <= 128 and not corrected else 32
    tiles = -(-M // rows) * kv_heads
    wanted = (DECODE_PROGRAMS if few else TILED_PROGRAMS) // tiles
    splits = max(1, min(wanted, MAX_SPLITS, -(-seen // block_t)))
    return LaunchConfig(
        block_m=block_m,
        rows=rows,
        block_t=block_t,
        block_d=block_d,
        splits=splits,
        num_warps=8 if block_m >= 128 or (few and bits == 8 and block_m == 2 * DOT_ROWS) else 4,
        num_stages=_stages(M, block_m, bits, planes, corrected=corrected),
    )


def _stages(M: int, block_m: int, bits: int, planes: int, *, corrected: bool) -> int:
    """Stages of the pipeline. A block is found by its page's number, so each on its way takes two stages."""
    if planes == 2 and block_m >= TILE_ROWS:  # with two, joining the planes spills up to 40 bytes on sm_86 to sm_120
        return 1
    verified = 1 < M <= SPLIT_ROWS and bits < 16 and not corrected
    if (M == 1 and block_m == DOT_ROWS) or (verified and block_m <= 2 * DOT_ROWS):
        return 2 * BLOCKS_AHEAD[bits] + 1
    return 4 if verified else 2
