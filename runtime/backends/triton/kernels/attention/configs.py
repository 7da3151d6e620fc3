"""Launch configurations of attention: tiles and splits, chosen by shape and device, so that graphs can be replayed.

A kernel's specialization depends on the step's rows only by class: one row, up to `SPLIT_ROWS`, and more. Other row
counts, context lengths and numbers of splits reuse it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from runtime.backends.triton import sizes
from runtime.backends.triton.kernels.cache.pages import power_of_two

SPLIT_ROWS = 8
"""Steps of up to this many rows, such as decoded tokens and drafts to verify, are split finely along the context."""
FEW_TILE_ROWS = 32
"""Most rows of such a step's matrix products: its rows share a product, so that keys are read once for them. Where a
key-value head has eight query heads, steps of 5 to 8 rows read them twice: with 64, registers spilled, and a program
over 128 channels took 105 KiB of shared memory, more than an RTX has."""
MIN_BLOCKS = 2
"""Fewest blocks of the cache per split: smaller splits cost more to start and merge than they save. Read by kernels."""
SPLIT_OVERHEAD = 1.0
"""Overhead of a program, in blocks: its start, its queries, and its part of the merge."""
MAX_SPLITS = 64
"""Most splits of a row."""
KEPT_ROWS = sizes.SPLIT_ROWS
"""Most split rows (query heads times rows times splits) stored until they are merged: 8.5 MB at 128 channels. Steps
with more rows are launched in parts."""
SHARED_KIB = {16: 72, 8: 40, 4: 72, 2: 72}
"""Shared memory of a program for one decoded token over 128 channels, by the bits of a number (docs/kernels.md): it
limits the programs per multiprocessor. Programs of several rows take a fifth more."""
DOT_ROWS = 16
"""Fewest rows of a tensor core product."""
DOT_CHANNELS = 32
"""Fewest channels of one: where codes of 4 bits become halves, Triton gives each of four threads 8 neighbouring
channels, and a product over 16 of them came out wrong on a card, though not interpreted."""
TILE_ROWS = 128
"""Rows of the matrix products in a step of many rows. At least as many rows as channels: the compiler then gives every
warp rows of its own, and each holds only these of q."""
BLOCKS_AHEAD = {16: 2, 8: 2, 4: 3, 2: 3}
"""Blocks of the cache that a program of one decoded token prefetches, by the bits of a number: 24 to 64 KiB. Fewer
leave the memory of a large GPU idle during computation; more do not fit beside other programs on a small GPU."""
NARROW_TILE_ROWS = 64
"""The same up to 64 channels, where the whole tile spills registers, and over 8-bit codes of 128, where it leaves none
for blocks on their way: half the rows with half the warps take an eighth fewer instructions a row, too."""
WIDE_TILE_ROWS = 32
"""The same for heads wider than 128 channels: more rows would not fit in registers."""
WIDEST = 256
"""Channels beyond which a program has twice the warps, and blocks of `WIDEST_BLOCK` positions: more do not fit in the
99 KiB of shared memory that an RTX has. Numbers of two planes then leave registers for `DOT_ROWS` rows alone, and
GEAR's corrections for one row of the step."""
WIDEST_BLOCK = 16
"""See there."""

REGISTERS = {10: 255, 12: 255}
"""Registers of a thread that the assembler may use for heads wider than 128 channels, by major compute capability: of
its own accord it stops at 168 there, and spills."""
NARROW_REGISTERS = {9: 255, **REGISTERS}
"""The same for a few rows over heads of up to 64 channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """A way to launch attention."""

    block_m: int
    """Rows of a matrix product: `rows` rows of the step times the query heads of one key-value head, padded."""
    rows: int
    """Rows of the step per program."""
    block_t: int
    """Cached positions per iteration."""
    block_d: int
    """Head dimension, padded to a power of two."""
    splits: int
    """Most programs among which the positions seen by a tile of rows are divided: this many are launched, and those
    without positions end at once."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Pipeline stages for prefetching keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Capacity of a device for programs."""

    multiprocessors: int = 128
    """The default is that of a large device, for the interpreter and for compiling ahead."""
    shared_kib: int = 100
    """Shared memory per multiprocessor."""


class Reading(NamedTuple):
    """Access of a program to a page."""

    bits: int = 16
    """Bits per number read."""
    planes: int = 1
    """Planes joined into a number."""
    corrected: bool = False
    """Whether GEAR's corrections are added, for which registers must be reserved."""


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
    """The launch configuration for a shape.

    Args:
        M: Rows of the step.
        group: Query heads of a key-value head, H / H_kv.
        kv_heads: H_kv.
        dim: D.
        seen: Most positions visible to a row: the capacity of the cache, or the window if smaller.
        reading: How a program reads a page.
        room: The device. Only `splits` depends on it.

    Returns:
        The configuration; it does not depend on positions.
    """
    bits, planes, corrected = reading
    block_d = max(DOT_CHANNELS, power_of_two(dim))
    few = M <= SPLIT_ROWS
    light = (bits, planes, dim) == (8, 1, 128)
    narrow = block_d <= 64 or light
    tile = WIDE_TILE_ROWS if block_d > 128 else NARROW_TILE_ROWS if narrow else TILE_ROWS
    if few:
        together = 1 if M == 1 else SPLIT_ROWS
        tile = min(max(DOT_ROWS, power_of_two(together * group)), tile, FEW_TILE_ROWS)
    widest = block_d > WIDEST
    if corrected or (widest and planes == 2):
        tile = DOT_ROWS
    block_m = max(tile, power_of_two(group))
    rows = 1 if M == 1 or (widest and corrected) else block_m // group
    block_t = WIDEST_BLOCK if widest else 64 if few and block_d <= 128 and not corrected else 32
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
        num_warps=8 if block_m >= 128 or widest or (few and bits == 8 and block_m == 2 * DOT_ROWS) else 4,
        num_stages=5 if light and not few else _stages(M, block_m, reading, widest=widest),
    )


def _splits(tiles: int, blocks: int, programs: int, most: int) -> int:
    """Splits per tile of rows, given the blocks that each tile sees and the number of concurrent programs.

    The programs run in waves over the device, each as long as its blocks plus the overhead. The number of splits whose
    waves end first is chosen; ties go to the smallest.
    """

    def cost(splits: int) -> float:
        return -(-tiles * splits // programs) * (-(-blocks // splits) + SPLIT_OVERHEAD)

    return min(range(1, max(1, min(most, MAX_SPLITS, blocks // MIN_BLOCKS)) + 1), key=cost)


def _stages(M: int, block_m: int, reading: Reading, *, widest: bool) -> int:
    """Pipeline stages. A block is addressed through its page's number, so each prefetched block takes two stages."""
    bits, planes, corrected = reading
    if planes == 2 and block_m >= TILE_ROWS:  # with two, joining the planes spills up to 40 bytes on sm_86 to sm_120
        return 1
    if widest and (corrected or M > 1):  # with more, blocks of several rows do not fit in shared memory
        return 2 if corrected or planes == 2 else 5
    verified = 1 < M <= SPLIT_ROWS and bits < 16 and not corrected
    if (M == 1 and block_m == DOT_ROWS) or (verified and block_m <= 2 * DOT_ROWS):
        return 2 * BLOCKS_AHEAD[bits] + 1
    if corrected or (M > SPLIT_ROWS and bits == 8):  # with more, registers spill
        return 2
    return 5


def options(config: LaunchConfig, major: int) -> dict[str, int]:
    """Further options of the compiler, for a device of this major compute capability."""
    few = config.block_d <= 64 and config.rows > 1 and config.block_m <= FEW_TILE_ROWS
    registers = REGISTERS if config.block_d > 128 else NARROW_REGISTERS if few else {}
    return {"maxnreg": registers[major]} if major in registers else {}
