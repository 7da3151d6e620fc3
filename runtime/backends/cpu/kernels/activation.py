"""INT8 quantization of activations, group by group or with one scale for a token, laid out for the integer dot product.

Four consecutive channels of a row form a quad of bytes; the quads of `row_block` rows stand side by side, so that the
matrix product finds the same channels of all its rows next to each other:

    codes   int8  [rows / row_block, K / 4, row_block, 4]
    scales  fp32  [rows / row_block, G, row_block]
    shifts  fp32  [rows / row_block, G, row_block] = -scale * sum of the group's codes, which a zero-point multiplies
    sums    int32 [rows / row_block, G, row_block] = sum of the group's codes, where all groups share a token's scale

Where there are tile registers (`runtime.backends.cpu.machine.amx`), blocks of 16 rows have their codes as registers
load them, int8 [rows / 16, K / 64, 16, 64]; K is filled up to whole pieces of 64 with bytes that nobody wrote.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from llvmlite import ir

from runtime.backends.cpu.data.instructions import Input
from runtime.backends.cpu.data.records import PIECE
from runtime.backends.cpu.machine import amx, isa
from runtime.backends.cpu.machine.emit import FLOATS, I32, Builder, define, floats16
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.vector import (
    absolute,
    add,
    fill,
    hadamard,
    load_floats,
    max_lanes,
    maximum,
    mul,
    rounded,
    set_float,
    set_int,
    stack_words_128,
    store_floats,
    store_quads,
    sub,
    sum_lanes,
    zero_floats,
)


@routine
def row_block(rows: int) -> int:
    """The row block for a step with this many rows."""
    if rows == 1:
        return 1
    if rows <= 4:
        return 4
    return 8 if rows <= 8 else 16


@routine
def in_registers(side: int) -> bool:
    """Whether row blocks of this many rows have their codes in the order of tile registers."""
    return amx.AVAILABLE and side == amx.SIDE


@routine
def row_step(side: int) -> int:
    """Bytes from a row's quad to that of the next row in its row block of `side` rows."""
    return PIECE if in_registers(side) else 4


@routine
def quad_step(side: int) -> int:
    """Bytes from a row's quad to its next one, within a piece."""
    return 4 if in_registers(side) else 4 * side


@routine
def code_bytes(channels: int) -> int:
    """Bytes of a row's codes, of whole blocks of 32 channels."""
    return (channels + PIECE - 1) // PIECE * PIECE if amx.AVAILABLE else channels


@routine
def quad_at(codes: int, side: int, channel: int) -> int:
    """Address of the quad with a channel, a multiple of 4, of the first row of a row block.

    Args:
        codes: Address of the row block's codes.
        side: Its rows.
        channel: The quad's first one.
    """
    if in_registers(side):
        return codes + channel // PIECE * (PIECE * side) + channel % PIECE
    return codes + side * channel


class GroupPlace(NamedTuple):
    """Destination of one group of one row."""

    codes: int  # address of the first quad of its row block
    side: int  # rows of the row block
    row: int  # row in it
    first: int  # the group's first channel
    scale: int  # address of its scale
    shift: int  # address of its shift
    sum: int  # address of the sum of its codes; 0: it is not wanted


@kernel
def step_of(x: int, width: int) -> Any:
    """The scale of float32 [width] at address x, a multiple of 16 channels: max |x| / 127."""
    largest = zero_floats()
    for i in range(0, width, 16):
        largest = maximum(largest, absolute(load_floats(x + 4 * i)))
    return numba.float32(max_lanes(largest) / numba.float32(127.0))


@kernel
def quantize_group(x: int, width: int, step: Any, to: GroupPlace) -> None:
    """Quantize one group of one row, codes rounded to nearest even.

    Args:
        x: Address of float32 [width].
        width: Channels, a multiple of 16.
        step: float32, its scale: `step_of` the group, or of the whole row.
        to: Where it goes.
    """
    inverse = numba.float32(0.0)
    if step > numba.float32(1.1754944e-38):
        inverse = numba.float32(numba.float32(1.0) / step)
    factor = fill(inverse)
    total = zero_floats()
    row, stride = row_step(to.side) * to.row, quad_step(to.side)
    for i in range(0, width, 16):
        code = rounded(mul(load_floats(x + 4 * i), factor))
        total = add(total, code)
        store_quads(quad_at(to.codes, to.side, to.first + i) + row, stride, code)
    set_float(to.scale, step)
    whole = sum_lanes(total)
    set_float(to.shift, numba.float32(-step * whole))
    if to.sum != 0:
        set_int(to.sum, numba.int32(whole))


_SIGNS = (0, 1, 2, 4, 5, 6, 8, 9, 10, 15)
"""Places among 16 whose sign a rotation keeps: those where i0 i1 + i2 i3 of the place's bits is even."""


@define(floats16, floats16)
def _signed(b: Builder, x: Any) -> Any:
    """Change the signs that a rotation changes."""
    return b.fmul(x, ir.Constant(FLOATS, [1.0 if i in _SIGNS else -1.0 for i in range(16)]))


ROTATED_ORDER = tuple(range(32)) if isa.VBMI else tuple(place // 4 + 8 * (place % 4) for place in range(32))
"""The rotated channel of a block at each of its places, as products with trellises read them."""


def _ordered(half: int) -> Any:
    def emit(b: Builder, x: Any, y: Any) -> Any:
        own = ROTATED_ORDER[16 * half : 16 * half + 16]
        return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, 16), list(own)))

    emit.__name__ = f"ordered_{half}"
    emit.__doc__ = "The first or second 16 channels of a block, of all of them in two vectors, in their order."
    return define(floats16, floats16, floats16)(emit)


_ordered_0, _ordered_1 = _ordered(0), _ordered(1)


@routine
def _store_block(out: int, x: Any, y: Any, factor: Any) -> None:
    """Write a block of 32 rotated channels."""
    x, y = mul(x, factor), mul(y, factor)
    store_floats(out, _ordered_0(x, y))
    store_floats(out + 64, _ordered_1(x, y))


@kernel
def rotate_group(x: int, width: int, out: int) -> int:
    """Rotate a group of 64 or 32 channels (`models.trellis.rotation`).

    Args:
        x: Address of float32 [width].
        width: Its channels.
        out: Address for the rotated ones, in `ROTATED_ORDER`.

    Returns:
        `out`.
    """
    a, b = hadamard(_signed(load_floats(x))), hadamard(_signed(load_floats(x + 64)))
    if width == 32:
        _store_block(out, add(a, b), sub(a, b), fill(numba.float32(32**-0.5)))
        return out
    c, d = hadamard(_signed(load_floats(x + 128))), hadamard(_signed(load_floats(x + 192)))
    factor = fill(numba.float32(0.125))
    e, f, g, h = add(a, b), sub(a, b), sub(c, d), add(c, d)  # the last sixteen have all signs changed
    _store_block(out, add(e, g), add(f, h), factor)
    _store_block(out + 128, sub(e, g), sub(f, h), factor)
    return out


@kernel
def sizes_of(to: Input) -> tuple[int, int, int]:
    """Channels padded to whole blocks, channels of a group, and number of groups."""
    padded, group = (to.width + 31) // 32 * 32, max(16, 32 * to.group_blocks)
    return padded, group, (padded + group - 1) // group


@kernel
def round_groups(to: Input, row: int, rows: int, start: int, stop: int) -> None:
    """Quantize groups start .. stop - 1 of a row of `to` into the layout of its row block.

    If groups share a scale, the whole row must be complete.
    """
    padded, group, groups = sizes_of(to)
    side, x = row_block(rows), to.out.at + row * to.out.stride
    block, lane = row // side, row % side
    codes, scratch = to.rounded.codes + block * side * code_bytes(padded), stack_words_128()
    shared = step_of(x, padded) if to.per_token != 0 else numba.float32(0.0)
    for g in range(start, stop):
        at, factor = g * group, 4 * (side * (block * groups + g) + lane)
        own, width, total = to.rounded, min(group, padded - at), 0
        if own.sums != 0:
            total = own.sums + factor
        place = GroupPlace(codes, side, lane, at, own.scales + factor, own.shifts + factor, total)
        source = x + 4 * at
        if to.rotated != 0:
            source = rotate_group(source, width, scratch)
        step = shared if to.per_token != 0 else step_of(source, width)
        quantize_group(source, width, step, place)
