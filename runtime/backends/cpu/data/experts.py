"""Records of a mixture of experts: matrices of a block's experts, and which rows of a step go to which of them."""

from __future__ import annotations

from typing import Final, NamedTuple

from runtime.backends.cpu.data.records import record_of


class Expert(NamedTuple):
    """An expert's matrix, a row of a table: addresses."""

    codes: int
    """The first tile."""
    scales: int
    """float16."""
    zeros: int
    """uint8."""
    residual: int = 0
    """The residuals; 0: none."""
    residual_scales: int = 0
    """float16."""
    kept: int = 0
    """uint8 [K padded to 32]: 255 for an input channel that all rows are compensated by, otherwise 0."""
    bias: int = 0
    """float32 [N padded to 16]; 0: none."""


class Counts(NamedTuple):
    """Numbers of a step's pairs and segments."""

    pairs: int
    """Rows times chosen experts."""
    segments: int
    """Experts that are chosen."""
    alone: bool
    """Whether the step has one row."""


class Segment(NamedTuple):
    """The rows of a step that go to one expert, in consecutive slots: whole row blocks."""

    expert: int
    """The expert."""
    first: int
    """Its first slot."""
    pair: int
    """Its first pair."""
    rows: int
    """Number of rows."""


class Pair(NamedTuple):
    """A row and one of its experts."""

    row: int
    """The row of the step."""
    expert: int
    """The expert."""
    slot: int
    """Its place among the rows of all experts."""
    block: int
    """First slot of its row block."""
    side: int
    """Rows of its row block."""
    share: float
    """The expert's share in the row's result."""


class Routes(NamedTuple):
    """Which rows of a step go to which experts: addresses."""

    counts: int = 0
    """`Counts`; 0 where rows go to no experts."""
    segments: int = 0
    """`Segment` of each chosen expert, ascending."""
    pairs: int = 0
    """`Pair` of each segment's rows, ascending."""


EXPERT: Final = record_of(Expert)
"""Records, as numpy and compiled code see them."""
COUNTS: Final = record_of(Counts)
SEGMENT: Final = record_of(Segment)
PAIR: Final = record_of(Pair)
EXPERT_BYTES: Final = EXPERT.itemsize
"""Their sizes."""
SEGMENT_BYTES: Final = SEGMENT.itemsize
PAIR_BYTES: Final = PAIR.itemsize
