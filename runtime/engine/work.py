"""Work on a sequence: what it asks the decoder for, step by step; `runtime.engine.scheduler` runs the steps of many."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from runtime.backends.decoder import Float32Array
from runtime.text.sampling import Draw

T = TypeVar("T")
RowKind = Literal["prompt", "draft", "mtp", "decode", "drawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens of one sequence at consecutive positions."""

    slot: int
    start: int
    """Position of the first token."""
    tokens: Sequence[int]
    """Token ids, at least one."""
    wanted: int
    """Number of rows, counted from the last, whose logits are wanted."""
    kind: RowKind
    """`prompt`: compensated together; `draft`: a drafted token; `mtp`: rows of the block that predicts further tokens,
    at positions of its own cache; `decode`: a token of the answer, or rows that verify a draft; `drawn`: a token whose
    successor the decoder samples itself. Kinds are not mixed in a step: a step is compensated in one way, and a draft
    reads less of the cache."""
    draw: Draw | None = None
    """Sampling options; for `drawn` only, which has one row."""
    stream: Float32Array | None = None
    """float32 [M, C]; for `mtp` only, see `runtime.backends.decoder.Step.stream`."""
    left: bool = False
    """Whether what the step leaves for these rows is wanted (`runtime.backends.decoder.PredictsFurther`)."""


Work = Generator[Rows, Any, T]
"""Work on one sequence: a generator that yields the rows it needs next, is sent their logits float32 [wanted, V] (or
`runtime.text.sampling.Drawn` if the decoder samples), and returns a T. The next step overwrites the logits. If the rows
say so, what the step left for them comes along: (logits, float32 [M, C])."""
