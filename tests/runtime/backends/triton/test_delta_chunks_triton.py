"""Chunks of the delta rule against the plain rule in float64, on numbers that are hard for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import recurrent
from models.recurrent import DeltaInputs
from models.spec import DeltaSpec
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.kernels.delta_chunks import Mixed, delta_rule_chunked, heads_of
from runtime.backends.triton.sizes import CHUNK
from tests.close import Tolerance, assert_close

PARTS = Tolerance(rtol=1e-4, spread=2e-4, why="on a card operands are two parts of bfloat16: 2^-16 of their lengths")
SPEC = DeltaSpec(key_heads=2, value_heads=4, key_dim=24, value_dim=24)
"""Channels that fill neither half of a matrix's rows, nor its columns."""
EVEN = DeltaSpec(key_heads=1, value_heads=1, key_dim=32, value_dim=16)
"""Channels that fill them."""
WIDE = DeltaSpec(key_heads=1, value_heads=1, key_dim=128, value_dim=128)
"""Heads of Qwen3.5."""
Run = tuple[int, int, int]
"""Slot, rows, and what its matrices do (`States.absorbs`)."""


class Prompt:
    """Rows of runs, what the rule reads of them, and matrices that have absorbed other tokens before.

    Args:
        spec: The heads.
        runs: By their place in the table; without rows where there is none.
        device: Where kernels run.
    """

    def __init__(self, spec: DeltaSpec, runs: Sequence[Run], device: str) -> None:
        self.spec, self.runs, self.device = spec, runs, device
        self.generator = torch.Generator().manual_seed(sum(count for _, count, _ in runs))
        rows, heads = sum(count for _, count, _ in runs), spec.value_heads
        self.q, self.k = (recurrent.normalized(self.normal(rows, spec.key_heads, spec.key_dim)) for _ in range(2))
        self.q *= spec.key_dim**-0.5
        self.v = self.normal(rows, heads, spec.value_dim)
        self.log_decay, self.beta = -self.normal(rows, heads).exp(), self.normal(rows, heads).sigmoid()
        columns = -(-spec.value_dim // 16) * 16
        self.matrices = self.normal(1 + max(slot for slot, *_ in runs), heads, spec.key_dim, columns)
        self.matrices[..., spec.value_dim :] = 0

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def check(self) -> None:
        """Rows that matrices absorb at once are read as by the oracle; the others, and their matrices, are left."""
        spec, M = self.spec, len(self.v)
        entered = torch.cat([x.flatten(1) for x in (self.q, self.k, self.v, self.beta, self.log_decay)], 1)
        mixed = Mixed(
            torch.full((1, spec.inputs), torch.nan, device=self.device),
            entered.to(self.device, copy=True),
            torch.full((M, spec.value_heads, 2, CHUNK), torch.nan, device=self.device),
        )
        slots = torch.cat([torch.full((count,), slot, dtype=torch.int32) for slot, count, _ in self.runs])
        table, first, left = torch.zeros(len(self.runs), 4, dtype=torch.int32), 0, torch.ones(M, dtype=torch.bool)
        values, after = self.v.double(), self.matrices.double()
        for number, (slot, count, absorbs) in enumerate(self.runs):
            own, first = slice(first, first + count), first + count
            if not count:
                continue
            table[number] = torch.tensor((own.start, count, 0, absorbs))
            if absorbs == 2:
                start = after[slot, ..., : spec.value_dim]
                values[own], after[slot, ..., : spec.value_dim] = recurrent.delta_rule(self.inputs(own), start)
                left[own] = False
        matrices = self.matrices.to(self.device, copy=True)
        rows = Rows(torch.zeros_like(slots).to(self.device), slots.to(self.device))
        delta_rule_chunked(mixed, matrices, rows, table.to(self.device), heads_of(spec, matrices.shape[3]))
        found = mixed.rows.cpu()
        assert_close(found[:, 2 * spec.key_width : spec.channels], values.flatten(1), PARTS)
        assert_close(matrices, after, PARTS)
        assert torch.equal(found[left], entered[left])
        assert torch.equal(matrices[..., spec.value_dim :], torch.zeros_like(matrices[..., spec.value_dim :]))

    def inputs(self, rows: slice) -> DeltaInputs:
        """What the oracle reads of some of the rows."""
        shared = self.spec.value_heads // self.spec.key_heads
        q, k = (x.repeat_interleave(shared, 1) for x in (self.q, self.k))
        read = DeltaInputs(*(x.double() for x in (q, k, self.v, self.log_decay, self.beta)))
        return read.part(rows)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        pytest.param(replace(SPEC, value_heads=6, key_dim=8, value_dim=40), marks=pytest.mark.slow),
        pytest.param(WIDE, marks=pytest.mark.slow),
    ],
)
def test_runs_of_any_length_are_read_in_one_step(device: str, spec: DeltaSpec) -> None:
    """Whole chunks and tails, in any order of slots; short runs, which are read row by row, and no run between them."""
    lengths = [(3, 2 * CHUNK + 5, 2), (1, 4, 1), (4, CHUNK, 2), (0, 0, 0), (2, 17, 2), (5, 3, 0), (6, CHUNK + 1, 2)]
    Prompt(spec, lengths, device).check()


def forgets(prompt: Prompt) -> None:
    """Each row leaves nothing of the ones before."""
    prompt.log_decay -= 200


def keeps(prompt: Prompt) -> None:
    """Nothing is forgotten, and nearly all is replaced."""
    prompt.log_decay *= 1e-7
    prompt.beta[:] = 1


def forgets_once(prompt: Prompt) -> None:
    """A row forgets all, and the others hardly anything: differences of sums of decays would lose theirs."""
    prompt.log_decay *= 1e-3
    prompt.log_decay[5::9] = -3e4


def ignores(prompt: Prompt) -> None:
    """Hardly anything is replaced."""
    prompt.beta *= 1e-6


def repeats(prompt: Prompt) -> None:
    """Keys are nearly the same, and nothing is forgotten: powers of the triangular system would be in the thousands."""
    keeps(prompt)
    prompt.k[:] = recurrent.normalized(prompt.k[:1] + 1e-3 * prompt.k)


def alternates(prompt: Prompt) -> None:
    """Keys are one and its opposite in turns."""
    repeats(prompt)
    prompt.k[::2] *= -1


def spreads(prompt: Prompt) -> None:
    """Values of all sizes, behind a state of large numbers."""
    prompt.v *= 10.0 ** prompt.normal(*prompt.v.shape[:2], 1)
    prompt.matrices *= 1e5


HARD: list[Any] = [forgets, keeps, forgets_once, ignores, repeats, alternates, spreads]


@pytest.mark.parametrize("made", HARD)
def test_extreme_numbers_are_read_as_by_the_plain_rule(device: str, made: Any) -> None:
    prompt = Prompt(EVEN, [(0, 2 * CHUNK + 7, 2)], device)
    made(prompt)
    prompt.check()


@pytest.mark.gpu
def test_long_prompts_of_real_heads(cuda: str) -> None:
    """Two sequences of Qwen3.5 4B, and a row of a third between them."""
    spec = replace(WIDE, key_heads=16, value_heads=32)
    Prompt(spec, [(1, 300, 2), (2, 1, 1), (0, 512, 2)], cuda).check()
