"""Units that compensate rows with shared channels, for LINEAR instructions with few rows of a prompt."""

from __future__ import annotations

from typing import Any

from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.kernels.residual import few_rows
from runtime.backends.cpu.kernels.views import linear_at
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.units.rows import row_block_at

_few_2, _few_4, _few_8, _few_16 = map(few_rows, (2, 4, 8, 16))


@kernel
def _share(few: Any, i: int, rows: int, first: int, last: int, scratch: int) -> None:
    linear, side = linear_at(i), row_block(rows)
    for row in range(0, rows, side):
        out = linear.out.at + row * linear.out.stride
        few(linear, row_block_at(linear, row), side, min(side, rows - row), out, first, last, scratch)


@compiled_unit
def share_2(i: int, rows: int, first: int, last: int, scratch: int) -> None:
    """Compensate tiles first .. last - 1 of all rows of the LINEAR instruction at address i, by residuals of 2 bits."""
    _share(_few_2, i, rows, first, last, scratch)


@compiled_unit
def share_4(i: int, rows: int, first: int, last: int, scratch: int) -> None:
    """The same for residuals of 4 bits."""
    _share(_few_4, i, rows, first, last, scratch)


@compiled_unit
def share_8(i: int, rows: int, first: int, last: int, scratch: int) -> None:
    """The same for residuals of 8 bits."""
    _share(_few_8, i, rows, first, last, scratch)


@compiled_unit
def share_16(i: int, rows: int, first: int, last: int, scratch: int) -> None:
    """The same for residuals in half precision."""
    _share(_few_16, i, rows, first, last, scratch)
