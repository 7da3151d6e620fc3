"""Units of layers with a state: the gated short convolution, and the gated delta rule or Mamba-2."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.data.instructions import Convolve, DeltaRule, Mix, State
from runtime.backends.cpu.kernels.activation import round_groups, sizes_of
from runtime.backends.cpu.kernels.rows import gate as gate_channels
from runtime.backends.cpu.kernels.rows import norm_head, softplus
from runtime.backends.cpu.kernels.views import (
    convolve_at,
    delta_rule_at,
    finish_at,
    mix_at,
    parameters_at,
    rows_of,
    share_of,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import (
    add,
    broadcast,
    div,
    exp,
    fill,
    fma,
    get_float,
    get_int,
    load_floats,
    mul,
    set_float,
    store_floats,
    sub,
    zero_floats,
)


@kernel
def shares_of(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    one = fill(numba.float32(1.0))
    return div(one, add(one, exp(sub(zero_floats(), x))))


@kernel
def inverse_length(x: int, width: int) -> float:
    """1 / sqrt(sum of squares + 1e-6) of float32 [width] at an address."""
    total = numba.float32(1e-6)
    for i in range(0, 4 * width, 4):
        total += get_float(x + i) * get_float(x + i)
    return numba.float32(1.0 / math.sqrt(total))


@kernel
def copy_columns(source: int, stride: int, target: int, rows: int) -> None:
    """Copy sixteen columns float32 [rows], `stride` bytes apart, side by side."""
    for i in range(rows):
        store_floats(target + 64 * i, load_floats(source + stride * i))


class Columns(NamedTuple):
    """Sixteen columns of a head's matrix."""

    at: int  # address of float32 [rows, 16]
    stride: int  # bytes between rows
    rows: int  # dk


class Scaled(NamedTuple):
    """A query or key of a head, Dk channels."""

    at: int  # address of float32 [Dk]
    factor: float  # what they are to be multiplied by


@kernel
def learn(columns: Columns, k: Scaled, v: Any, beta: float, decay: float, q: Scaled, mamba: bool) -> Any:
    """Sixteen columns S become decay S + k beta (v - decay Sᵀk), in place; in Mamba-2 decay S + k beta v.

    Args:
        columns: S.
        k: The key.
        v: Sixteen values.
        beta: How much of the old values they replace.
        decay: How much of S is left.
        q: The query.
        mamba: Whether nothing is forgotten for v.

    Returns:
        Sᵀq afterwards.
    """
    at, stride, rows = columns
    even, odd = zero_floats(), zero_floats()
    asked = 0 if mamba else rows
    for i in range(0, asked - 1, 2):
        even = fma(load_floats(at + stride * i), broadcast(k.at + 4 * i), even)
        odd = fma(load_floats(at + stride * (i + 1)), broadcast(k.at + 4 * i + 4), odd)
    if asked % 2 != 0:
        even = fma(load_floats(at + stride * (rows - 1)), broadcast(k.at + 4 * rows - 4), even)
    left = fill(numba.float32(decay))
    known = mul(add(even, odd), fill(numba.float32(decay * k.factor)))
    change = mul(sub(v, known), fill(numba.float32(beta * k.factor)))
    even, odd = zero_floats(), zero_floats()
    for i in range(0, rows - 1, 2):
        one = fma(broadcast(k.at + 4 * i), change, mul(left, load_floats(at + stride * i)))
        other = fma(broadcast(k.at + 4 * i + 4), change, mul(left, load_floats(at + stride * (i + 1))))
        store_floats(at + stride * i, one)
        store_floats(at + stride * (i + 1), other)
        even, odd = fma(one, broadcast(q.at + 4 * i), even), fma(other, broadcast(q.at + 4 * i + 4), odd)
    if rows % 2 != 0:
        last = at + stride * (rows - 1)
        one = fma(broadcast(k.at + 4 * rows - 4), change, mul(left, load_floats(last)))
        store_floats(last, one)
        even = fma(one, broadcast(q.at + 4 * rows - 4), even)
    return mul(add(even, odd), fill(numba.float32(q.factor)))


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
        slot, end = numba.int64(get_int(step.slots + 4 * row)), _end_of_slot(step.slots, row, all_rows)
        position = numba.int64(get_int(step.positions + 4 * row))
        for c in range(start, min(stop, to.width), 16):
            _convolve_tile(convolve, slot, position, row, end - row, c)
        row = end
    for row in range(all_rows):
        for c in range(max(start, to.width), stop):
            set_float(to.out.at + row * to.out.stride + 4 * c, numba.float32(0.0))
        round_groups(to, row, all_rows, g0, g1)


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
        if mix.bias != 0:
            total = load_floats(mix.bias + 4 * c)
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
            step = softplus(add(load_floats(x + 4 * heads + h), load_floats(mix.dt + h)))
            beta = mul(shares_of(load_floats(x + h)), fill(numba.float32(mix.most)))
            store_floats(out + h, step if mix.mamba != 0 else beta)
            store_floats(out + wide + h, exp(mul(load_floats(mix.decay + h), step)))
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
def _read(rule: DeltaRule, slot: int, before: int, row: int, i: int) -> int:
    """Address of what `Mix` wrote of the token at position + i."""
    if i >= 0:
        return rule.x.at + (row + i) * rule.x.stride
    return rule.before.at + (slot * rule.waiting + before + i) * rule.before.stride


@kernel
def _delta_rule_head(rule: DeltaRule, slot: int, position: int, row: int, rows: int, head: int, scratch: int) -> None:
    """The outputs of a value head, and its matrix."""
    state, Dk, Dv = rule.state, rule.key_dim, rule.dim
    before, absorbs = _waiting(state, slot, position), get_int(state.absorbs + 4 * slot)
    q = 4 * Dk * (head // (rule.heads // rule.key_heads))
    k, v = q + 4 * Dk * rule.key_heads, 8 * Dk * rule.key_heads + 4 * Dv * head
    beta = (rule.channels + 15) // 16 * 64 + 4 * head
    decay, stride = beta + (rule.heads + 15) // 16 * 64, (Dv + 15) // 16 * 64
    columns, mamba = scratch + (8 * rule.rows + 63) // 64 * 64, rule.skip != 0
    for i in range(-before, rows):
        x, lengths = _read(rule, slot, before, row, i), scratch + 8 * (before + i)
        set_float(lengths, numba.float32(1.0) if mamba else inverse_length(x + k, Dk))
        if i >= 0:
            set_float(lengths + 4, numba.float32(1.0) if mamba else inverse_length(x + q, Dk) * rule.scale)
    for c in range(0, 4 * Dv, 64):
        at, step = state.matrices + (slot * rule.heads + head) * Dk * stride + c, stride
        for i in range(-before, rows):
            if (i == -before and absorbs == 0) or (i == 0 and absorbs == 1):
                copy_columns(at, step, columns, Dk)
                at, step = columns, numba.int64(64)
            x, lengths = _read(rule, slot, before, row, i), scratch + 8 * (before + i)
            factor = get_float(lengths + 4) if i >= 0 else numba.float32(0.0)
            y = learn(
                Columns(at, step, Dk),
                Scaled(x + k, get_float(lengths)),
                load_floats(x + v + c),
                get_float(x + beta),
                get_float(x + decay),
                Scaled(x + q, factor),
                mamba,
            )
            if mamba:
                y = fma(load_floats(x + v + c), fill(numba.float32(get_float(rule.skip + 4 * head))), y)
            if i >= 0:
                out = rule.out.at + (row + i) * rule.out.stride + 4 * Dv * head + c
                _store(out, y, Dv - c // 4, columns + 64 * Dk)


@compiled_unit
def delta_rule(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """The gated delta rule of a step's rows, or Mamba-2: a part of the value heads."""
    rule, step = delta_rule_at(i), parameters_at(control)
    all_rows, row = rows_of(control, 0), 0
    first, last = share_of(rule.heads, part, parts)
    while row < all_rows:
        end, slot = _end_of_slot(step.slots, row, all_rows), numba.int64(get_int(step.slots + 4 * row))
        position = numba.int64(get_int(step.positions + 4 * row))
        for head in range(first, last):
            _delta_rule_head(rule, slot, position, row, end - row, head, scratch)
        row = end


@compiled_unit
def finish(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """RMSNorm of each head's outputs, times silu(gate), or in Mamba-2 of these, and quantization."""
    finish = finish_at(i)
    to, dim = finish.to, finish.dim
    padded, _, groups = sizes_of(to)
    first, last = share_of(rows_of(control, 0), part, parts)
    for row in range(first, last):
        x, out = finish.x.at + row * finish.x.stride, to.out.at + row * to.out.stride
        if finish.mamba != 0:
            gate_channels(finish.gate.at + row * finish.gate.stride, x, out, 0, padded)
            for at in range(0, 4 * finish.heads * dim if finish.gain != 0 else 0, 4 * dim):
                norm_head(out + at, finish.gain + at, dim, finish.eps)
        else:
            for head in range(finish.heads):
                norm_head(x + 4 * head * dim, finish.gain, dim, finish.eps)
            gate_channels(finish.gate.at + row * finish.gate.stride, x, out, 0, padded)
        for c in range(to.width, padded):
            set_float(out + 4 * c, numba.float32(0.0))
        round_groups(to, row, rows_of(control, 0), 0, groups)
