"""Units of a residual stream that is several (`models.spec.AltUpSpec`), and of gates that are cut."""

from __future__ import annotations

import math

import numba

from runtime.backends.cpu.kernels.rows import cap_floats, inverse_rms, mean_square
from runtime.backends.cpu.kernels.views import cut_at, level_at, rows_of, share_of, streams_at
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import (
    add,
    fill,
    fma,
    get_float,
    load_floats,
    maximum,
    mul,
    set_float,
    store_floats,
    sub,
    sum_lanes,
    zero_floats,
)


@compiled_unit
def level(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Rows times a number, and what makes them as large as others."""
    level = level_at(i)
    first, last = share_of(rows_of(control, 0), part, parts)
    for row in range(first, last):
        x, out, factor = level.x.at + row * level.x.stride, level.out.at + row * level.out.stride, level.scale
        if level.like.at != 0:
            like = mean_square(level.like.at + row * level.like.stride, level.width)
            own = max(mean_square(x, level.width), level.least)
            factor = numba.float32(factor * math.sqrt(like / own))
        factors = fill(numba.float32(factor))
        for c in range(0, 4 * level.padded, 64):
            y = mul(load_floats(x + c), factors)
            store_floats(out + c, add(load_floats(out + c), y) if level.accumulate != 0 else y)


@kernel
def _weigh(said: int, numbers: int, rows: int, weight: int, out: int, start: float) -> None:
    """float32 [rows] at `out`: start + weight [rows, numbers] times float32 [numbers] at `said`."""
    for row in range(rows):
        total = numba.float32(start)
        for n in range(numbers):
            total += get_float(weight + 4 * (row * numbers + n)) * get_float(said + 4 * n)
        set_float(out + 4 * row, total)


@compiled_unit
def streams(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """What streams take from each other, or of what a block made of the first.

    The scratch holds what the first one says, float32 [16], then sixteen channels of each stream, then what is taken.
    """
    of = streams_at(i)
    first, last = share_of(rows_of(control, 0), part, parts)
    S, held, taken = of.streams, scratch + 64, scratch + 64 + 64 * of.streams
    for row in range(first, last):
        x, kept = of.x.at + row * of.x.stride, of.first.at + row * of.first.stride
        factor = inverse_rms(x, of.width, of.eps)
        store_floats(scratch, zero_floats())
        for s in range(S):
            sums, weight = zero_floats(), of.router + 4 * s * of.padded
            for c in range(0, 4 * of.padded, 64):
                sums = fma(load_floats(x + c), load_floats(weight + c), sums)
            set_float(scratch + 4 * s, factor * sum_lanes(sums))
        cap_floats(scratch, 16, numba.float32(1.0))
        if of.corrects != 0:
            _weigh(scratch, S, S, of.weight, taken, numba.float32(1.0))
            for c in range(0, 4 * of.padded, 64):
                before = load_floats(kept + c)
                change = sub(load_floats(x + c), before)
                store_floats(x + c, before)
                for s in range(S):
                    at = x + 4 * s * of.padded + c
                    store_floats(at, fma(fill(get_float(taken + 4 * s)), change, load_floats(at)))
        else:
            _weigh(scratch, S, S * S, of.weight, taken, numba.float32(0.0))
            for c in range(0, 4 * of.padded, 64):
                for s in range(S):
                    store_floats(held + 64 * s, load_floats(x + 4 * s * of.padded + c))
                for s in range(S):
                    y = load_floats(held + 64 * s)
                    for t in range(S):
                        y = fma(fill(get_float(taken + 4 * (s * S + t))), load_floats(held + 64 * t), y)
                    store_floats(x + 4 * s * of.padded + c, y)
                store_floats(kept + c, load_floats(x + c))


@compiled_unit
def cut(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Gates less where they end, and none below 0; in place."""
    cut = cut_at(i)
    first, last = share_of(rows_of(control, 0), part, parts)
    width, whole = cut.width, cut.width // 16 * 16
    for row in range(first, last):
        x, sums = cut.x.at + row * cut.x.stride, zero_floats()
        for c in range(0, whole, 16):
            sums = add(load_floats(x + 4 * c), sums)
        total = sum_lanes(sums)
        for c in range(whole, width):
            total += get_float(x + 4 * c)
        mean = numba.float32(total / numba.float32(width))
        means, sums = fill(mean), zero_floats()
        for c in range(0, whole, 16):
            away = sub(load_floats(x + 4 * c), means)
            sums = fma(away, away, sums)
        total = sum_lanes(sums)
        for c in range(whole, width):
            total += (get_float(x + 4 * c) - mean) * (get_float(x + 4 * c) - mean)
        end = numba.float32(mean + cut.deviations * math.sqrt(total / numba.float32(width)))
        ends = fill(end)
        for c in range(0, whole, 16):
            store_floats(x + 4 * c, maximum(sub(load_floats(x + 4 * c), ends), zero_floats()))
        for c in range(whole, width):
            set_float(x + 4 * c, max(get_float(x + 4 * c) - end, numba.float32(0.0)))
