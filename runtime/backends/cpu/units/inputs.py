"""The instructions that write the inputs of products: embeddings, wanted rows, norms, gates, and merged attention.

What a product reads stands there in float32 and, rounded group by group, in INT8.
"""

from __future__ import annotations

import numba

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.operands import operands, parameter, rows_of, share_of
from runtime.backends.cpu.kernels.activation import quantize_group
from runtime.backends.cpu.kernels.attention.span import merge_splits
from runtime.backends.cpu.kernels.gate import gate as gate_channels
from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.kernels.norm import inverse_rms, scale_by
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import (
    as_float,
    get_half,
    get_int,
    load_floats,
    load_halves,
    set_float,
    store_floats,
)

_embed_operands, _gather_operands = operands(op.EMBED), operands(op.GATHER)
_norm_operands, _gate_operands, _merge_operands = operands(op.NORM), operands(op.GATE), operands(op.MERGE)


@compiled_unit
def embed(i: int, control: int, thread: int, threads: int, _scratch: int) -> None:
    """Write the embeddings of a step's tokens."""
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


@compiled_unit
def gather(i: int, control: int, thread: int, threads: int, _scratch: int) -> None:
    """Copy the rows whose logits are wanted."""
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


@compiled_unit
def norm(i: int, control: int, thread: int, threads: int, _scratch: int) -> None:
    """RMSNorm, and the rounding of what it writes."""
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


@compiled_unit
def gate(i: int, control: int, thread: int, threads: int, _scratch: int) -> None:
    """SiLU(gate) * up, and the rounding of what it writes."""
    x, x_stride, width, out, out_stride, codes, scales, shifts, group_blocks, which = _gate_operands(i)
    rows = rows_of(control, which)
    padded, group = (width + 31) // 32 * 32, 32 * group_blocks
    groups = (padded + group - 1) // group
    first, last = share_of(rows * groups, thread, threads)
    for item in range(first, last):
        row, g = item // groups, item % groups
        source, to = x + row * x_stride, out + row * out_stride
        start, stop = g * group, min((g + 1) * group, padded)
        gate_channels(source, source + 4 * width, to, start, stop)
        for c in range(max(start, width), stop):
            set_float(to + 4 * c, numba.float32(0.0))
        _quantize_groups(row, rows, width, g, g + 1, to, codes, scales, shifts, group)


@compiled_unit
def merge(i: int, control: int, thread: int, threads: int, _scratch: int) -> None:
    """Join the splits of attention, and round what that writes."""
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
