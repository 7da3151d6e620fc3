"""Launch configurations of attention: tile and splits, chosen from shapes and the device, so that graphs replay.

What a kernel is compiled for depends on the step's rows in three classes alone, one row, up to `SPLIT_ROWS` and more:
no length of a chat, no number of rows and no number of splits makes another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from runtime.backends.triton import sizes
from runtime.backends.triton.kernels.cache.pages import power_of_two

SPLIT_ROWS = 8
"""Steps of at most so many rows, decoded tokens and drafts to be verified, are split finely along the context."""
FEW_TILE_ROWS = 64
"""Rows of the matrix products of such a step at most: its rows stand together, so that keys are read once for them."""
LEAST_BLOCKS = 2
"""Blocks of the cache that a split has at least: fewer cost more to start and merge than they save. Kernels read it."""
SPLIT_OVERHEAD = 1.0
"""What a program costs beside its blocks, in blocks: its start, its queries, and its part of the merge."""
MAX_SPLITS = 64
"""Most splits of one row."""
KEPT_ROWS = sizes.SPLIT_ROWS
"""Rows of splits, query heads times rows times splits, that are kept until they are merged: 8.5 MB at 128 channels.
Steps of more rows are launched in parts."""
SHARED_KIB = {16: 72, 8: 40, 4: 72, 2: 72}
"""Shared memory of a program of one decoded token over 128 channels, by the bits of a number (docs/kernels.md): what
decides how many of them a multiprocessor holds. Programs of several rows take a fifth more."""
DOT_ROWS = 16
"""Fewest rows of a matrix product of the tensor cores."""
TILE_ROWS = 128
"""Rows of the matrix products in a step of many rows. At least as many rows as channels: the compiler then gives every
warp rows of its own, and each holds only these of q."""
BLOCKS_AHEAD = {16: 2, 8: 2, 4: 3, 2: 3}
"""Blocks of the cache that a program of one decoded token keeps on their way to it, by the bits of a number: 24 to 64
KiB. Fewer leave the memory of a large GPU idle while a block is worked on; more don't fit beside others in a small one.
"""
NARROW_TILE_ROWS = 64
"""The same up to 64 channels, where the whole tile spills registers, and over 8-bit codes of 128, where it leaves none
for blocks on their way: half the rows with half the warps take an eighth fewer instructions a row, too."""
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
    """Programs among which the positions that a tile of rows sees are divided at most: so many are launched, and those
    that the positions of a step leave nothing for end at once."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Stages of the pipeline that fetches keys and values ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a device has for programs to run in."""

    multiprocessors: int = 128
    """By default those of a large one, for where there is none: under the interpreter, and for compiling ahead."""
    shared_kib: int = 100
    """Shared memory of each."""


class Reading(NamedTuple):
    """What a program reads of a page."""

    bits: int = 16
    """Bits of a number that are read."""
    planes: int = 1
    """Planes that they are joined from."""
    corrected: bool = False
    """Whether GEAR's corrections are added to them, for which registers must be left."""


@lru_cache(maxsize=1024)
def launch_config(
    M: int,
    group: int,
    kv_heads: int,
    dim: int,
    seen: int,
    reading: Reading = Reading(),  # noqa: B008 - it is frozen
    *,
    room: Room = Room(),
) -> LaunchConfig:
    """How to launch attention of a shape.

    Args:
        M: Rows of the step.
        group: Query heads of a key-value head, H / H_kv.
        kv_heads: H_kv.
        dim: D.
        seen: Most positions that a row can see: the capacity of the cache, or the window where that is smaller.
        reading: What a program reads of a page.
        room: The device. Only `splits` depends on it.

    Returns:
        The choice; nothing in it depends on positions.
    """
    bits, planes, corrected = reading
    block_d = max(16, power_of_two(dim))
    few = M <= SPLIT_ROWS
    light = (bits, planes, dim) == (8, 1, 128)
    narrow = block_d <= 64 or light
    tile = WIDE_TILE_ROWS if block_d > 128 else NARROW_TILE_ROWS if narrow else TILE_ROWS
    if few:
        together = 1 if M == 1 else SPLIT_ROWS
        tile = min(max(DOT_ROWS, power_of_two(together * group)), tile, FEW_TILE_ROWS)
    if corrected:
        tile = DOT_ROWS
    block_m = max(tile, power_of_two(group))
    rows = 1 if M == 1 else block_m // group
    block_t = 64 if few and block_d <= 128 and not corrected else 32
    shared = SHARED_KIB[bits] * block_d / 128 * (1 if M == 1 else 1.2)
    programs = room.multiprocessors * max(1, int(room.shared_kib // shared))
    return LaunchConfig(
        block_m=block_m,
        rows=rows,
        block_t=block_t,
        block_d=block_d,
        splits=_splits(
            -(-M // rows) * kv_heads,
            -(-seen // block_t),
            programs,
            KEPT_ROWS // (M * group * kv_heads),
        ),
        num_warps=8 if block_m >= 128 or (few and bits == 8 and block_m == 2 * DOT_ROWS) else 4,
        num_stages=5 if light and not few else _stages(M, block_m, bits, planes, corrected=corrected),
    )


def _splits(tiles: int, blocks: int, programs: int, most: int) -> int:
    """Splits of each of so many tiles of rows that see so many blocks, where so many programs run at the same time.

    All programs are as many waves over the device, and each takes as long as its blocks and what it costs beside them.
    Of all numbers the one is taken whose waves end first; of equals the smallest.
    """

    def cost(splits: int) -> float:
        return -(-tiles * splits // programs) * (-(-blocks // splits) + SPLIT_OVERHEAD)

    return min(range(1, max(1, min(most, MAX_SPLITS, blocks // LEAST_BLOCKS)) + 1), key=cost)


def _stages(M: int, block_m: int, bits: int, planes: int, *, corrected: bool) -> int:
    """Stages of the pipeline. A block is found by its page's number, so each on its way takes two stages."""
    if planes == 2 and block_m >= TILE_ROWS:  # with two, joining the planes spills up to 40 bytes on sm_86 to sm_120
        return 1
    verified = 1 < M <= SPLIT_ROWS and bits < 16 and not corrected
    if (M == 1 and block_m == DOT_ROWS) or (verified and block_m <= 2 * DOT_ROWS):
        return 2 * BLOCKS_AHEAD[bits] + 1
    if corrected or (M > SPLIT_ROWS and bits == 8):  # with more, registers spill
        return 2
    return 5
