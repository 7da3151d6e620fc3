"""Units that compensate tiles of a row by its own channels; LINEAR and EXPERTS instructions call them.

There is one for each width of residuals. What they need is in a note, so they know neither kind of instruction.
"""

from __future__ import annotations

from runtime.backends.cpu.kernels.compensate import (
    compensate_tiles_2,
    compensate_tiles_4,
    compensate_tiles_8,
    compensate_tiles_16,
)
from runtime.backends.cpu.machine.unit import compiled_unit


@compiled_unit
def compensate_2(note: int, first: int, last: int) -> None:
    """Compensate tiles first .. last - 1 of the row of a note, by residuals of 2 bits."""
    compensate_tiles_2(note, first, last)


@compiled_unit
def compensate_4(note: int, first: int, last: int) -> None:
    """The same for residuals of 4 bits."""
    compensate_tiles_4(note, first, last)


@compiled_unit
def compensate_8(note: int, first: int, last: int) -> None:
    """The same for residuals of 8 bits."""
    compensate_tiles_8(note, first, last)


@compiled_unit
def compensate_16(note: int, first: int, last: int) -> None:
    """The same for residuals in half precision."""
    compensate_tiles_16(note, first, last)
