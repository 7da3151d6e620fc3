"""Runs a recorded program: every thread walks the same instructions, does its share of each, and meets the others.

One call is one step of the whole model, so a token costs one hand-over to the threads and a few hundred barriers.
Nothing is allocated, and nothing returns to Python before the logits are there.
"""

from __future__ import annotations

import numba

from runtime.cpu import instructions as op
from runtime.cpu.attention import attend, finish_heads
from runtime.cpu.operands import operands, parameter, rows_of, share_of
from runtime.cpu.products import multiply
from runtime.cpu.sync import FAILED, TICKET, add_word, barrier, wait_for_ticket, write_word
from runtime.cpu.vector import (
    as_float,
    get_float,
    get_half,
    get_int,
    get_word,
    load_floats,
    load_halves,
    set_float,
    set_int,
    store_floats,
)
from runtime.kernels.activation.cpu import quantize_group
from runtime.kernels.attention.cpu import merge_splits
from runtime.kernels.gate.cpu import gate
from runtime.kernels.gemm.cpu import row_block
from runtime.kernels.norm.cpu import inverse_rms, scale_by
from runtime.kernels.select.budget import CHUNK
from runtime.kernels.select.cpu import (
    SELECT_APPROX,
    SELECT_EXACT,
    SELECT_STATIC,
    count_hits,
    select_approx,
    select_exact,
    select_random,
)

_FAILED = 8 * FAILED
_embed_operands, _gather_operands = operands(op.EMBED), operands(op.GATHER)
_norm_operands, _gate_operands, _merge_operands = operands(op.NORM), operands(op.GATE), operands(op.MERGE)
_select_operands = operands(op.SELECT)


@numba.njit(nogil=True)
def _embed(i: int, control: int, thread: int, threads: int) -> None:
    table, channels, out, out_stride = _embed_operands(i)
    tokens = parameter(control, op.TOKENS)
    first, last = share_of(rows_of(control, 0), thread, threads)
    for row in range(first, last):
        source = table + 2 * channels * numba.int64(get_int(tokens + 4 * row))
        c = 0
        while c + 16 <= channels:
            store_floats(out + row * out_stride + 4 * c, load_halves(source + 2 * c))
            c += 16
        while c < channels:
            set_float(out + row * out_stride + 4 * c, get_half(source + 2 * c))
            c += 1


@numba.njit(nogil=True)
def _gather_rows(i: int, control: int, thread: int, threads: int) -> None:
    x, x_stride, channels, out, out_stride = _gather_operands(i)
    wanted = parameter(control, op.LOGIT_ROWS)
    first, last = share_of(rows_of(control, 1), thread, threads)
    for row in range(first, last):
        source = x + x_stride * numba.int64(get_int(wanted + 4 * row))
        for c in range(0, channels, 16):
            store_floats(out + row * out_stride + 4 * c, load_floats(source + 4 * c))


@numba.njit(nogil=True)
def _quantize_groups(
    row: int, rows: int, width: int, start: int, stop: int, x: int, codes: int, scales: int, shifts: int, group: int
) -> None:
    """Quantize groups start .. stop - 1 of a row into the layout of its row block."""
    side = row_block(rows)
    padded = (width + 31) // 32 * 32
    groups = (padded + group - 1) // group
    block, lane = row // side, row % side
    for g in range(start, stop):
        at = g * group
        quantize_group(
            x + 4 * at,
            min(group, padded - at),
            codes + block * side * padded + side * at + 4 * lane,
            4 * side,
            scales + 4 * (side * (block * groups + g) + lane),
            shifts + 4 * (side * (block * groups + g) + lane),
        )


@numba.njit(nogil=True)
def _norm(i: int, control: int, thread: int, threads: int) -> None:
    x, x_stride, width, out, out_stride, codes, scales, shifts, group_blocks, which, weight, eps = _norm_operands(i)
    rows = rows_of(control, which)
    padded, group = (width + 31) // 32 * 32, 32 * group_blocks
    groups = (padded + group - 1) // group
    # Few rows: every thread computes the sum of squares, and takes its share of the groups.
    alone = rows >= threads
    first, last = share_of(rows, thread, threads) if alone else (0, rows)
    g0, g1 = (0, groups) if alone else share_of(groups, thread, threads)
    for row in range(first, last):
        source, to = x + row * x_stride, out + row * out_stride
        factor = inverse_rms(source, width, as_float(eps))
        scale_by(source, weight, to, g0 * group, min(g1 * group, padded), factor)
        _quantize_groups(row, rows, width, g0, g1, to, codes, scales, shifts, group)


@numba.njit(nogil=True)
def _gate(i: int, control: int, thread: int, threads: int) -> None:
    x, x_stride, width, out, out_stride, codes, scales, shifts, group_blocks, which = _gate_operands(i)
    rows = rows_of(control, which)
    padded, group = (width + 31) // 32 * 32, 32 * group_blocks
    groups = (padded + group - 1) // group
    first, last = share_of(rows * groups, thread, threads)
    for item in range(first, last):
        row, g = item // groups, item % groups
        source, to = x + row * x_stride, out + row * out_stride
        start, stop = g * group, min((g + 1) * group, padded)
        gate(source, source + 4 * width, to, start, stop)
        for c in range(max(start, width), stop):
            set_float(to + 4 * c, numba.float32(0.0))
        _quantize_groups(row, rows, width, g, g + 1, to, codes, scales, shifts, group)


@numba.njit(nogil=True)
def _merge(i: int, control: int, thread: int, threads: int) -> None:
    x, _, width, out, out_stride, codes, scales, shifts, group_blocks, which, heads, dim = _merge_operands(i)
    rows, splits = rows_of(control, which), parameter(control, op.SPLITS)
    padded, group = (width + 31) // 32 * 32, 32 * group_blocks
    groups = (padded + group - 1) // group
    part = 4 * ((dim + 15) // 16 * 16 + 16)
    # A group may cut a head in two, so heads are merged by the thread that has the row.
    first, last = share_of(rows, thread, threads)
    for row in range(first, last):
        for head in range(heads):
            at = x + (row * heads + head) * splits * part
            merge_splits(at, splits, part, dim, out + row * out_stride + 4 * head * dim)
        for c in range(width, padded):
            set_float(out + row * out_stride + 4 * c, numba.float32(0.0))
        _quantize_groups(row, rows, width, 0, groups, out + row * out_stride, codes, scales, shifts, group)


@numba.njit(nogil=True)
def _select(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    x, x_stride, width, k_chunk, total, chosen, chosen_stride, which, mode = _select_operands(i)[:9]
    b15, upper, lower, static, seed, layer, measure, hits = _select_operands(i)[9:]
    if parameter(control, op.COMPENSATE) == 0:
        return
    rows, positions = rows_of(control, which), parameter(control, op.POSITIONS)
    logit_rows = parameter(control, op.LOGIT_ROWS)
    chunks = (width + CHUNK - 1) // CHUNK
    full = min(CHUNK, k_chunk)
    # With recall to measure a row has to stay with one thread.
    first, last = share_of(rows if measure != 0 else rows * chunks, thread, threads)
    if measure != 0:
        first, last = first * chunks, last * chunks
    for item in range(first, last):
        row, chunk = item // chunks, item % chunks
        source, to = x + row * x_stride, chosen + row * chosen_stride + 4 * chunk * full
        start = chunk * CHUNK
        size = min(CHUNK, width - start)
        k = min(size, (k_chunk * size + CHUNK - 1) // CHUNK)
        finite = True
        if mode == SELECT_APPROX:
            finite = select_approx(source, start, size, k, as_float(b15), as_float(upper), as_float(lower), to)
        elif mode == SELECT_EXACT:
            finite = select_exact(source, start, size, k, to)
        elif mode == SELECT_STATIC:
            for c in range(k):
                set_int(to + 4 * c, get_int(static + 4 * (chunk * full + c)))
        else:
            step_row = numba.int64(get_int(logit_rows + 4 * row)) if which == 1 else row
            position = numba.int64(get_int(positions + 4 * step_row))
            select_random(seed, layer, position, start, size, k, to)
        if not finite:
            write_word(control + _FAILED, 1)
        if measure != 0 and chunk == chunks - 1:
            base = chosen + row * chosen_stride
            at = hits + 4 * row
            hits_here = count_hits(source, width, base, total, scratch)
            set_float(at, numba.float32(get_float(at) + numba.float32(hits_here) / numba.float32(total)))


@numba.njit(nogil=True)
def _run(control: int, thread: int, threads: int) -> None:
    program, count = parameter(control, op.PROGRAM), parameter(control, op.INSTRUCTIONS)
    scratch = parameter(control, op.SCRATCH) + thread * parameter(control, op.SCRATCH_STRIDE)
    for n in range(count):
        i = program + 8 * op.WIDTH * n
        operation = get_word(i)
        if operation == op.LINEAR:
            multiply(i, control, thread, threads, scratch)
        elif operation == op.NORM:
            _norm(i, control, thread, threads)
        elif operation == op.GATE:
            _gate(i, control, thread, threads)
        elif operation == op.SELECT:
            _select(i, control, thread, threads, scratch)
        elif operation == op.HEADS:
            finish_heads(i, control, thread, threads)
        elif operation == op.ATTEND:
            attend(i, control, thread, threads, scratch)
        elif operation == op.MERGE:
            _merge(i, control, thread, threads)
        elif operation == op.EMBED:
            _embed(i, control, thread, threads)
        else:
            _gather_rows(i, control, thread, threads)
        barrier(control, threads)


@numba.njit("void(int64, int64, int64)", nogil=True, cache=True, error_model="numpy")
def execute(control: int, thread: int, threads: int) -> None:
    """Run a program: once for thread 0, which starts the others; for those, each time it does, until they are to stop.

    One compiled function serves both, for it holds every kernel.

    Args:
        control: Address of the control block, which says where the program is.
        thread: This thread's number.
        threads: Number of threads.
    """
    if thread == 0:
        add_word(control + 8 * TICKET, 1)
        _run(control, thread, threads)
        return
    seen = numba.int64(0)
    while True:
        seen = wait_for_ticket(control, seen)
        if seen < 0:
            return
        _run(control, thread, threads)
