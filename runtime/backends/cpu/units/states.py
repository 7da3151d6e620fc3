"""Units of layers with a state: they mix a step's rows with what the state remembers, and add them to it."""

from __future__ import annotations

import numba

from runtime.backends.cpu.data.instructions import Convolve, State
from runtime.backends.cpu.kernels.rounding import round_groups, sizes_of
from runtime.backends.cpu.kernels.views import convolve_at, parameters_at, rows_of, share_of
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import (
    fma,
    get_int,
    load_floats,
    mul,
    set_float,
    store_floats,
    zero_floats,
)


@kernel
def _recent(state: State, slot: int, position: int) -> int:
    """Address of what is kept of a recent token."""
    return state.recent + 4 * state.inputs * (slot * state.ring + position % state.ring)


@kernel
def _convolve_tile(convolve: Convolve, slot: int, position: int, row: int, rows: int, c: int) -> None:
    """Sixteen channels from c on of a slot's rows, the first of which is at a position."""
    width, taps, state = 4 * convolve.to.width, convolve.taps, convolve.state
    padded, _, _ = sizes_of(convolve.to)
    for i in range(rows):
        x, total = convolve.x.at + (row + i) * convolve.x.stride + 4 * c, zero_floats()
        if convolve.bias != 0:
            total = load_floats(convolve.bias + 4 * c)
        for j in range(max(0, taps - 1 - position - i), taps):
            back = taps - 1 - j
            if back <= i:
                before = x - back * convolve.x.stride
                seen = mul(load_floats(before), load_floats(before + 2 * width))
            else:
                seen = load_floats(_recent(state, slot, position + i - back) + 4 * c)
            total = fma(seen, load_floats(convolve.weight + 4 * (j * padded + c)), total)
        out = convolve.to.out.at + (row + i) * convolve.to.out.stride + 4 * c
        store_floats(out, mul(total, load_floats(x + width)))
    for i in range(max(0, rows - state.ring), rows):
        x = convolve.x.at + (row + i) * convolve.x.stride + 4 * c
        entering = mul(load_floats(x), load_floats(x + 2 * width))
        store_floats(_recent(state, slot, position + i) + 4 * c, entering)


@compiled_unit
def convolve(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """The gated short convolution of a step's rows, and quantization of its output: a part of the channels."""
    convolve, step = convolve_at(i), parameters_at(control)
    to, all_rows = convolve.to, rows_of(control, 0)
    padded, group, groups = sizes_of(to)
    g0, g1 = share_of(groups, part, parts)
    start, stop, row = g0 * group, min(g1 * group, padded), 0
    while row < all_rows:
        slot, end = get_int(step.slots + 4 * row), row + 1
        while end < all_rows and get_int(step.slots + 4 * end) == slot:
            end += 1
        position = numba.int64(get_int(step.positions + 4 * row))
        for c in range(start, min(stop, to.width), 16):
            _convolve_tile(convolve, numba.int64(slot), position, row, end - row, c)
        row = end
    for row in range(all_rows):
        for c in range(max(start, to.width), stop):
            set_float(to.out.at + row * to.out.stride + 4 * c, numba.float32(0.0))
        round_groups(to, row, all_rows, g0, g1)
