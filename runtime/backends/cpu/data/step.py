"""Parameters of a step, and the division of instructions into parts."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu.arena import LINE
from runtime.backends.cpu.data.control import CONTROL_WORDS
from runtime.backends.cpu.data.records import record_of


class Parameters(NamedTuple):
    """The part of the control block that is written before a step and constant during it."""

    rows: int
    """M, rows of the step."""
    wanted_rows: int
    """R, rows whose logits are wanted."""
    runs: int
    """Runs: rows of one sequence at consecutive positions."""
    splits: int
    """Splits of a head's context."""
    items: int
    """Runs times key-value heads times splits: the number of work items of attention."""
    compensate: bool
    """Whether products are compensated."""
    draft: bool
    """Whether attention reads only the upper plane of a two-plane cache, in layers that are not sensitive."""
    tokens: int
    """Address of int32 [M]."""
    slots: int
    """Address of int32 [M]."""
    positions: int
    """Address of int32 [M]."""
    logit_rows: int
    """Address of int32 [R]."""
    run_rows: int
    """Address of int32 [runs, 2]: first row and number of rows."""
    scratch: int
    """Address of the threads' scratch."""
    scratch_stride: int
    """Bytes per thread."""
    program: int
    """Address of the program, int64 [instructions, WIDTH]."""
    instructions: int
    """Its number of instructions."""
    first: int
    """Number of its first instruction, counted over all programs of a session."""


FIRST: Final = 40
"""Index of their first word in the control block, after those of `runtime.backends.cpu.data.control`."""
PARAMETERS: Final = record_of(Parameters)
"""Their record."""
assert 8 * FIRST + PARAMETERS.itemsize <= 8 * CONTROL_WORDS


def parameters_of(control: npt.NDArray[np.int64]) -> Any:
    """The parameters in a control block, as a record."""
    return control[FIRST : FIRST + PARAMETERS.itemsize // 8].view(PARAMETERS)[0]


PARTS_OF_WEIGHTS: Final = 3
"""Parts per thread if the first ones are large; see `share_of_weights`."""


def share_of_weights(tiles: int, part: int, parts: int) -> tuple[int, int]:
    """A part's range of tiles, for one row of activations.

    The first third of the parts, one per thread, covers three quarters of the tiles, so that memory is read in long
    runs; the rest are small, and threads that finish early take more of them.
    """
    large = parts // PARTS_OF_WEIGHTS
    if large < 2:
        return share_of(tiles, part, parts)
    border = tiles * 3 // 4
    if part < large:
        return share_of(border, part, large)
    first, last = share_of(tiles - border, part - large, parts - large)
    return border + first, border + last


def tiles_of_line(residual_bits: int) -> int:
    """Tiles of 16 output channels whose residuals share a cache line of a row."""
    return LINE // 2 // residual_bits


def share_of(count: int, part: int, parts: int) -> tuple[int, int]:
    """A part's range of `count` equal items."""
    return count * part // parts, count * (part + 1) // parts
