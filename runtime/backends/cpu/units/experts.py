"""Units of a mixture of experts: routing, activations in the order of experts, and products with the chosen ones.

The rows that go to an expert are its *segment*; a row and one of its experts are a *pair*. Segments stand one after the
other in ascending order of experts, each in row blocks of its own, so that the product of a segment with its expert's
matrix is that of a LINEAR instruction. What experts add to a row is summed in that order, however many rows a step has.
"""

from __future__ import annotations

from typing import Any

import numba

from runtime.backends.cpu.data.experts import EXPERT_BYTES, PAIR_BYTES, SEGMENT_BYTES, Pair, Segment
from runtime.backends.cpu.data.instructions import Experts, Input, Linear, Matrix, Quantized, Residual, Weights, Whole
from runtime.backends.cpu.data.sizes import BLOCK
from runtime.backends.cpu.kernels.activation import GroupPlace, code_bytes, quantize_group, step_of
from runtime.backends.cpu.kernels.compensate import (
    Columns,
    Salient,
    compensate,
    compensate_halves,
    gather_2,
    gather_4,
    gather_8,
)
from runtime.backends.cpu.kernels.gate import gate_by
from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.kernels.residual import few_rows
from runtime.backends.cpu.kernels.routing import choose_experts, group_rows, rank_experts, score, share_out, sigmoid
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
from runtime.backends.cpu.machine.calls import call_5
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.sync import wait_for
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import (
    add,
    fill,
    fma,
    get_float,
    load_floats,
    mul,
    set_float,
    set_word,
    store_floats,
    zero_floats,
)
from runtime.backends.cpu.scratch import TILE_BYTES
from runtime.backends.cpu.units.products import one_3, one_4, several_3, several_4
from runtime.backends.cpu.units.rows import row_block_at
from runtime.backends.cpu.units.selection import MADE_BEFORE, choose


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
    padded, group = (to.width + 31) // 32 * 32, 32 * to.group_blocks
    groups, lane = (padded + group - 1) // group, pair.slot - pair.block
    codes = to.rounded.codes + pair.block * code_bytes(padded)
    for g in range(start, stop):
        channel = g * group
        width, factor = min(group, padded - channel), 4 * (pair.block * groups + g * pair.side + lane)
        place = GroupPlace(codes, pair.side, lane, channel, to.rounded.scales + factor, to.rounded.shifts + factor, 0)
        quantize_group(at + 4 * channel, width, step_of(at + 4 * channel, width), place)


@compiled_unit
def spread(i: int, _control: int, part: int, parts: int, _scratch: int) -> None:
    """Quantize the rows that each expert reads; a single row once for all of them."""
    of = spread_at(i)
    counts, to = counts_at(of.routes.counts), of.to
    padded, group = (to.width + 31) // 32 * 32, 32 * to.group_blocks
    first, last = share_of(1 if counts.alone != 0 else counts.pairs, part, parts)
    for p in range(first, last):
        pair = pair_at(of.routes.pairs + PAIR_BYTES * p)
        _round(to, of.x.at + pair.row * of.x.stride, pair, 0, (padded + group - 1) // group)


@compiled_unit
def gate_experts(i: int, _control: int, part: int, parts: int, _scratch: int) -> None:
    """The gate times an expert's share, and quantization of the result."""
    of = gate_experts_at(i)
    counts, to = counts_at(of.routes.counts), of.to
    padded, group = (to.width + 31) // 32 * 32, 32 * to.group_blocks
    groups = (padded + group - 1) // group
    first, last = share_of(counts.pairs * groups, part, parts)
    for item in range(first, last):
        pair, g = pair_at(of.routes.pairs + PAIR_BYTES * (item // groups)), item % groups
        source, out = of.x.at + pair.slot * of.x.stride, to.out.at + pair.slot * to.out.stride
        start, stop = g * group, min((g + 1) * group, padded)
        gate_by(of.gelu, of.limit, source, source + 4 * to.width, out, start, stop)
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
    weights = Weights(
        own.codes, own.scales, own.zeros, 0, sizes.bits, sizes.tiles, sizes.blocks, sizes.groups, sizes.group_blocks, 0
    )
    slot = 0 if alone and of.by_row != 0 else segment.first
    groups = 4 * slot * sizes.groups
    codes = of.x.codes + slot * code_bytes(BLOCK * sizes.blocks)
    x = Quantized(codes, of.x.scales + groups, of.x.shifts + groups, 0)
    out = Matrix(of.out.at, of.out.stride)
    if of.sum.at == 0:
        out = Matrix(of.out.at + segment.first * of.out.stride, of.out.stride)
    at = pair.row if of.by_row != 0 else pair.slot
    values = Matrix(of.values.at + at * of.values.stride, of.values.stride)
    chosen = Matrix(of.chosen.at + at * of.chosen.stride, of.chosen.stride)
    residual = Residual(own.residual, own.residual_scales, sizes.residual_bits, sizes.stride, sizes.rows)
    bias = own.bias if of.sum.at == 0 else 0
    return Linear(weights, x, 0, out, bias, 0, of.total, residual, values, chosen, own.kept, Whole(0, 0, 0))


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
    choice = MADE_BEFORE
    if compensated and of.kept == 0 and of.by_row != 0:
        choice = choose(i, control, part, scratch)
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
            one_row(linear, start, stop, compensated and of.kept == 0, choice)
        else:
            several_rows(linear, start, stop, rows, scratch)
        if compensated:
            if choice.at != 0:
                wait_for(choice.at, choice.number)
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


@compiled_unit
def multiply_experts_3(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the EXPERTS instruction at address i: uniform codes of 3 bits."""
    _multiply(one_3, several_3, i, control, part, parts, scratch)


@compiled_unit
def multiply_experts_4(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the EXPERTS instruction at address i: uniform codes of 4 bits."""
    _multiply(one_4, several_4, i, control, part, parts, scratch)


@kernel
def _compensate(by: Any, i: int, number: int, first: int, last: int, sums: int) -> None:
    """Compensate tiles first .. last - 1 of a segment, each row by its own channels."""
    of = experts_at(i)
    linear: Linear = _linear_of(of, number)
    segment: Segment = segment_at(of.routes.segments + SEGMENT_BYTES * number)
    for n in range(segment.rows):
        pair: Pair = pair_at(of.routes.pairs + PAIR_BYTES * (segment.pair + n))
        at = pair.row if of.by_row != 0 else pair.slot
        salient = Salient(of.values.at + at * of.values.stride, of.chosen.at + at * of.chosen.stride, of.total)
        by(linear.residual, salient, Columns(16 * first, 16 * last), linear.out.at + n * linear.out.stride, sums)


@routine
def _by_2(residual: Residual, salient: Salient, columns: Columns, out: int, sums: int) -> None:
    compensate(gather_2, 2, residual, salient, columns, out, sums)


@routine
def _by_4(residual: Residual, salient: Salient, columns: Columns, out: int, sums: int) -> None:
    compensate(gather_4, 4, residual, salient, columns, out, sums)


@routine
def _by_8(residual: Residual, salient: Salient, columns: Columns, out: int, sums: int) -> None:
    compensate(gather_8, 8, residual, salient, columns, out, sums)


@routine
def _by_16(residual: Residual, salient: Salient, columns: Columns, out: int, sums: int) -> None:
    compensate_halves(residual, salient, columns, out, sums)


@compiled_unit
def compensate_experts_2(i: int, number: int, first: int, last: int, sums: int) -> None:
    """Compensate tiles first .. last - 1 of a segment of the EXPERTS instruction at address i, with 2-bit residuals."""
    _compensate(_by_2, i, number, first, last, sums)


@compiled_unit
def compensate_experts_4(i: int, number: int, first: int, last: int, sums: int) -> None:
    """The same for residuals of 4 bits."""
    _compensate(_by_4, i, number, first, last, sums)


@compiled_unit
def compensate_experts_8(i: int, number: int, first: int, last: int, sums: int) -> None:
    """The same for residuals of 8 bits."""
    _compensate(_by_8, i, number, first, last, sums)


@compiled_unit
def compensate_experts_16(i: int, number: int, first: int, last: int, sums: int) -> None:
    """The same for residuals in half precision."""
    _compensate(_by_16, i, number, first, last, sums)


_few_2, _few_4, _few_8, _few_16 = map(few_rows, (2, 4, 8, 16))


@kernel
def _share(few: Any, i: int, number: int, first: int, last: int, scratch: int) -> None:
    """Compensate tiles first .. last - 1 of a segment by the channels that all rows share."""
    of = experts_at(i)
    linear: Linear = _linear_of(of, number)
    rows = segment_at(of.routes.segments + SEGMENT_BYTES * number).rows
    side = row_block(rows)
    for row in range(0, rows, side):
        out = linear.out.at + row * linear.out.stride
        few(linear, row_block_at(linear, row), side, min(side, rows - row), out, first, last, scratch)


@compiled_unit
def share_experts_2(i: int, number: int, first: int, last: int, scratch: int) -> None:
    """Add the 2-bit residuals that all rows share, of tiles first .. last - 1 of a segment, to its products."""
    _share(_few_2, i, number, first, last, scratch)


@compiled_unit
def share_experts_4(i: int, number: int, first: int, last: int, scratch: int) -> None:
    """The same for residuals of 4 bits."""
    _share(_few_4, i, number, first, last, scratch)


@compiled_unit
def share_experts_8(i: int, number: int, first: int, last: int, scratch: int) -> None:
    """The same for residuals of 8 bits."""
    _share(_few_8, i, number, first, last, scratch)


@compiled_unit
def share_experts_16(i: int, number: int, first: int, last: int, scratch: int) -> None:
    """The same for residuals in half precision."""
    _share(_few_16, i, number, first, last, scratch)
