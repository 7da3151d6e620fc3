"""Units of a mixture of experts: routing, activations in the order of experts, and products with the chosen ones.

The rows that go to an expert are its *segment*; a row and one of its experts are a *pair*. Segments stand one after the
other in ascending order of experts, each in row blocks of its own, so that the product of a segment with its expert's
matrix is that of a LINEAR instruction. What experts add to a row is summed in that order, however many rows a step has.
"""

from __future__ import annotations

from typing import Any

import numba

from runtime.backends.cpu.data.instructions import (
    Experts,
    Input,
    Linear,
    Matrix,
    Quantized,
    Residual,
    Route,
    Weights,
    Whole,
)
from runtime.backends.cpu.data.records import (
    BLOCK,
    COUNTS,
    EXPERT_BYTES,
    PAIR,
    PAIR_BYTES,
    SEGMENT,
    SEGMENT_BYTES,
    Pair,
    Segment,
)
from runtime.backends.cpu.kernels.activation import (
    GroupPlace,
    code_bytes,
    quantize_group,
    rotate_group,
    row_block,
    sizes_of,
    step_of,
)
from runtime.backends.cpu.kernels.compensate import Salient
from runtime.backends.cpu.kernels.residual import few_rows
from runtime.backends.cpu.kernels.rows import gate_by
from runtime.backends.cpu.kernels.views import (
    counts_at,
    expert_at,
    experts_at,
    gate_experts_at,
    header_at,
    pair_at,
    parameters_at,
    route_at,
    rows_of,
    score_at,
    segment_at,
    share_of,
    share_of_weights,
    spread_at,
    tiles_of_line,
)
from runtime.backends.cpu.machine.kernel import call_5, kernel
from runtime.backends.cpu.machine.unit import Unit, compiled_unit, made_unit
from runtime.backends.cpu.machine.vector import (
    add,
    exp,
    fill,
    fma,
    get_float,
    get_word,
    load_floats,
    max_lanes,
    mul,
    set_float,
    set_word,
    stack_words_128,
    store_floats,
    sum_lanes,
    zero_floats,
)
from runtime.backends.cpu.scratch import TILE_BYTES
from runtime.backends.cpu.units.products import (
    NO_COMPENSATION,
    Compensation,
    compensate_row,
    floats,
    floats_8,
    minimums_4,
    minimums_5,
    share_rows,
    trellis_2,
    trellis_3,
    trellis_4,
    two_levels_4,
    two_levels_6,
    uniform_3,
    uniform_4,
    uniform_5,
    uniform_8,
)
from runtime.backends.cpu.units.selection import MADE_BEFORE, choose


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


@compiled_unit
def score_experts(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Compute the logits of a router."""
    score_of, rows = score_at(i), rows_of(control, 0)
    first, last = share_of(rows * score_of.scores, part, parts)
    for item in range(first, last):
        row, number = item // score_of.scores, item % score_of.scores
        x = score_of.x.at + row * score_of.x.stride
        weight = score_of.weight + 4 * score_of.channels * number
        found = score(x, weight, score_of.channels)
        if score_of.bias != 0:
            found += get_float(score_of.bias + 4 * number)
        set_float(score_of.out.at + row * score_of.out.stride + 4 * number, found)


@compiled_unit
def route(i: int, control: int, _part: int, _parts: int, scratch: int) -> None:
    """Choose each row's experts, and group the rows by expert; one part."""
    of, rows = route_at(i), rows_of(control, 0)
    experts, count = of.experts - of.shared, of.chosen - of.shared
    for row in range(rows):
        logits = of.logits.at + row * of.logits.stride
        chosen, shares = of.chosen_at + 8 * of.chosen * row, of.shares_at + 4 * of.chosen * row
        ranks = logits
        if of.correction != 0:
            rank_experts(logits, of.correction, experts, of.sigmoids, scratch)
            ranks = scratch
        choose_experts(ranks, experts, count, chosen)
        share_out(logits, experts, count, of.sigmoids, of.normalized, of.scale, chosen, shares)
        for n in range(of.shared):
            set_word(chosen + 8 * (count + n), experts + n)
            share = sigmoid(get_float(logits + 4 * experts)) if of.gated else numba.float32(1.0)
            set_float(shares + 4 * (count + n), share)
    group_rows(of, rows, scratch)


@kernel
def _round(to: Input, at: int, pair: Pair, start: int, stop: int) -> None:
    """Quantize groups start .. stop - 1 of float32 [width] at an address to the slot of a pair."""
    padded, group, groups = sizes_of(to)
    lane = pair.slot - pair.block
    codes, scratch = to.rounded.codes + pair.block * code_bytes(padded), stack_words_128()
    for g in range(start, stop):
        channel = g * group
        width, factor = min(group, padded - channel), 4 * (pair.block * groups + g * pair.side + lane)
        place = GroupPlace(codes, pair.side, lane, channel, to.rounded.scales + factor, to.rounded.shifts + factor, 0)
        source = at + 4 * channel
        if to.rotated != 0:
            source = rotate_group(source, width, scratch)
        quantize_group(source, width, step_of(source, width), place)


@compiled_unit
def spread(i: int, _control: int, part: int, parts: int, _scratch: int) -> None:
    """Quantize the rows that each expert reads; a single row once for all of them."""
    of = spread_at(i)
    counts, to = counts_at(of.routes.counts), of.to
    _padded, _group, groups = sizes_of(to)
    once = counts.alone != 0 and of.by_slot == 0
    first, last = share_of(1 if once else counts.pairs, part, parts)
    for p in range(first, last):
        pair = pair_at(of.routes.pairs + PAIR_BYTES * p)
        row = pair.row if of.by_slot == 0 else pair.slot
        _round(to, of.x.at + row * of.x.stride, pair, 0, groups)


@compiled_unit
def gate_experts(i: int, _control: int, part: int, parts: int, _scratch: int) -> None:
    """The gate times an expert's share, and quantization of the result."""
    of = gate_experts_at(i)
    counts, to = counts_at(of.routes.counts), of.to
    padded, group, groups = sizes_of(to)
    first, last = share_of(counts.pairs * groups, part, parts)
    for item in range(first, last):
        pair, g = pair_at(of.routes.pairs + PAIR_BYTES * (item // groups)), item % groups
        source, out = of.x.at + pair.slot * of.x.stride, to.out.at + pair.slot * to.out.stride
        start, stop = g * group, min((g + 1) * group, padded)
        gate_by(of.form, of.limit, of.slopes, source, source + 4 * to.width, out, start, stop)
        share = fill(numba.float32(pair.share))
        for c in range(start, stop, 16):
            store_floats(out + 4 * c, mul(load_floats(out + 4 * c), share))
        for c in range(max(start, to.width), stop):
            set_float(out + 4 * c, numba.float32(0.0))
        _round(to, out, pair, g, g + 1)


@kernel
def _linear_of(of: Experts, number: int) -> Linear:
    """The product of a segment with its expert's matrix, as a LINEAR instruction."""
    alone = counts_at(of.routes.counts).alone != 0
    segment: Segment = segment_at(of.routes.segments + SEGMENT_BYTES * number)
    pair: Pair = pair_at(of.routes.pairs + PAIR_BYTES * segment.pair)
    own, sizes = expert_at(of.table + EXPERT_BYTES * segment.expert), of.sizes
    shape = (sizes.bits, sizes.tiles, sizes.blocks, sizes.groups, sizes.group_blocks)
    weights = Weights(own.codes, own.scales, own.zeros, 0, *shape, 0, 0)
    slot = 0 if alone and of.by_row != 0 else segment.first
    groups = 4 * slot * sizes.groups
    codes = of.x.codes + slot * code_bytes(BLOCK * sizes.blocks)
    x = Quantized(codes, of.x.scales + groups, of.x.shifts + groups, 0)
    codes = of.plain.codes + slot * code_bytes(BLOCK * sizes.blocks)
    plain = Quantized(codes, of.plain.scales + groups, of.plain.shifts + groups, 0)
    out = Matrix(of.out.at, of.out.stride)
    if of.sum.at == 0:
        out = Matrix(of.out.at + segment.first * of.out.stride, of.out.stride)
    at = pair.row if of.by_row != 0 else pair.slot
    values = Matrix(of.values.at + at * of.values.stride, of.values.stride)
    chosen = Matrix(of.chosen.at + at * of.chosen.stride, of.chosen.stride)
    residual = Residual(own.residual, own.residual_scales, sizes.residual_bits, sizes.stride, sizes.rows)
    bias = own.bias if of.sum.at == 0 else 0
    return Linear(weights, x, 0, out, bias, 0, of.total, residual, values, chosen, own.kept, Whole(0, 0, 0, 0), plain)


@kernel
def _multiply(one_row: Any, several_rows: Any, i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run an EXPERTS instruction.

    A part is a range of tiles of all segments, counted segment by segment; or, if the products are added to rows that
    several experts share, a range of tiles of each segment.
    """
    of = experts_at(i)
    counts = counts_at(of.routes.counts)
    side = tiles_of_line(of.sizes.residual_bits) if of.kept != 0 else 1
    lines = (of.sizes.tiles + side - 1) // side
    adds = of.sum.at != 0
    compensated = parameters_at(control).compensate != 0 and of.kept + of.total != 0
    by = NO_COMPENSATION
    if compensated and of.kept == 0:
        choice = choose(i, control, part, scratch) if of.by_row != 0 else MADE_BEFORE
        by = Compensation(header_at(i).inner, choice, scratch + TILE_BYTES)
    items = lines if adds else lines * counts.segments
    first, last = share_of_weights(items, part, parts) if counts.alone != 0 else share_of(items, part, parts)
    if first == last:
        return
    if of.fresh != 0:
        _clear_rows(of, rows_of(control, 0), side * first, min(side * last, of.sizes.tiles))
    begin, end = (0, counts.segments) if adds else (first // lines, (last - 1) // lines + 1)
    for number in range(begin, end):
        low, high = first, last
        if not adds:
            low, high = max(first - number * lines, 0), min(last - number * lines, lines)
        start, stop = side * low, min(side * high, of.sizes.tiles)
        linear, rows = _linear_of(of, number), segment_at(of.routes.segments + SEGMENT_BYTES * number).rows
        if rows == 1:
            one_row(linear, start, stop, by)
        else:
            several_rows(linear, start, stop, rows, scratch)
            if by.unit != 0:
                _compensate_rows(of, linear, number, start, stop, by)
        if compensated and of.kept != 0:
            call_5(header_at(i).inner, i, number, start, stop, scratch + TILE_BYTES)
        if adds:
            _add_to_rows(of, number, start, stop)


@kernel
def _clear_rows(of: Experts, rows: int, start: int, stop: int) -> None:
    """Set tiles of the rows that products are added to to zero."""
    for row in range(rows):
        for tile in range(start, stop):
            store_floats(of.sum.at + row * of.sum.stride + 64 * tile, zero_floats())


@kernel
def _compensate_rows(of: Experts, linear: Linear, number: int, start: int, stop: int, by: Compensation) -> None:
    """Compensate tiles start .. stop - 1 of a segment, each row by its own channels."""
    segment: Segment = segment_at(of.routes.segments + SEGMENT_BYTES * number)
    for n in range(segment.rows):
        pair: Pair = pair_at(of.routes.pairs + PAIR_BYTES * (segment.pair + n))
        at = pair.row if of.by_row != 0 else pair.slot
        salient = Salient(of.values.at + at * of.values.stride, of.chosen.at + at * of.chosen.stride, of.total)
        compensate_row(linear.residual, salient, linear.out.at + n * linear.out.stride, start, stop, by)


@kernel
def _add_to_rows(of: Experts, number: int, start: int, stop: int) -> None:
    """Add tiles of a segment's products, and each row's share of the bias, to the rows of the step."""
    segment: Segment = segment_at(of.routes.segments + SEGMENT_BYTES * number)
    bias = expert_at(of.table + EXPERT_BYTES * segment.expert).bias
    for n in range(segment.rows):
        pair: Pair = pair_at(of.routes.pairs + PAIR_BYTES * (segment.pair + n))
        to, source = of.sum.at + pair.row * of.sum.stride, of.out.at + n * of.out.stride
        share = fill(numba.float32(pair.share))
        for tile in range(start, stop):
            at, found = to + 64 * tile, load_floats(source + 64 * tile)
            if bias != 0:
                found = fma(share, load_floats(bias + 64 * tile), found)
            store_floats(at, add(load_floats(at), found))


def _experts(name: str, products: tuple[Any, Any]) -> Unit:
    """A unit of EXPERTS instructions, with the products of one form of matrices."""
    one_row, several_rows = products

    def multiply(i: int, control: int, part: int, parts: int, scratch: int) -> None:
        _multiply(one_row, several_rows, i, control, part, parts, scratch)

    return made_unit(name, multiply)


multiply_experts_3 = _experts("multiply_experts_3", uniform_3)
multiply_experts_4 = _experts("multiply_experts_4", uniform_4)
multiply_experts_5 = _experts("multiply_experts_5", uniform_5)
multiply_experts_8 = _experts("multiply_experts_8", uniform_8)
multiply_experts_minimums_4 = _experts("multiply_experts_minimums_4", minimums_4)
multiply_experts_minimums_5 = _experts("multiply_experts_minimums_5", minimums_5)
multiply_experts_two_levels_4 = _experts("multiply_experts_two_levels_4", two_levels_4)
multiply_experts_two_levels_6 = _experts("multiply_experts_two_levels_6", two_levels_6)
multiply_experts_floats = _experts("multiply_experts_floats", floats)
multiply_experts_floats_8 = _experts("multiply_experts_floats_8", floats_8)
multiply_trellis_experts_2 = _experts("multiply_trellis_experts_2", trellis_2)
multiply_trellis_experts_3 = _experts("multiply_trellis_experts_3", trellis_3)
multiply_trellis_experts_4 = _experts("multiply_trellis_experts_4", trellis_4)


def _share(bits: int) -> Unit:
    """The unit that compensates tiles first .. last - 1 of a segment by the channels that all rows share."""
    few = few_rows(bits)

    def share(i: int, number: int, first: int, last: int, scratch: int) -> None:
        of = experts_at(i)
        linear: Linear = _linear_of(of, number)
        rows = segment_at(of.routes.segments + SEGMENT_BYTES * number).rows
        share_rows(few, linear, rows, first, last, scratch)

    return made_unit(f"share_experts_{bits}", share)


share_experts_2, share_experts_4, share_experts_8, share_experts_16 = map(_share, (2, 4, 8, 16))
