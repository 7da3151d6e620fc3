"""Routing of a mixture of experts: a router's logits, the experts that a row goes to, and rows grouped by expert."""

from __future__ import annotations

from typing import Any

import numba

from runtime.backends.cpu.data.experts import COUNTS, PAIR, PAIR_BYTES, SEGMENT, SEGMENT_BYTES
from runtime.backends.cpu.data.instructions import Route
from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    exp,
    fill,
    fma,
    get_float,
    get_word,
    load_floats,
    max_lanes,
    set_float,
    set_word,
    sum_lanes,
    zero_floats,
)


def _field(record: Any, name: str) -> int:
    """Byte offset of a field."""
    return int(record.fields[name][1])


_PAIRS, _SEGMENTS, _ALONE = (_field(COUNTS, name) for name in ("pairs", "segments", "alone"))
_EXPERT, _FIRST, _PAIR, _ROWS = (_field(SEGMENT, name) for name in ("expert", "first", "pair", "rows"))
_ROW, _OF, _SLOT, _BLOCK, _SIDE, _SHARE = (
    _field(PAIR, name) for name in ("row", "expert", "slot", "block", "side", "share")
)


@kernel
def score(x: int, weight: int, channels: int) -> float:
    """The product of two float32 [channels], zero-padded to a multiple of 32, at addresses x and weight."""
    even, odd = zero_floats(), zero_floats()
    for i in range(0, channels, 32):
        even = fma(load_floats(x + 4 * i), load_floats(weight + 4 * i), even)
        odd = fma(load_floats(x + 4 * i + 64), load_floats(weight + 4 * i + 64), odd)
    return sum_lanes(add(even, odd))


@kernel
def rank_experts(logits: int, correction: int, experts: int, sigmoids: int, ranks: int) -> None:
    """Add a correction to the scores of all experts.

    Args:
        logits: Address of float32 [experts].
        correction: Likewise.
        experts: E.
        sigmoids: Whether scores are sigmoids, else a softmax.
        ranks: Address of float32 [experts], written.
    """
    highest = get_float(logits)
    for e in range(1, experts):
        highest = max(highest, get_float(logits + 4 * e))
    total = numba.float32(0.0)
    for e in range(experts):
        total += _exp(get_float(logits + 4 * e) - highest)
    for e in range(experts):
        logit = get_float(logits + 4 * e)
        scored = sigmoid(logit) if sigmoids != 0 else numba.float32(_exp(logit - highest) / total)
        set_float(ranks + 4 * e, numba.float32(scored + get_float(correction + 4 * e)))


@kernel
def choose_experts(ranks: int, experts: int, chosen: int, out: int) -> None:
    """Choose the experts with the highest ranks; the first of equal ones.

    Args:
        ranks: Address of float32 [experts].
        experts: E.
        chosen: Number of experts to choose.
        out: Address of int64 [chosen], ascending, written.
    """
    for n in range(chosen):
        best, largest = -1, numba.float32(0.0)
        for e in range(experts):
            value = get_float(ranks + 4 * e)
            if best < 0 or value > largest:
                taken = False
                for other in range(n):
                    taken = taken or get_word(out + 8 * other) == e
                if not taken:
                    best, largest = e, value
        at = n
        while at > 0 and get_word(out + 8 * (at - 1)) > best:
            set_word(out + 8 * at, get_word(out + 8 * (at - 1)))
            at -= 1
        set_word(out + 8 * at, best)


@kernel
def share_out(
    logits: int, experts: int, chosen: int, sigmoids: int, normalized: int, scale: float, numbers: int, shares: int
) -> None:
    """Compute the shares of chosen experts.

    Args:
        logits: Address of float32 [experts].
        experts: E.
        chosen: Number of chosen experts.
        sigmoids: Whether scores are sigmoids, else a softmax.
        normalized: Whether the shares add up to 1 before they are scaled.
        scale: Their factor.
        numbers: Address of int64 [chosen], the chosen ones.
        shares: Address of float32 [chosen], written.
    """
    highest = get_float(logits + 4 * get_word(numbers))
    for n in range(1, chosen):
        highest = max(highest, get_float(logits + 4 * get_word(numbers + 8 * n)))
    total = numba.float32(0.0)
    for n in range(chosen):
        logit = get_float(logits + 4 * get_word(numbers + 8 * n))
        share = sigmoid(logit) if sigmoids != 0 else _exp(logit - highest)
        set_float(shares + 4 * n, share)
        total += share
    if normalized == 0:
        total = numba.float32(1.0 if sigmoids != 0 else 0.0)
        for e in range(0 if sigmoids != 0 else experts):
            total += _exp(get_float(logits + 4 * e) - highest)
    for n in range(chosen):
        set_float(shares + 4 * n, numba.float32(get_float(shares + 4 * n) / total * scale))


@kernel
def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), float32."""
    one = numba.float32(1.0)
    return numba.float32(one / (one + _exp(-numba.float32(x))))


@kernel
def _exp(x: float) -> float:
    """The exponential of a float32."""
    return max_lanes(exp(fill(numba.float32(x))))


@kernel
def group_rows(of: Route, rows: int, scratch: int) -> None:
    """Group the rows by expert: writes counts, segments and pairs.

    Args:
        of: The instruction, whose rows have chosen their experts.
        rows: Rows of the step.
        scratch: Address of int64 [2, E].
    """
    sizes, numbers, to = scratch, scratch + 8 * of.experts, of.to
    for e in range(of.experts):
        set_word(sizes + 8 * e, 0)
    for p in range(rows * of.chosen):
        at = sizes + 8 * get_word(of.chosen_at + 8 * p)
        set_word(at, get_word(at) + 1)
    slot, first, number = 0, 0, 0
    for e in range(of.experts):
        count, segment = get_word(sizes + 8 * e), to.segments + SEGMENT_BYTES * number
        if count > 0:
            set_word(segment + _EXPERT, e)
            set_word(segment + _FIRST, slot)
            set_word(segment + _PAIR, first)
            set_word(segment + _ROWS, count)
            set_word(numbers + 8 * e, number)
            set_word(sizes + 8 * e, 0)
            side = row_block(count)
            slot, first, number = slot + (count + side - 1) // side * side, first + count, number + 1
    set_word(to.counts + _PAIRS, first)
    set_word(to.counts + _SEGMENTS, number)
    set_word(to.counts + _ALONE, 1 if rows == 1 else 0)
    for p in range(rows * of.chosen):
        e = get_word(of.chosen_at + 8 * p)
        segment, n = to.segments + SEGMENT_BYTES * get_word(numbers + 8 * e), get_word(sizes + 8 * e)
        set_word(sizes + 8 * e, n + 1)
        side, begin = row_block(get_word(segment + _ROWS)), get_word(segment + _FIRST)
        pair = to.pairs + PAIR_BYTES * (get_word(segment + _PAIR) + n)
        set_word(pair + _ROW, p // of.chosen)
        set_word(pair + _OF, e)
        set_word(pair + _SLOT, begin + n)
        set_word(pair + _BLOCK, begin + n // side * side)
        set_word(pair + _SIDE, side)
        set_float(pair + _SHARE, get_float(of.shares_at + 4 * p))
