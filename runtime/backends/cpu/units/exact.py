"""Units of LINEAR instructions whose rows meet the source's own weights, in place of the low-bit ones."""

from __future__ import annotations

from runtime.backends.cpu.data.instructions import EXACT_KINDS
from runtime.backends.cpu.data.records import BLOCK
from runtime.backends.cpu.kernels.exact import ROWS, exact_tile
from runtime.backends.cpu.kernels.views import linear_at
from runtime.backends.cpu.machine.unit import Unit, made_unit
from runtime.backends.cpu.units.products import write_rows


def _product(kind: str) -> Unit:
    """The unit that multiplies tiles first .. last - 1 of the LINEAR instruction at address i by weights of a kind."""
    one, four, channel_bytes = exact_tile(kind, 1), exact_tile(kind, ROWS), 64 if kind == "f32" else 32

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

    return made_unit(f"multiply_{kind}", multiply)


multiply_f16, multiply_bf16, multiply_f32 = map(_product, EXACT_KINDS)
