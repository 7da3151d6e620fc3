"""Sizes and records shared by Python and compiled code; a record is a NamedTuple that Python writes.

The control block holds the words through which threads share a program (`runtime.backends.cpu.machine.sync`). Each
contended word has its own cache line (8 words). TURN holds the number of the instruction in its upper half, and in
its lower half the parts still available, above `CLOSED`. The parameters of a step (`Parameters`) follow.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

LANES: Final = 16
"""Lanes of a vector of floats or integers: output channels, or tokens, handled side by side."""
BLOCK: Final = 32
"""Input channels unpacked at a time."""
BLOCK_BYTES: Final = {2: 128, 3: 192, 4: 256, 5: 320, 6: 384, 8: 512}
"""Bytes of a block of 16 output by 32 input channels, by bits."""
ENTRY_BYTES: Final = 512
"""Bytes of a block of decoded entries, 16 output by 32 input channels."""
PIECE: Final = 64
"""Channel distance at which quads of INT8 activations are equally spaced."""
SPAN: Final = 64
"""Tokens per update of attention's running softmax."""
RUN_ROWS: Final = 8
"""Most rows of a sequence in one work item of attention."""
LINE: Final = 64
"""Bytes of a cache line; the alignment of every array."""


def padded(count: int, multiple: int) -> int:
    """The next multiple, at or above count."""
    return -(-count // multiple) * multiple


_WORDS: dict[Any, Any] = {int: np.int64, bool: np.int64, float: np.float32}
"""Storage types of a record's numbers."""


def record_of(declared: type[NamedTuple]) -> np.dtype[Any]:
    """The dtype of a record.

    Args:
        declared: A NamedTuple whose fields are int or bool (int64), float (float32), or such NamedTuples.
    """
    fields = [(name, _WORDS.get(kind) or record_of(kind)) for name, kind in get_type_hints(declared).items()]
    return np.dtype(fields, align=True)


TURN = 0
"""Number of the instruction, and its parts not yet taken."""
DONE = 8
"""Completed parts of the instruction."""
SLEEPERS = 16
"""Threads sleeping until the turn changes."""
ACTIVE = 24
"""Number of active threads; 0 = all others leave."""
FAILED = 32
"""1 once NaN or infinity was found."""
CONTROL_WORDS = 64

CLOSED = 1 << 20
"""Lower half of TURN when no parts are left. Every thread may look once more and decrement it."""


class Parameters(NamedTuple):
    """The part of the control block that is written before a step and constant during it."""

    rows: int  # M, rows of the step
    wanted_rows: int  # R, rows whose logits are wanted
    runs: int  # runs: rows of one sequence at consecutive positions
    splits: int  # splits of a head's context
    items: int  # runs times key-value heads times splits: the number of work items of attention
    compensate: bool  # whether products are compensated
    draft: bool  # whether attention reads only the upper plane of a two-plane cache, in layers that are not sensitive
    tokens: int  # address of int32 [M]
    slots: int  # address of int32 [M]
    positions: int  # address of int32 [M]
    logit_rows: int  # address of int32 [R]
    run_rows: int  # address of int32 [runs, 2]: first row and number of rows
    scratch: int  # address of the threads' scratch
    scratch_stride: int  # bytes per thread
    program: int  # address of the program, int64 [instructions, WIDTH]
    instructions: int  # its number of instructions
    first: int  # number of its first instruction, counted over all programs of a session


FIRST: Final = 40
"""Index of their first word in the control block, after those of `runtime.backends.cpu.data.records`."""
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


class Expert(NamedTuple):
    """An expert's matrix, a row of a table: addresses."""

    codes: int  # the first tile
    scales: int  # float16
    zeros: int  # uint8
    residual: int = 0  # the residuals; 0: none
    residual_scales: int = 0  # float16
    kept: int = 0  # uint8 [K padded to 32]: 255 for an input channel that all rows are compensated by, otherwise 0
    bias: int = 0  # float32 [N padded to 16]; 0: none


class Counts(NamedTuple):
    """Numbers of a step's pairs and segments."""

    pairs: int  # rows times chosen experts
    segments: int  # experts that are chosen
    alone: bool  # whether the step has one row


class Segment(NamedTuple):
    """The rows of a step that go to one expert, in consecutive slots: whole row blocks."""

    expert: int  # the expert
    first: int  # its first slot
    pair: int  # its first pair
    rows: int  # number of rows


class Pair(NamedTuple):
    """A row and one of its experts."""

    row: int  # the row of the step
    expert: int  # the expert
    slot: int  # its place among the rows of all experts
    block: int  # first slot of its row block
    side: int  # rows of its row block
    share: float  # the expert's share in the row's result


class Routes(NamedTuple):
    """Which rows of a step go to which experts: addresses."""

    counts: int = 0  # `Counts`; 0 where rows go to no experts
    segments: int = 0  # `Segment` of each chosen expert, ascending
    pairs: int = 0  # `Pair` of each segment's rows, ascending


EXPERT: Final = record_of(Expert)
"""Records, as numpy and compiled code see them."""
COUNTS: Final = record_of(Counts)
SEGMENT: Final = record_of(Segment)
PAIR: Final = record_of(Pair)
EXPERT_BYTES: Final = EXPERT.itemsize
"""Their sizes."""
SEGMENT_BYTES: Final = SEGMENT.itemsize
PAIR_BYTES: Final = PAIR.itemsize
