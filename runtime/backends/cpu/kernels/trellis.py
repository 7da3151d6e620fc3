"""Trellis-coded weights on the CPU: the states of 64 weights are cut out of words at once, and looked up as bytes.

A block holds `bits` vectors of words, lane r the stream of output channel r (`models.trellis`): word i of 32 input
channels, channel 0 in the lowest bits. The last channels' states reach into the next block's first word. Four
channels of a lane, with their states' 8 bits overlapping, fit a word, which is moved to where they begin; then each
byte of the lane takes its own state out of it. Where the processor has AVX-512 VBMI that is one instruction, and a
lookup among 128 levels another; elsewhere it is shifts, and eight lookups among sixteen levels. The highest bit of a
state is its level's sign: with an `ENTRY_OFFSET` of 128, too, the negative of a byte is that of its level.

The levels come out in the order of the uniform kernels' codes, 16 output channels side by side, four input channels of
each, and meet activations that were rotated like the weights. An output channel has one scale, applied last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from models.trellis import STATE_BITS, levels
from runtime.backends.cpu.data.instructions import Quantized
from runtime.backends.cpu.data.records import BLOCK, BLOCK_BYTES, ENTRY_BYTES, LINE
from runtime.backends.cpu.kernels.gemm import AHEAD, Tile, chains_type, emit_chains, no_chains, whole_sum
from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.emit import (
    BYTES,
    ENTRY_OFFSET,
    WORDS,
    Builder,
    call,
    constant,
    define,
    emit_lookup,
    load,
    offset,
    pointer,
    shift_left,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    broadcast,
    fill,
    fma,
    load_halves,
    mul,
    prefetch,
    to_floats,
    zero_floats,
)

_QUADS = BLOCK // 4
"""Vectors of a block: four input channels each."""
_WORD = 32


def _table(bits: int, first: int, count: int) -> Any:
    """Levels of `count` states from `first` on as bytes of a vector, as dot products of entries take them."""
    found = levels(bits)[first : first + count].astype(np.int64) + ENTRY_OFFSET
    return ir.Constant(BYTES, [int(found[i % count]) & 255 for i in range(64)])


def _emit_states(b: Builder, words: list[Any], bits: int, quad: int) -> Any:
    """States of four input channels of every lane, as bytes, from the words of a block and the one behind it."""
    number, start = divmod(4 * bits * quad, _WORD)
    word = words[number]
    if start + 3 * bits + STATE_BITS > _WORD:
        word, start = call(b, "llvm.fshr.v16i32", WORDS, words[number + 1], word, constant(WORDS, start)), 0
    shifts = [start + bits * c for c in range(4)]
    if isa.VBMI:
        control = ir.Constant(BYTES, [i // 4 % 2 * _WORD + shifts[i % 4] for i in range(64)])
        return call(b, "llvm.x86.avx512.pmultishift.qb.512", BYTES, control, b.bitcast(word, BYTES))
    found = constant(WORDS, 0)
    for c, shift in enumerate(shifts):
        by = shift - 8 * c
        moved = b.lshr(word, constant(WORDS, by)) if by >= 0 else b.shl(word, constant(WORDS, -by))
        found = b.or_(found, b.and_(moved, constant(WORDS, 0xFF << 8 * c)))
    return b.bitcast(found, BYTES)


def _emit_levels(b: Builder, states: Any, bits: int) -> Any:
    """The levels of 64 states."""
    zero = constant(BYTES, 0)
    if isa.VBMI:
        low, high = _table(bits, 0, 64), _table(bits, 64, 64)
        size = call(b, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, low, states, high)
    else:
        places = b.and_(states, constant(BYTES, 15))
        found = [emit_lookup(b, _table(bits, 16 * i, 16), places) for i in range(8)]
        for bit in (4, 5, 6):
            here = b.icmp_signed("<", shift_left(b, states, 7 - bit), zero)
            found = [b.select(here, above, below) for below, above in zip(found[::2], found[1::2], strict=True)]
        size = found[0]
    return b.select(b.icmp_signed("<", states, zero), b.sub(zero, size), size)


def _emit_block(b: Builder, codes: Any, behind: Any, bits: int) -> list[Any]:
    """A block's levels: eight vectors, each of four input channels of all 16 output channels."""
    words = [load(b, WORDS, offset(b, codes, LINE * i), LINE) for i in range(bits)]
    words.append(load(b, WORDS, behind, LINE))
    return [_emit_levels(b, _emit_states(b, words, bits, quad), bits) for quad in range(_QUADS)]


def _multiply(bits: int) -> Any:
    def emit(b: Builder, sums: Any, codes: Any, behind: Any, x: Any) -> Any:
        return emit_chains(b, sums, _emit_block(b, codes, behind, bits), x)

    emit.__name__ = f"multiply_trellis{bits}"
    emit.__doc__ = "Add the products of one block of codes with one row's activations."
    return define(chains_type, chains_type, types.int64, types.int64, types.int64)(emit)


def _decode(bits: int) -> Any:
    def emit(b: Builder, codes: Any, behind: Any, out: Any) -> None:
        for quad, vector in enumerate(_emit_block(b, codes, behind, bits)):
            b.store(b.bitcast(vector, WORDS), pointer(b, offset(b, out, LINE * quad)), align=LINE)

    emit.__name__ = f"decode_trellis{bits}"
    emit.__doc__ = "Write down the levels of a block."
    return define(types.void, types.int64, types.int64, types.int64)(emit)


def _tile_kernels(bits: int) -> tuple[Any, Any]:
    multiply, decode, block_bytes = _multiply(bits), _decode(bits), BLOCK_BYTES[bits]

    @kernel
    def gemv(tile: Tile, x: Quantized) -> Any:
        total, blocks, offsets = zero_floats(), tile.blocks, fill(np.float32(ENTRY_OFFSET))
        start, group = 0, 0
        while start < blocks:
            stop = min(start + tile.group_blocks, blocks)
            sums = no_chains()
            for block in range(start, stop):
                base = tile.codes + block * block_bytes
                for line in range(0, block_bytes, LINE):
                    prefetch(base + AHEAD + line)
                behind = base + block_bytes if block + 1 < blocks else tile.levels
                sums = multiply(sums, base, behind, x.codes + BLOCK * block)
            total = fma(to_floats(whole_sum(sums)), broadcast(x.scales + 4 * group), total)
            total = fma(offsets, broadcast(x.shifts + 4 * group), total)
            start, group = stop, group + 1
        return mul(total, load_halves(tile.scales))

    @kernel
    def decode_tile(codes: int, zeros: int, blocks: int, out: int) -> None:
        for block in range(blocks):
            base = codes + block * block_bytes
            behind = base + block_bytes if block + 1 < blocks else zeros
            decode(base, behind, out + block * ENTRY_BYTES)

    return gemv, decode_tile


gemv_trellis_tile_2, decode_trellis_tile_2 = _tile_kernels(2)
"""Sixteen outputs of a 2-bit matrix, and a tile's levels; arguments as of those of 4 bits."""
gemv_trellis_tile_3, decode_trellis_tile_3 = _tile_kernels(3)
"""The same of 3 bits."""
gemv_trellis_tile_4, decode_trellis_tile_4 = _tile_kernels(4)
"""Sixteen outputs of a 4-bit matrix, arguments as of `gemm.gemv_tile_4`; and a tile's levels, written down.

Args of the latter: addresses of the tile's codes, and of a line of zeros; K / 32; and the address of bytes [K / 4, 16,
4], aligned to 64 bytes.
"""
