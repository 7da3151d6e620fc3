"""Units of LINEAR instructions whose rows meet the source's own weights, in place of the low-bit ones."""

from __future__ import annotations

from typing import Any

from runtime.backends.cpu.data.records import BLOCK
from runtime.backends.cpu.kernels.exact import ROWS, exact_tile
from runtime.backends.cpu.kernels.views import linear_at
from runtime.backends.cpu.machine.kernel import routine
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.units.products import write_rows


def _product(kind: str) -> Any:
    one, four, channel_bytes = exact_tile(kind, 1), exact_tile(kind, ROWS), 64 if kind == "f32" else 32

    @routine
    def multiply(i: int, rows: int, first: int, last: int, scratch: int) -> None:
        linear = linear_at(i)
        x, blocks = linear.values, linear.weights.blocks
        for tile in range(first, last):
            weights = linear.exact.weights + tile * blocks * BLOCK * channel_bytes
            if rows == 1:
                one(weights, blocks, x.at, x.stride, scratch)
                write_rows(linear, tile, 0, 1, scratch)
            else:
                for row in range(0, rows, ROWS):
                    four(weights, blocks, x.at + row * x.stride, x.stride, scratch)
                    write_rows(linear, tile, row, min(ROWS, rows - row), scratch)

    return multiply


_f16, _bf16, _f32 = _product("f16"), _product("bf16"), _product("f32")


@compiled_unit
def multiply_f16(i: int, rows: int, first: int, last: int, scratch: int) -> None:
    """Multiply tiles first .. last - 1 of the LINEAR instruction at address i: weights in half precision."""
    _f16(i, rows, first, last, scratch)


@compiled_unit
def multiply_bf16(i: int, rows: int, first: int, last: int, scratch: int) -> None:
    """The same with weights in bfloat16."""
    _bf16(i, rows, first, last, scratch)


@compiled_unit
def multiply_f32(i: int, rows: int, first: int, last: int, scratch: int) -> None:
    """The same with weights in single precision."""
    _f32(i, rows, first, last, scratch)
