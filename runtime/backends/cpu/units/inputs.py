"""Units that write the inputs of products (embeddings, norms, gates, merged attention), and that check logits.

A product's input is stored in float32 and, quantized group by group, in INT8.
"""

from __future__ import annotations

import numba
import numpy as np

from runtime.backends.cpu.data.records import FAILED
from runtime.backends.cpu.kernels.activation import round_groups, sizes_of
from runtime.backends.cpu.kernels.attention.queries import LOWEST, part_bytes
from runtime.backends.cpu.kernels.attention.span import merge_splits
from runtime.backends.cpu.kernels.rows import (
    cap_floats,
    gate_by,
    inverse_rms,
    norm_inplace_row,
    output_gate,
    scale_by,
    scale_row,
)
from runtime.backends.cpu.kernels.views import (
    check_at,
    embed_at,
    gate_at,
    gather_at,
    merge_at,
    norm_at,
    norm_inplace_at,
    parameters_at,
    pick_at,
    rows_of,
    share_of,
)
from runtime.backends.cpu.machine.sync import write_word
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import (
    absolute,
    get_float,
    get_half,
    get_int,
    lanes_below,
    load_floats,
    load_halves,
    set_float,
    store_floats,
)


@compiled_unit
def embed(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Write the embeddings of a step's tokens."""
    embed = embed_at(i)
    tokens, channels = parameters_at(control).tokens, embed.channels
    first, last = share_of(rows_of(control, 0), part, parts)
    for row in range(first, last):
        source = embed.table + embed.stride * numba.int64(get_int(tokens + 4 * row))
        out, c = embed.out.at + row * embed.out.stride, 0
        while c + 16 <= channels:
            store_floats(out + 4 * c, load_halves(source + 2 * c))
            c += 16
        while c < channels:
            set_float(out + 4 * c, get_half(source + 2 * c))
            c += 1


@compiled_unit
def gather(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Copy the rows whose logits are wanted."""
    gather, wanted = gather_at(i), parameters_at(control).logit_rows
    first, last = share_of(rows_of(control, 1), part, parts)
    for row in range(first, last):
        source = gather.x.at + gather.x.stride * numba.int64(get_int(wanted + 4 * row))
        out = gather.out.at + row * gather.out.stride
        for c in range(0, gather.channels, 16):
            store_floats(out + 4 * c, load_floats(source + 4 * c))


@compiled_unit
def pick(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Copy some channels side by side, and quantize them."""
    pick = pick_at(i)
    to, rows = pick.to, rows_of(control, pick.to.wanted)
    padded, _group, groups = sizes_of(to)
    first, last = share_of(rows if parameters_at(control).compensate != 0 else 0, part, parts)
    for row in range(first, last):
        source, out = pick.x.at + row * pick.x.stride, to.out.at + row * to.out.stride
        for k in range(padded):
            inside = k < to.width
            set_float(out + 4 * k, get_float(source + 4 * get_int(pick.channels + 4 * k)) if inside else np.float32(0))
        round_groups(to, row, rows, 0, groups)


@compiled_unit
def norm(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """RMSNorm, and quantization of its output."""
    norm = norm_at(i)
    to, rows = norm.to, rows_of(control, norm.to.wanted)
    padded, group, groups = sizes_of(to)
    # Few rows: every thread computes the sum of squares, and takes its share of the groups.
    alone = rows >= parts or to.per_token != 0
    first, last = share_of(rows, part, parts) if alone else (0, rows)
    g0, g1 = (0, groups) if alone else share_of(groups, part, parts)
    for row in range(first, last):
        source, out = norm.x.at + row * norm.x.stride, to.out.at + row * to.out.stride
        start, stop = g0 * group, min(g1 * group, padded)
        if norm.weight == 0:
            for c in range(4 * start, 4 * stop, 64):
                store_floats(out + c, load_floats(source + c))
        else:
            factor = inverse_rms(source, to.width, norm.eps)
            scale_by(source, norm.weight, out, start, stop, factor)
        round_groups(to, row, rows, g0, g1)


@compiled_unit
def norm_inplace(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """RMSNorm of rows that stay in float32."""
    norm = norm_inplace_at(i)
    first, last = share_of(rows_of(control, 0), part, parts)
    for row in range(first, last):
        x, out = norm.x.at + row * norm.x.stride, norm.out.at + row * norm.out.stride
        norm_inplace_row(x, norm.width, norm.weight, norm.eps, out, norm.accumulate)
        if norm.scale != 0:
            scale_row(out, norm.width, get_float(norm.scale))


@compiled_unit
def gate(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """F(gate) * up or f(up), and quantization of its output."""
    gate = gate_at(i)
    to, rows = gate.to, rows_of(control, gate.to.wanted)
    padded, group, groups = sizes_of(to)
    if to.per_token != 0:  # a token's scale depends on all its channels
        first, last = share_of(rows, part, parts)
        for row in range(first, last):
            source, out = gate.x.at + row * gate.x.stride, to.out.at + row * to.out.stride
            gate_by(gate.form, gate.limit, gate.slopes, source, source + 4 * to.width, out, 0, padded)
            for c in range(to.width, padded):
                set_float(out + 4 * c, numba.float32(0.0))
            round_groups(to, row, rows, 0, groups)
        return
    first, last = share_of(rows * groups, part, parts)
    for item in range(first, last):
        row, g = item // groups, item % groups
        source, out = gate.x.at + row * gate.x.stride, to.out.at + row * to.out.stride
        start, stop = g * group, min((g + 1) * group, padded)
        gate_by(gate.form, gate.limit, gate.slopes, source, source + 4 * to.width, out, start, stop)
        for c in range(max(start, to.width), stop):
            set_float(out + 4 * c, numba.float32(0.0))
        round_groups(to, row, rows, g, g + 1)


@compiled_unit
def merge(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Join the splits of attention, and quantize the result."""
    merge, splits = merge_at(i), parameters_at(control).splits
    to, rows, dim = merge.to, rows_of(control, merge.to.wanted), merge.dim
    padded, _, groups = sizes_of(to)
    size = part_bytes(dim)
    # A group may span two heads, so one thread merges all heads of a row.
    first, last = share_of(rows, part, parts)
    for row in range(first, last):
        out = to.out.at + row * to.out.stride
        for head in range(merge.heads):
            at = merge.partial + (row * merge.heads + head) * splits * size
            sink = get_float(merge.sinks + 4 * head) if merge.sinks != 0 else numba.float32(LOWEST)
            merge_splits(at, splits, dim, merge.given, sink, out + 4 * head * merge.given)
        if merge.gate.at != 0:
            output_gate(out, merge.gate.at + row * merge.gate.stride, to.width, merge.each, merge.softplus)
        for c in range(to.width, padded):
            set_float(out + 4 * c, numba.float32(0.0))
        round_groups(to, row, rows, 0, groups)


_FINITE = np.float32(3.4028235e38)
"""The largest of them."""
_ALL = 0xFFFF


@compiled_unit
def check(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Mark the step as failed if a wanted row is not finite, and cap it."""
    check = check_at(i)
    first, last = share_of(check.channels // 16, part, parts)
    for row in range(rows_of(control, 1)):
        x, finite = check.x.at + row * check.x.stride, numba.int64(_ALL)
        for v in range(first, last):
            finite &= lanes_below(absolute(load_floats(x + 64 * v)), _FINITE)
        if finite != _ALL:
            write_word(control + 8 * FAILED, 1)
        if check.cap != 0.0:
            cap_floats(x + 64 * first, 16 * (last - first), check.cap)
