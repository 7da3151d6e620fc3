"""Units of the gated delta rule: its inputs, its matrices, and what becomes of its outputs."""

from __future__ import annotations

from typing import Any

import numba

from runtime.backends.cpu.data.instructions import Mix, Recur, State
from runtime.backends.cpu.kernels.delta import (
    Columns,
    Scaled,
    copy_columns,
    decays_of,
    inverse_length,
    learn,
    shares_of,
)
from runtime.backends.cpu.kernels.gate import gate as gate_channels
from runtime.backends.cpu.kernels.norm import norm_head
from runtime.backends.cpu.kernels.rounding import round_groups, sizes_of
from runtime.backends.cpu.kernels.views import finish_at, mix_at, parameters_at, recur_at, rows_of, share_of
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import (
    add,
    div,
    exp,
    fill,
    fma,
    get_float,
    get_int,
    load_floats,
    set_float,
    store_floats,
    sub,
    zero_floats,
)


@kernel
def _recent(state: State, slot: int, position: int) -> int:
    """Address of what is kept of a recent token."""
    return state.recent + 4 * state.inputs * (slot * state.ring + position % state.ring)


@kernel
def _waiting(state: State, slot: int, position: int) -> int:
    """Tokens of a slot before a position that its matrices had not absorbed before the step."""
    return position - numba.int64(get_int(state.absorbed + 4 * slot))


@kernel
def _end_of_slot(slots: int, row: int, rows: int) -> int:
    """The row behind the last of those of a slot that begin at a row."""
    slot, end = get_int(slots + 4 * row), row + 1
    while end < rows and get_int(slots + 4 * end) == slot:
        end += 1
    return end


@kernel
def _entering(mix: Mix, slot: int, position: int, row: int, i: int) -> int:
    """Address of what enters the state of the token at position + i: a row of the step, or a token before."""
    if i >= 0:
        return mix.x.at + (row + i) * mix.x.stride
    return _recent(mix.state, slot, position + i)


@kernel
def _mixed(mix: Mix, slot: int, before: int, row: int, i: int) -> int:
    """Address of the output of the token at position + i, of which `before` are not absorbed."""
    if i >= 0:
        return mix.out.at + (row + i) * mix.out.stride
    return mix.before.at + (slot * mix.waiting + before + i) * mix.before.stride


@kernel
def _store(out: int, value: Any, count: int, spare: int) -> None:
    """Store the first `count` of sixteen floats; `spare` is the address of room for all."""
    if count >= 16:
        store_floats(out, value)
        return
    store_floats(spare, value)
    for j in range(0, 4 * count, 4):
        set_float(out + j, get_float(spare + j))


@kernel
def _mix_tile(mix: Mix, slot: int, position: int, row: int, rows: int, c: int, scratch: int) -> None:
    """Sixteen channels from c on of the tokens before that are not absorbed, and of a slot's rows."""
    before, taps, width, one = _waiting(mix.state, slot, position), mix.taps, mix.channels, fill(numba.float32(1.0))
    padded = (width + 15) // 16 * 16
    for i in range(0 if c + 16 <= mix.keys else -before, rows):
        total = zero_floats()
        for j in range(max(0, taps - 1 - position - i), taps):
            seen = load_floats(_entering(mix, slot, position, row, i - (taps - 1) + j) + 4 * c)
            total = fma(seen, load_floats(mix.weight + 4 * (j * padded + c)), total)
        silu = div(total, add(one, exp(sub(zero_floats(), total))))
        store_floats(_mixed(mix, slot, before, row, i) + 4 * c, silu)
    for i in range(max(0, rows - mix.state.ring), rows):
        x = load_floats(_entering(mix, slot, position, row, i) + 4 * c)
        _store(_recent(mix.state, slot, position + i) + 4 * c, x, width - c, scratch)


@kernel
def _mix_heads(mix: Mix, slot: int, position: int, row: int, rows: int) -> None:
    """Beta and decay of each value head, of the same tokens."""
    before, heads, start = _waiting(mix.state, slot, position), mix.heads, 4 * mix.channels
    wide, padded = (heads + 15) // 16 * 64, (mix.channels + 15) // 16 * 64
    for i in range(-before, rows):
        x, out = _entering(mix, slot, position, row, i) + start, _mixed(mix, slot, before, row, i) + padded
        for h in range(0, 4 * heads, 64):
            store_floats(out + h, shares_of(load_floats(x + h)))
            a = add(load_floats(x + 4 * heads + h), load_floats(mix.dt + h))
            store_floats(out + wide + h, decays_of(a, load_floats(mix.decay + h)))
    for i in range(max(0, rows - mix.state.ring), rows):
        x, kept = _entering(mix, slot, position, row, i) + start, _recent(mix.state, slot, position + i) + start
        for j in range(0, 8 * heads, 4):
            set_float(kept + j, get_float(x + j))


@compiled_unit
def mix(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """What a delta rule reads: a part of the channels, the numbers of heads being the last."""
    mix, step = mix_at(i), parameters_at(control)
    tiles, all_rows, row = (mix.channels + 15) // 16, rows_of(control, 0), 0
    first, last = share_of(tiles + 1, part, parts)
    while row < all_rows:
        end, slot = _end_of_slot(step.slots, row, all_rows), numba.int64(get_int(step.slots + 4 * row))
        position = numba.int64(get_int(step.positions + 4 * row))
        for tile in range(first, last):
            if tile < tiles:
                _mix_tile(mix, slot, position, row, end - row, 16 * tile, scratch)
            else:
                _mix_heads(mix, slot, position, row, end - row)
        row = end


@kernel
def _read(recur: Recur, slot: int, before: int, row: int, i: int) -> int:
    """Address of what `Mix` wrote of the token at position + i."""
    if i >= 0:
        return recur.x.at + (row + i) * recur.x.stride
    return recur.before.at + (slot * recur.waiting + before + i) * recur.before.stride


@kernel
def _recur_head(recur: Recur, slot: int, position: int, row: int, rows: int, head: int, scratch: int) -> None:
    """The outputs of a value head, and its matrix."""
    state, Dk, Dv = recur.state, recur.key_dim, recur.dim
    before, absorbs = _waiting(state, slot, position), get_int(state.absorbs + 4 * slot)
    q = 4 * Dk * (head // (recur.heads // recur.key_heads))
    k, v = q + 4 * Dk * recur.key_heads, 8 * Dk * recur.key_heads + 4 * Dv * head
    beta = (recur.channels + 15) // 16 * 64 + 4 * head
    decay, stride = beta + (recur.heads + 15) // 16 * 64, (Dv + 15) // 16 * 64
    columns = scratch + (8 * recur.rows + 63) // 64 * 64
    for i in range(-before, rows):
        x, lengths = _read(recur, slot, before, row, i), scratch + 8 * (before + i)
        set_float(lengths, inverse_length(x + k, Dk))
        if i >= 0:
            set_float(lengths + 4, inverse_length(x + q, Dk) * recur.scale)
    for c in range(0, 4 * Dv, 64):
        at, step = state.matrices + (slot * recur.heads + head) * Dk * stride + c, stride
        for i in range(-before, rows):
            if (i == -before and absorbs == 0) or (i == 0 and absorbs == 1):
                copy_columns(at, step, columns, Dk)
                at, step = columns, numba.int64(64)
            x, lengths = _read(recur, slot, before, row, i), scratch + 8 * (before + i)
            factor = get_float(lengths + 4) if i >= 0 else numba.float32(0.0)
            y = learn(
                Columns(at, step, Dk),
                Scaled(x + k, get_float(lengths)),
                load_floats(x + v + c),
                get_float(x + beta),
                get_float(x + decay),
                Scaled(x + q, factor),
            )
            if i >= 0:
                out = recur.out.at + (row + i) * recur.out.stride + 4 * Dv * head + c
                _store(out, y, Dv - c // 4, columns + 64 * Dk)


@compiled_unit
def recur(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """The gated delta rule of a step's rows: a part of the value heads."""
    recur, step = recur_at(i), parameters_at(control)
    all_rows, row = rows_of(control, 0), 0
    first, last = share_of(recur.heads, part, parts)
    while row < all_rows:
        end, slot = _end_of_slot(step.slots, row, all_rows), numba.int64(get_int(step.slots + 4 * row))
        position = numba.int64(get_int(step.positions + 4 * row))
        for head in range(first, last):
            _recur_head(recur, slot, position, row, end - row, head, scratch)
        row = end


@compiled_unit
def finish(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """RMSNorm of each head's outputs, times silu(gate), and quantization."""
    finish = finish_at(i)
    to, dim = finish.to, finish.dim
    padded, _, groups = sizes_of(to)
    first, last = share_of(rows_of(control, 0), part, parts)
    for row in range(first, last):
        x, out = finish.x.at + row * finish.x.stride, to.out.at + row * to.out.stride
        for head in range(finish.heads):
            norm_head(x + 4 * head * dim, finish.gain, dim, finish.eps)
        gate_channels(finish.gate.at + row * finish.gate.stride, x, out, 0, padded)
        for c in range(to.width, padded):
            set_float(out + 4 * c, numba.float32(0.0))
        round_groups(to, row, rows_of(control, 0), 0, groups)
