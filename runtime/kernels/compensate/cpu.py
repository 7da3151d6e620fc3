"""Error compensation on the CPU: a gather of residual rows from RAM, four rows at a time, in float32.

Residuals stay in the canonical packing of the file (input-channel-major, so one salient channel is one contiguous row)
and are read through the page cache, never copied.

Source: QDEC §4.1, steps 2 to 4.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types

from runtime.cpu.emit import FLOATS, I32, WORDS, Builder, define, floats16, load
from runtime.cpu.vector import (
    add,
    fill,
    fma,
    get_float,
    get_int,
    load_floats,
    load_halves,
    load_unsigned,
    mul,
    prefetch,
    store_floats,
    zero_floats,
)


def _codes(bits: int) -> Any:
    """Intrinsic: sixteen unsigned residual codes of 2 or 4 bits at a 16-column boundary, as floats."""
    words = bits // 2
    lanes = 32 // bits

    def emit(b: Builder, address: Any) -> Any:
        packed = load(b, ir.VectorType(I32, words), address, 4)
        spread = ir.Constant(ir.VectorType(I32, 16), [i // lanes for i in range(16)])
        wide = b.shuffle_vector(packed, ir.Constant(packed.type, ir.Undefined), spread)
        shifts = ir.Constant(WORDS, [bits * (i % lanes) for i in range(16)])
        mask = ir.Constant(WORDS, [(1 << bits) - 1] * 16)
        return b.sitofp(b.and_(b.lshr(wide, shifts), mask), FLOATS)

    emit.__name__ = f"residual_codes{bits}"
    emit.__doc__ = f"Sixteen {bits}-bit codes as floats."
    return define(floats16, types.int64)(emit)


def _gather(load_codes: Any) -> Any:
    @numba.njit(nogil=True)
    def gather(
        residual: int, row_bytes: int, x: int, chosen: int, count: int, start: int, stop: int, sums: int, bits: int
    ) -> None:
        step = 2 * bits  # bytes of 16 columns
        first, last = residual + (start // 16) * step, (stop - start) // 16
        for t in range(last):
            store_floats(sums + 64 * t, zero_floats())
        i = 0
        while i + 4 <= count:
            c0, c1 = numba.int64(get_int(chosen + 4 * i)), numba.int64(get_int(chosen + 4 * i + 4))
            c2, c3 = numba.int64(get_int(chosen + 4 * i + 8)), numba.int64(get_int(chosen + 4 * i + 12))
            x0, x1 = fill(get_float(x + 4 * c0)), fill(get_float(x + 4 * c1))
            x2, x3 = fill(get_float(x + 4 * c2)), fill(get_float(x + 4 * c3))
            r0, r1 = first + c0 * row_bytes, first + c1 * row_bytes
            r2, r3 = first + c2 * row_bytes, first + c3 * row_bytes
            n0, n1, n2, n3 = r0, r1, r2, r3
            if i + 8 <= count:  # the next four rows come in while these are added
                n0 = first + numba.int64(get_int(chosen + 4 * i + 16)) * row_bytes
                n1 = first + numba.int64(get_int(chosen + 4 * i + 20)) * row_bytes
                n2 = first + numba.int64(get_int(chosen + 4 * i + 24)) * row_bytes
                n3 = first + numba.int64(get_int(chosen + 4 * i + 28)) * row_bytes
            for t in range(last):
                at = t * step
                if at % 64 == 0:
                    prefetch(n0 + at)
                    prefetch(n1 + at)
                    prefetch(n2 + at)
                    prefetch(n3 + at)
                total = fma(load_codes(r0 + at), x0, load_floats(sums + 64 * t))
                total = fma(load_codes(r1 + at), x1, total)
                total = fma(load_codes(r2 + at), x2, total)
                store_floats(sums + 64 * t, fma(load_codes(r3 + at), x3, total))
            i += 4
        while i < count:
            c = numba.int64(get_int(chosen + 4 * i))
            value, row = fill(get_float(x + 4 * c)), first + c * row_bytes
            for t in range(last):
                store_floats(sums + 64 * t, fma(load_codes(row + t * step), value, load_floats(sums + 64 * t)))
            i += 1

    return gather


_gather_2, _gather_4 = _gather(_codes(2)), _gather(_codes(4))
_gather_8, _gather_16 = _gather(load_unsigned), _gather(load_halves)


@numba.njit(nogil=True)
def compensate(
    residual: int,
    scales: int,
    bits: int,
    row_bytes: int,
    x: int,
    chosen: int,
    count: int,
    start: int,
    stop: int,
    out: int,
    sums: int,
) -> None:
    """out[n] += sum over chosen channels c of x[c] * R̂[c, n] for start <= n < stop.

    Args:
        residual: Address of the packed residuals [K, N], canonical packing, or float16 [K, N'] at 16 bits.
        scales: Address of float16 [N padded to 16]; unused at 16 bits.
        bits: 2, 4, 8 or 16.
        row_bytes: Bytes from one input channel's row to the next.
        x: Address of the input row, float32 [K].
        chosen: Address of int32 [count], the salient channels, ascending.
        count: k.
        start: First output channel, a multiple of 16.
        stop: End, a multiple of 16.
        out: Address of the output row, float32.
        sums: Address of scratch, float32 [stop - start].
    """
    if bits == 2:
        _gather_2(residual, row_bytes, x, chosen, count, start, stop, sums, bits)
    elif bits == 4:
        _gather_4(residual, row_bytes, x, chosen, count, start, stop, sums, bits)
    elif bits == 8:
        _gather_8(residual, row_bytes, x, chosen, count, start, stop, sums, bits)
    else:
        _gather_16(residual, row_bytes, x, chosen, count, start, stop, sums, bits)
        for n in range(start, stop, 16):
            store_floats(out + 4 * n, add(load_floats(out + 4 * n), load_floats(sums + 4 * (n - start))))
        return
    # Codes are stored with an offset of 2^(bits-1), the same for every channel: its share is subtracted once.
    total = numba.float32(0.0)
    for i in range(count):
        total += get_float(x + 4 * numba.int64(get_int(chosen + 4 * i)))
    shift = fill(numba.float32(-total * numba.float32(1 << (bits - 1))))
    for n in range(start, stop, 16):
        value = mul(add(load_floats(sums + 4 * (n - start)), shift), load_halves(scales + 2 * n))
        store_floats(out + 4 * n, add(load_floats(out + 4 * n), value))
