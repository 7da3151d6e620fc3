"""Trellis-coded weights on the CPU: the states of 64 weights at once, and their levels as bytes.

A block holds `bits` vectors, lane r of the stream of output channel r (`models.trellis`), in one of two orders.

Where the processor has AVX-512 VBMI, vector i holds word i of 32 input channels, channel 0 in the lowest bits. The last
channels' states reach into the next block's first word. Four channels of a lane, with their states' 8 bits
overlapping, fit a word, which is moved to where they begin; one instruction has each byte of the lane take its own
state out of it, and another looks up half of the levels. The other half has the other sign.

Elsewhere each byte of a lane has a stream of its own, of 8 channels: byte c of vector i is byte i of the stream of
channels 8 c to 8 c + 7, and what follows it is the beginning of byte c + 1's. So a state's low and high four bits are
each cut out of four streams by one or two shifts, and a level's parts are looked up among sixteen. The activations of a
block come in the order that this brings about (`runtime.backends.cpu.kernels.activation.ROTATED_ORDER`).

The levels come out in the order of the uniform kernels' codes, 16 output channels side by side, four input channels of
each, and meet activations that were rotated like the weights. Like codes they are unsigned, `_OFFSET` larger than they
are. An output channel has one scale, applied last.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from models.trellis import LARGEST_LEVEL, MULTIPLIERS, STATE_BITS, coarse, levels
from runtime.backends.cpu.data.instructions import Quantized
from runtime.backends.cpu.data.records import BLOCK, BLOCK_BYTES, ENTRY_BYTES, LINE
from runtime.backends.cpu.kernels.gemm import AHEAD, Tile, chains_type, emit_chains, no_chains
from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.emit import (
    BYTES,
    ENTRY_OFFSET,
    WORDS,
    Builder,
    call,
    constant,
    define,
    emit_dot4,
    emit_joined_bytes,
    emit_lookup,
    emit_wrapped_lookup,
    load,
    offset,
    pointer,
    words16,
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
_FOURS = np.arange(16)
_OFFSET = LARGEST_LEVEL + 1
_CHAINS = range(4 if isa.VBMI else 1)
"""Chains of sums. Where levels take long, one is enough, and more would want more registers than there are."""
_APART = isa.VECTORS in ("neon", "avxvnni")
"""Whether fine parts, twice a state's low bits less 15, are summed up by dot products of these bits alone: where such a
product is one instruction, that is one less than looking parts up and adding them."""


def _table(entries: Any) -> Any:
    """Whole numbers as bytes of a vector, repeated."""
    return ir.Constant(BYTES, [int(entries[i % len(entries)]) & 255 for i in range(64)])


def _emit_states(b: Builder, words: list[Any], bits: int, quad: int) -> Any:
    """States of four input channels of every lane, as bytes, from the words of a block and the one behind it."""
    number, start = divmod(4 * bits * quad, _WORD)
    word = words[number]
    if start + 3 * bits + STATE_BITS > _WORD:
        word, start = call(b, "llvm.fshr.v16i32", WORDS, words[number + 1], word, constant(WORDS, start)), 0
    shifts = [start + bits * c for c in range(4)]
    control = ir.Constant(BYTES, [i // 4 % 2 * _WORD + shifts[i % 4] for i in range(64)])
    return call(b, "llvm.x86.avx512.pmultishift.qb.512", BYTES, control, b.bitcast(word, BYTES))


def _emit_levels(b: Builder, states: Any, last: Any, bits: int, shift: int) -> Any:
    """The levels of 64 states, `shift` larger: those of the first 128, or of their complements.

    Only seven bits of a place are read, so `last`, 127, less a state stands for its complement.
    """
    found = levels(bits).astype(np.int64) + shift
    negative = b.icmp_signed("<", states, constant(BYTES, 0))
    places = b.select(negative, b.sub(last, states), states)
    low, high = _table(found[:64]), _table(found[64:128])
    size = call(b, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, low, places, high)
    return b.select(negative, b.sub(constant(BYTES, 2 * shift & 255), size), size)


def _emit_four(b: Builder, streams: list[Any], first: int) -> Any:
    """Bits `first` to `first` + 3 of every byte's stream, as bytes."""
    number, start = divmod(first, 8)
    found = b.lshr(streams[number], constant(BYTES, start)) if start else streams[number]
    if start > 4:
        found = b.or_(found, b.shl(streams[number + 1], constant(BYTES, 8 - start)))
    return b.and_(found, constant(BYTES, 15)) if start != 4 else found


def _emit_parts(b: Builder, streams: list[Any], bits: int, channel: int, shift: int) -> tuple[Any, Any]:
    """Of a channel of every stream: the low four bits of its states, and their coarse parts, `shift` larger."""
    first, multiplier = bits * channel, MULTIPLIERS[bits]
    if isa.VECTORS.startswith("avx") or first % 4 == 0:  # AVX has no shifts of bytes
        low, high = (_emit_four(b, streams, first + half) for half in (0, 4))
    else:  # Neon inserts bits above others, and adds what it shifts, in one instruction each; `generic` tries it out
        states = emit_joined_bytes(b, streams[first // 8], streams[first // 8 + 1], first % 8)
        low, high = b.and_(states, constant(BYTES, 15)), b.lshr(states, constant(BYTES, 4))
    places = b.add(emit_lookup(b, _table((multiplier * _FOURS + multiplier // 2) % 16), low), high)
    return low, emit_wrapped_lookup(b, _table(coarse() + shift), places)


def _emit_words(b: Builder, codes: Any, behind: Any, bits: int) -> list[Any]:
    """The vectors of a block, and what follows them."""
    words = [load(b, WORDS, offset(b, codes, LINE * i), LINE) for i in range(bits)]
    following = load(b, WORDS, behind, LINE)
    if not isa.VBMI:
        following = call(b, "llvm.fshr.v16i32", WORDS, following, words[0], constant(WORDS, 8))
    return [*words, following]


def _emit_block(b: Builder, words: list[Any], bits: int, shift: int) -> Iterator[Any]:
    """A block's levels, `shift` larger: eight vectors, each of four input channels of all 16 output channels."""
    if isa.VBMI:
        # Not known to LLVM, which would make a complement of the difference: two instructions under a mask, not one.
        last = b.asm(ir.FunctionType(BYTES, [BYTES]), "", "=v,0", [constant(BYTES, 127)], side_effect=False)
        return (_emit_levels(b, _emit_states(b, words, bits, quad), last, bits, shift) for quad in range(_QUADS))
    streams, fine = [b.bitcast(word, BYTES) for word in words], _table(2 * _FOURS - 15 + shift)
    parts = (_emit_parts(b, streams, bits, channel, 0) for channel in range(_QUADS))
    return (b.add(emit_lookup(b, fine, low), part) for low, part in parts)


def _multiply(bits: int) -> Any:
    def emit(b: Builder, sums: Any, codes: Any, behind: Any, x: Any) -> Any:
        words = _emit_words(b, codes, behind, bits)
        if not _APART:
            return emit_chains(b, sums, _emit_block(b, words, bits, _OFFSET), x, emit_dot4, _CHAINS)
        streams = [b.bitcast(word, BYTES) for word in words]
        for channel in range(_QUADS):
            at = offset(b, x, 4 * channel)
            for chain, vector in enumerate(_emit_parts(b, streams, bits, channel, _OFFSET - 15)):
                sums = emit_chains(b, sums, [vector], at, emit_dot4, range(chain, chain + 1))
        return sums

    emit.__name__ = f"multiply_trellis{bits}"
    emit.__doc__ = "Add the products of one block of codes with one row's activations."
    return define(chains_type, chains_type, types.int64, types.int64, types.int64)(emit)


def _decode(bits: int) -> Any:
    def emit(b: Builder, codes: Any, behind: Any, out: Any) -> None:
        for quad, vector in enumerate(_emit_block(b, _emit_words(b, codes, behind, bits), bits, ENTRY_OFFSET)):
            b.store(b.bitcast(vector, WORDS), pointer(b, offset(b, out, LINE * quad)), align=LINE)

    emit.__name__ = f"decode_trellis{bits}"
    emit.__doc__ = "Write down the levels of a block."
    return define(types.void, types.int64, types.int64, types.int64)(emit)


@define(words16, chains_type)
def _whole(b: Builder, sums: Any) -> Any:
    """The sum of the chains, of which the first counts twice where it is that of low bits."""
    first, *rest = (b.extract_value(sums, chain) for chain in range(chains_type.count))
    return reduce(b.add, rest, b.add(first, first) if _APART else first)


def _tile_kernels(bits: int) -> tuple[Any, Any]:
    multiply, decode, block_bytes = _multiply(bits), _decode(bits), BLOCK_BYTES[bits]

    @kernel
    def gemv(tile: Tile, x: Quantized) -> Any:
        total, blocks, offsets = zero_floats(), tile.blocks, fill(np.float32(_OFFSET))
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
            total = fma(to_floats(_whole(sums)), broadcast(x.scales + 4 * group), total)
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
