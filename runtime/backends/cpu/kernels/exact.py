"""Full-precision matrix times float32 activations: sixteen output channels side by side in the vector lanes.

Weights are stored in tiles of 16 output channels (`runtime.backends.cpu.tiles.tile_exact`), widened to float32 as they
are read, and multiplied in float32, so that nothing is rounded but sums. A row alone and the same row among others are
added in the same order, so they have the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.records import BLOCK
from runtime.backends.cpu.kernels.gemm import AHEAD
from runtime.backends.cpu.machine.emit import (
    FLOAT,
    FLOATS,
    HALVES,
    WORDS,
    Builder,
    constant,
    define,
    emit_fma,
    floats16,
    load,
    offset,
    pointer,
    splat,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import prefetch

ROWS = 4
"""Rows that a tile's weights meet at a time."""
_CHAINS = 4
"""Sums of a row: one input channel in four is added to each."""


def _emit_pair(b: Builder, address: Any, kind: str) -> list[Any]:
    """The weights of two input channels of a tile, as floats."""
    if kind == "bf16":  # both in a word of their output channel
        words = load(b, WORDS, address, 4)
        both = b.shl(words, constant(WORDS, 16)), b.and_(words, constant(WORDS, -65536))
        return [b.bitcast(each, FLOATS) for each in both]
    if kind == "f16":
        return [b.fpext(load(b, HALVES, offset(b, address, 32 * i), 2), FLOATS) for i in range(2)]
    return [load(b, FLOATS, offset(b, address, 64 * i), 4) for i in range(2)]


def _sums_type(rows: int) -> Any:
    return types.UniTuple(floats16, rows * _CHAINS)


def _no_sums(rows: int) -> Any:
    def emit(_b: Builder) -> Any:
        return ir.Constant(ir.ArrayType(FLOATS, rows * _CHAINS), [constant(FLOATS, 0.0)] * (rows * _CHAINS))

    emit.__name__ = f"no_exact_sums{rows}"
    emit.__doc__ = "All sums, zero."
    return define(_sums_type(rows))(emit)


def _add_block(kind: str, rows: int) -> Any:
    pair_bytes = 128 if kind == "f32" else 64

    def emit(b: Builder, sums: Any, weights: Any, x: Any, stride: Any) -> Any:
        totals = [b.extract_value(sums, i) for i in range(rows * _CHAINS)]
        places = [x]
        for _ in range(rows - 1):
            places.append(b.add(places[-1], stride))
        for k in range(0, BLOCK, 2):
            for c, weight in enumerate(_emit_pair(b, offset(b, weights, pair_bytes * (k // 2)), kind), k):
                for m, place in enumerate(places):
                    chain = _CHAINS * m + c % _CHAINS
                    value = splat(b, load(b, FLOAT, offset(b, place, 4 * c), 4), FLOATS)
                    totals[chain] = emit_fma(b, weight, value, totals[chain])
        for i, total in enumerate(totals):
            sums = b.insert_value(sums, total, i)
        return sums

    emit.__name__ = f"add_exact_block_{kind}x{rows}"
    emit.__doc__ = "Add the products of a block of 32 input channels with every row to sums."
    return define(_sums_type(rows), _sums_type(rows), types.int64, types.int64, types.int64)(emit)


def _finish(rows: int) -> Any:
    def emit(b: Builder, sums: Any, out: Any) -> None:
        for m in range(rows):
            a, c, d, e = (b.extract_value(sums, _CHAINS * m + chain) for chain in range(_CHAINS))
            b.store(b.fadd(b.fadd(a, c), b.fadd(d, e)), pointer(b, offset(b, out, 64 * m)), align=4)

    emit.__name__ = f"finish_exact_{rows}"
    emit.__doc__ = "Write a tile's outputs of every row."
    return define(types.void, _sums_type(rows), types.int64)(emit)


def exact_tile(kind: str, rows: int) -> Any:
    """Writes sixteen outputs of some rows.

    Args:
        kind: Of the weights: `f16`, `bf16` or `f32`.
        rows: 1 or `ROWS`.

    Returns:
        A kernel that takes the address of the tile, K / 32, the address of the first row, float32, bytes between rows,
        and the address of float32 [rows, 16], written.
    """
    no_sums, add_block, finish = _no_sums(rows), _add_block(kind, rows), _finish(rows)
    block_bytes = (64 if kind == "f32" else 32) * BLOCK

    @kernel
    def multiply(tile: int, blocks: int, x: int, stride: int, out: int) -> None:
        sums = no_sums()
        for block in range(blocks):
            base = tile + block * block_bytes
            for line in range(0, block_bytes, 64):
                prefetch(base + AHEAD + line)
            sums = add_block(sums, base, x + 4 * BLOCK * block, stride)
        finish(sums, out)

    return multiply
