"""Runs a recorded program: every thread walks the same instructions, does its share of each, and meets the others.

One call is one step of the whole model, so a token costs one hand-over to the threads and a few hundred barriers.
Nothing is allocated, and nothing returns to Python before the logits are there.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types

from runtime.cpu import instructions as op
from runtime.cpu.emit import I64, Builder, define, load, offset
from runtime.cpu.sync import FAILED, TICKET, add_word, barrier, wait_for_ticket, write_word
from runtime.cpu.vector import (
    add,
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
from runtime.kernels.attention.cpu import SPAN, attend_split, merge_splits
from runtime.kernels.cache.cpu import store_key, store_value
from runtime.kernels.compensate.cpu import compensate
from runtime.kernels.gate.cpu import gate
from runtime.kernels.gemm.cpu import (
    gemm_tile_3x4,
    gemm_tile_3x8,
    gemm_tile_3x16,
    gemm_tile_4x4,
    gemm_tile_4x8,
    gemm_tile_4x16,
    row_block,
)
from runtime.kernels.gemv.cpu import BLOCK_BYTES, gemv_tile_3, gemv_tile_4
from runtime.kernels.norm.cpu import inverse_rms, norm_head, scale_by
from runtime.kernels.rope.cpu import rotate_head
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

_BYTES_3, _BYTES_4 = BLOCK_BYTES[3], BLOCK_BYTES[4]
_FAILED = 8 * FAILED
_GEMM_SCRATCH = 16 * 64
"""Bytes at the start of a thread's scratch that hold a tile of 16 rows of outputs."""


def _operands(operation: int) -> Any:
    """Intrinsic that reads all operands of an instruction, in the order of `OPERANDS`."""
    count = len(op.OPERANDS[operation])

    def emit(b: Builder, address: Any) -> Any:
        result = ir.Constant(ir.ArrayType(I64, count), ir.Undefined)
        for i in range(count):
            result = b.insert_value(result, load(b, I64, offset(b, address, 8 * (i + 1)), 8), i)
        return result

    emit.__name__ = f"operands{operation}"
    emit.__doc__ = "Operands of the instruction at the address."
    return define(types.UniTuple(types.int64, count), types.int64)(emit)


_embed_operands, _gather_operands = _operands(op.EMBED), _operands(op.GATHER)
_norm_operands, _gate_operands, _merge_operands = _operands(op.NORM), _operands(op.GATE), _operands(op.MERGE)
_select_operands, _linear_operands = _operands(op.SELECT), _operands(op.LINEAR)
_heads_operands, _attend_operands = _operands(op.HEADS), _operands(op.ATTEND)


@numba.njit(nogil=True)
def _parameter(control: int, word: int) -> int:
    return get_word(control + 8 * word)


@numba.njit(nogil=True)
def _rows(control: int, which: int) -> int:
    return get_word(control + 8 * (op.R_ROWS if which == 1 else op.M_ROWS))


@numba.njit(nogil=True)
def _share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """The thread's range of `count` equal items."""
    return count * thread // threads, count * (thread + 1) // threads


@numba.njit(nogil=True)
def _embed(i: int, control: int, thread: int, threads: int) -> None:
    table, channels, out, out_stride = _embed_operands(i)
    tokens = _parameter(control, op.TOKENS)
    first, last = _share(_rows(control, 0), thread, threads)
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
    wanted = _parameter(control, op.LOGIT_ROWS)
    first, last = _share(_rows(control, 1), thread, threads)
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
    rows = _rows(control, which)
    padded, group = (width + 31) // 32 * 32, 32 * group_blocks
    groups = (padded + group - 1) // group
    # Few rows: every thread computes the sum of squares, and takes its share of the groups.
    alone = rows >= threads
    first, last = _share(rows, thread, threads) if alone else (0, rows)
    g0, g1 = (0, groups) if alone else _share(groups, thread, threads)
    for row in range(first, last):
        source, to = x + row * x_stride, out + row * out_stride
        factor = inverse_rms(source, width, as_float(eps))
        scale_by(source, weight, to, g0 * group, min(g1 * group, padded), factor)
        _quantize_groups(row, rows, width, g0, g1, to, codes, scales, shifts, group)


@numba.njit(nogil=True)
def _gate(i: int, control: int, thread: int, threads: int) -> None:
    x, x_stride, width, out, out_stride, codes, scales, shifts, group_blocks, which = _gate_operands(i)
    rows = _rows(control, which)
    padded, group = (width + 31) // 32 * 32, 32 * group_blocks
    groups = (padded + group - 1) // group
    first, last = _share(rows * groups, thread, threads)
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
    rows, splits = _rows(control, which), _parameter(control, op.SPLITS)
    padded, group = (width + 31) // 32 * 32, 32 * group_blocks
    groups = (padded + group - 1) // group
    part = 4 * ((dim + 15) // 16 * 16 + 16)
    # A group may cut a head in two, so heads are merged by the thread that has the row.
    first, last = _share(rows, thread, threads)
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
    if _parameter(control, op.COMPENSATE) == 0:
        return
    rows, positions = _rows(control, which), _parameter(control, op.POSITIONS)
    logit_rows = _parameter(control, op.LOGIT_ROWS)
    chunks = (width + CHUNK - 1) // CHUNK
    full = min(CHUNK, k_chunk)
    # With recall to measure a row has to stay with one thread.
    first, last = _share(rows if measure != 0 else rows * chunks, thread, threads)
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
def _write_tile(value: Any, bias: int, out: int, accumulate: int, tile: int) -> None:
    if bias != 0:
        value = add(value, load_floats(bias + 64 * tile))
    if accumulate != 0:
        value = add(value, load_floats(out + 64 * tile))
    store_floats(out + 64 * tile, value)


@numba.njit(nogil=True)
def _linear(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    codes, scales, zeros, x_codes, x_scales, x_shifts, blocks, group_blocks, groups = _linear_operands(i)[:9]
    tiles, bits, bias, out, out_stride, accumulate, which = _linear_operands(i)[9:16]
    residual, residual_scales, residual_bits, residual_row, x, x_stride = _linear_operands(i)[16:22]
    chosen, chosen_stride, total = _linear_operands(i)[22:]
    rows = _rows(control, which)
    first, last = _share(tiles, thread, threads)
    step = blocks * (_BYTES_4 if bits == 4 else _BYTES_3)
    if rows == 1:
        for tile in range(first, last):
            at, s, z = codes + tile * step, scales + tile * groups * 32, zeros + tile * groups * 16
            if bits == 4:
                value = gemv_tile_4(at, s, z, x_codes, x_scales, x_shifts, blocks, group_blocks)
            else:
                value = gemv_tile_3(at, s, z, x_codes, x_scales, x_shifts, blocks, group_blocks)
            _write_tile(value, bias, out, accumulate, tile)
    else:
        side = row_block(rows)
        for tile in range(first, last):
            at, s, z = codes + tile * step, scales + tile * groups * 32, zeros + tile * groups * 16
            for row in range(0, rows, side):
                xc = x_codes + row * blocks * 32
                xs, xz = x_scales + 4 * row * groups, x_shifts + 4 * row * groups
                if bits == 4:
                    if side == 16:
                        gemm_tile_4x16(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                    elif side == 8:
                        gemm_tile_4x8(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                    else:
                        gemm_tile_4x4(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                elif side == 16:
                    gemm_tile_3x16(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                elif side == 8:
                    gemm_tile_3x8(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                else:
                    gemm_tile_3x4(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                for m in range(min(side, rows - row)):
                    value = load_floats(scratch + 64 * m)
                    _write_tile(value, bias, out + (row + m) * out_stride, accumulate, tile)
    if total > 0 and last > first and _parameter(control, op.COMPENSATE) != 0:
        for row in range(rows):
            compensate(
                residual,
                residual_scales,
                residual_bits,
                residual_row,
                x + row * x_stride,
                chosen + row * chosen_stride,
                total,
                16 * first,
                16 * last,
                out + row * out_stride,
                scratch + _GEMM_SCRATCH,
            )


@numba.njit(nogil=True)
def _heads(i: int, control: int, thread: int, threads: int) -> None:
    qkv, stride, heads, kv_heads, dim, half, cos, sin, q_norm, k_norm, eps, scale = _heads_operands(i)[:12]
    keys, values, key_scales, value_scales, context = _heads_operands(i)[12:]
    slots, positions = _parameter(control, op.SLOTS), _parameter(control, op.POSITIONS)
    padded = (dim + 15) // 16 * 16
    item = 2 if key_scales == 0 else 1
    all_heads = heads + 2 * kv_heads
    first, last = _share(_rows(control, 0) * all_heads, thread, threads)
    for work in range(first, last):
        row, head = work // all_heads, work % all_heads
        position = numba.int64(get_int(positions + 4 * row))
        x = qkv + row * stride + 4 * head * dim
        if head < heads + kv_heads:
            norm = q_norm if head < heads else k_norm
            if norm != 0:
                norm_head(x, norm, dim, as_float(eps))
            rotate_head(x, cos + 4 * half * position, sin + 4 * half * position, half)
        if head < heads:
            for d in range(dim):
                set_float(x + 4 * d, get_float(x + 4 * d) * as_float(scale))
            continue
        is_key = head < heads + kv_heads
        kv = (numba.int64(get_int(slots + 4 * row)) * kv_heads + (head - heads) % kv_heads) * context
        if is_key:
            store_key(x, dim, keys + kv * dim * item, 0 if key_scales == 0 else key_scales + 2 * kv, position)
        else:
            to = 0 if value_scales == 0 else value_scales + 2 * kv
            store_value(x, dim, values + kv * padded * item, to, position)


@numba.njit(nogil=True)
def _attend(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    qkv, stride, heads, kv_heads, dim, window, keys, values, key_scales, value_scales = _attend_operands(i)[:10]
    context, out = _attend_operands(i)[10:]
    slots, positions, runs = (
        _parameter(control, op.SLOTS),
        _parameter(control, op.POSITIONS),
        _parameter(control, op.RUN_ROWS),
    )
    splits = _parameter(control, op.SPLITS)
    padded = (dim + 15) // 16 * 16
    part, share = 4 * (padded + 16), heads // kv_heads
    item = 2 if key_scales == 0 else 1
    first, last = _share(_parameter(control, op.RUNS) * kv_heads * splits, thread, threads)
    for work in range(first, last):
        run, kv_head, split = work // (kv_heads * splits), work // splits % kv_heads, work % splits
        row, count = numba.int64(get_int(runs + 8 * run)), numba.int64(get_int(runs + 8 * run + 4))
        position = numba.int64(get_int(positions + 4 * row))
        end = position + count
        begin = 0 if window == 0 else max(0, position + 1 - window) // SPAN * SPAN
        spans = (end - begin + SPAN - 1) // SPAN
        start, stop = begin + spans * split // splits * SPAN, begin + spans * (split + 1) // splits * SPAN
        kv = (numba.int64(get_int(slots + 4 * row)) * kv_heads + kv_head) * context
        attend_split(
            qkv + row * stride + 4 * kv_head * share * dim,
            stride,
            count,
            share,
            position,
            window,
            keys + kv * dim * item,
            values + kv * padded * item,
            0 if key_scales == 0 else key_scales + 2 * kv,
            0 if value_scales == 0 else value_scales + 2 * kv,
            dim,
            start,
            min(stop, end),
            out + ((row * heads + kv_head * share) * splits + split) * part,
            heads * splits * part,
            splits * part,
            scratch,
        )


@numba.njit(nogil=True)
def _run(control: int, thread: int, threads: int) -> None:
    program, count = _parameter(control, op.PROGRAM), _parameter(control, op.INSTRUCTIONS)
    scratch = _parameter(control, op.SCRATCH) + thread * _parameter(control, op.SCRATCH_STRIDE)
    for n in range(count):
        i = program + 8 * op.WIDTH * n
        operation = get_word(i)
        if operation == op.LINEAR:
            _linear(i, control, thread, threads, scratch)
        elif operation == op.NORM:
            _norm(i, control, thread, threads)
        elif operation == op.GATE:
            _gate(i, control, thread, threads)
        elif operation == op.SELECT:
            _select(i, control, thread, threads, scratch)
        elif operation == op.HEADS:
            _heads(i, control, thread, threads)
        elif operation == op.ATTEND:
            _attend(i, control, thread, threads, scratch)
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
