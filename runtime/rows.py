"""What a sequence wants to be computed next, and the step that computes it for several sequences at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from runtime.decoder import Decoder, Float32Array, Step

T = TypeVar("T")
RowKind = Literal["prompt", "draft", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens of one sequence at consecutive positions."""

    slot: int
    """The sequence."""
    start: int
    """Position of the first."""
    tokens: Sequence[int]
    """Token ids, one at least."""
    wanted: int
    """Logits are wanted of so many rows, the last ones."""
    kind: RowKind
    """`prompt`: compensated together; `draft`: a guess; `decode`: a token of the answer, or rows that verify a draft.
    Rows of several kinds make no common step: a step is compensated in one way, and a draft reads less of the cache."""


Work = Generator[Rows, Float32Array, T]
"""Work on one sequence: gives the rows that it needs next, is sent their logits [wanted, V], and returns a T.

Logits are overwritten by the step after."""


def step_of(parts: Sequence[Rows]) -> Step:
    """One step for the rows of several sequences, all of one kind."""
    kind = parts[0].kind
    tokens: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for rows in parts:
        count = len(rows.tokens)
        tokens += rows.tokens
        slots += [rows.slot] * count
        positions += range(rows.start, rows.start + count)
        wanted += range(len(tokens) - rows.wanted, len(tokens))
    return Step(
        tokens=np.array(tokens, np.int32),
        slots=np.array(slots, np.int32),
        positions=np.array(positions, np.int32),
        logit_rows=np.array(wanted, np.int32),
        prefill=kind == "prompt",
        draft=kind == "draft",
    )


def run_alone(decoder: Decoder, work: Work[T]) -> T:
    """Do one piece of work with nobody beside it. Returns what it returns."""
    try:
        rows = next(work)
        while True:
            rows = work.send(decoder.forward(step_of([rows])))
    except StopIteration as end:
        result: T = end.value
        return result
