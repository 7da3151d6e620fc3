"""Rows: the work that a sequence requests from a step, and the step that computes it for several sequences at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar, cast

import numpy as np

from runtime.backends.decoder import Decoder, DrawsTokens, Step
from runtime.text.sampling import Draw

T = TypeVar("T")
RowKind = Literal["prompt", "draft", "decode", "drawn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens of one sequence at consecutive positions."""

    slot: int
    """The sequence."""
    start: int
    """Position of the first token."""
    tokens: Sequence[int]
    """Token ids, at least one."""
    wanted: int
    """Number of rows, counted from the last, whose logits are wanted."""
    kind: RowKind
    """`prompt`: compensated together; `draft`: a drafted token; `decode`: a token of the answer, or rows that verify a
    draft; `drawn`: a token whose successor the decoder samples itself. Kinds are not mixed in a step: a step is
    compensated in one way, and a draft reads less of the cache."""
    draw: Draw | None = None
    """Sampling options; for `drawn` only, which has one row."""


Work = Generator[Rows, Any, T]
"""Work on one sequence: a generator that yields the rows it needs next, is sent their logits float32 [wanted, V] (or
`runtime.text.sampling.Drawn` if the decoder samples), and returns a T. The next step overwrites the logits."""


def step_of(parts: Sequence[Rows]) -> Step:
    """Build one step from the rows of several sequences, all of one kind."""
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


def compute(decoder: Decoder, parts: Sequence[Rows]) -> Sequence[Any]:
    """Run one step for the rows of several sequences, all of one kind. Returns the value to send to each generator."""
    step = step_of(parts)
    draws = [rows.draw for rows in parts if rows.draw is not None]
    if draws:
        return cast("DrawsTokens", decoder).draw(step, draws)
    logits = decoder.forward(step)
    ends = accumulate(rows.wanted for rows in parts)
    return [logits[end - rows.wanted : end] for rows, end in zip(parts, ends, strict=True)]


def run_alone(decoder: Decoder, work: Work[T]) -> T:
    """Run one generator to its end without other sequences. Returns its result."""
    try:
        rows = next(work)
        while True:
            rows = work.send(compute(decoder, [rows])[0])
    except StopIteration as end:
        result: T = end.value
        return result
