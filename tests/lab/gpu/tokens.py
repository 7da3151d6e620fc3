"""Tokens of a small model against the reference decoder's, over the borders of pages, by the kind of cache.

Both are given the reference's tokens. Half precision rounds other sums, so a token may differ where the reference
itself hardly prefers one; that is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models.packed import Weights
from runtime.backends.decoder import DecoderOptions, Selector, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.triton.decoder import TritonDecoder
from runtime.kv.kinds import KVKind
from tests.lab.gpu.record import Part, Row
from tests.lab.gpu.sizes import Sizes
from tests.lab.models import RandomModel

LARGEST = 0.25
"""A logit's difference that is an error, in standard deviations of the logits: a wrong mask or page is off by one."""
_TIMES = 3
"""Steps of each number of rows: one is launched, one captured, and one replayed over other slots or positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to run a model."""

    prompt: int
    """Tokens of each slot's prompt."""
    decoded: int = 0
    """Tokens decoded after the first one's, each the reference's choice."""
    rows: tuple[int, ...] = ()
    """Rows of further steps, shared by the slots."""
    kv: KVKind = "int4"
    slots: int = 1
    k_chunk: int = 64
    prompt_k_chunk: int = 0
    select: Selector = "static"
    """A dynamic selector may take another of two channels that are equal but for the last bit."""


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each kind of cache."""
    model = RandomModel(sizes.small, 4, head_residuals=False)
    for kv in sizes.caches:
        if not part.begin({"kv": kv}):
            continue
        part.add({"kv": kv} | compared(model, Case(prompt=sizes.prompt, decoded=sizes.decoded, kv=kv), device))


def compared(model: Weights, case: Case, device: torch.device) -> Row:
    """Decode with both; equal tokens, near ties, and the largest difference of a logit in standard deviations."""
    context = case.prompt + case.decoded + _TIMES * sum(case.rows) + 1
    chosen = dict.fromkeys(("qkv", "o", "gate_up", "down"), case.k_chunk)
    options = DecoderOptions(
        context=context,
        kv=case.kv,
        slots=case.slots,
        max_rows=min(128, context),
        k_chunk=chosen,
        prompt_k_chunk=dict.fromkeys(chosen, case.prompt_k_chunk),
        select=case.select,
        n_tb=dict.fromkeys(chosen, 8),
    )
    ours, theirs = TritonDecoder(model, options, device), ReferenceDecoder(model, options)
    found = _Count()
    at = [0] * case.slots
    for slot in range(case.slots):
        while at[slot] < case.prompt:
            rows = min(options.max_rows, case.prompt - at[slot])
            step = _step({slot: rows}, at, model.spec.vocab_size, prefill=True)
            best = found.add(np.array(ours.forward(step)), np.array(theirs.forward(step)))
    for _ in range(case.decoded):
        step = Step.of([best], at[0], [0])
        at[0] += 1
        best = found.add(np.array(ours.forward(step)), np.array(theirs.forward(step)))
    for shares in _shares(case):
        step = _step(shares, at, model.spec.vocab_size, prefill=False)
        found.add(np.array(ours.forward(step)), np.array(theirs.forward(step)))
    ours.close()
    return found.row()


class _Count:
    """Rows of logits compared so far."""

    def __init__(self) -> None:
        self.rows = self.equal = self.ties = 0
        self.largest = 0.0

    def add(self, found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> int:
        """Compare logits [R, V]. Returns the reference's token of the last row."""
        best = 0
        for mine, theirs in zip(found, wanted, strict=True):
            spread, best, own = float(theirs.std()), int(theirs.argmax()), int(mine.argmax())
            error = float(np.abs(mine - theirs).max()) / spread
            self.largest = max(self.largest, error) if np.isfinite(error) else float("inf")
            self.rows += 1
            self.equal += own == best
            self.ties += own != best and bool(theirs[best] - theirs[own] < 2 * LARGEST * spread)
        return best

    def row(self) -> Row:
        """The result."""
        correct = self.rows > 0 and self.equal + self.ties == self.rows and self.largest < LARGEST
        row: Row = {"tokens": self.rows, "equal": self.equal, "near_ties": self.ties}
        return row | {"largest_error": round(self.largest, 4), "correct": correct}


def _shares(case: Case) -> Iterator[dict[int, int]]:
    """Rows of each slot in the steps of several rows; which slots begin changes from step to step."""
    for M in case.rows:
        for turn in range(_TIMES):
            shares = {(slot + turn) % case.slots: len(range(slot, M, case.slots)) for slot in range(case.slots)}
            yield {slot: rows for slot, rows in shares.items() if rows}


def _step(shares: dict[int, int], at: list[int], vocab: int, *, prefill: bool) -> Step:
    """The next rows of some slots, whose positions move on; of a prompt only the last row's logits."""
    slots = np.repeat(list(shares), list(shares.values())).astype(np.int32)
    positions = np.concatenate([np.arange(at[slot], at[slot] + rows) for slot, rows in shares.items()])
    for slot, rows in shares.items():
        at[slot] += rows
    wanted = np.arange(slots.size)[-1 if prefill else 0 :]
    return Step(
        tokens=((7 * positions + 13 * slots + 3) % vocab).astype(np.int32),
        slots=slots,
        positions=positions.astype(np.int32),
        logit_rows=wanted.astype(np.int32),
        prefill=prefill,
    )
