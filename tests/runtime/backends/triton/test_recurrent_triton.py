"""Kernels of layers with a state against the plain functions of `models.recurrent`, over whole sequences.

Every sequence is read in steps by the kernels, with what they keep of it, and from its beginning by the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models import recurrent
from models.spec import DeltaSpec, ModelSpec
from runtime.backends.triton.cache import DeviceMemory, RunTable
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.kernels.delta_chunks import Mixed
from runtime.backends.triton.kernels.recurrent import ALONE, DeltaLayer, Rates, Recent, convolve, delta_rule
from runtime.backends.triton.sizes import CHUNK, RUNS_TOGETHER
from runtime.kv.control import runs_of
from runtime.kv.states import LONGEST_TAPS, RING, SMALL_STEP, WAITING, States
from tests.close import Tolerance, assert_close
from tests.runtime.backends.triton.operands import assert_left, left_of
from tests.runtime.conftest import make_spec
from tests.runtime.engine.talking import DELTA

HALF = Tolerance(rtol=1e-3, atol=1e-4, why="sums in float32 in another order, rounded to half precision")
SLOTS, TAPS, EPS = RUNS_TOGETHER + 2, 4, 1e-5
SLOW = pytest.mark.slow
NARROW = replace(DELTA, key_heads=1, value_heads=2)
"""As few heads as show that several share a key: the interpreter takes milliseconds for each of a row."""
Run = tuple[int, int, int]
"""Slot, first position and rows."""


class Slots:
    """A layer with a state, and the sequences in its slots.

    Args:
        spec: The model; its first layer has a state.
        width: Outputs of the projection.
        device: Where kernels run.
        compensated: Whether the projection's output is the sum of two.
    """

    def __init__(self, spec: ModelSpec, width: int, device: str, *, compensated: bool) -> None:
        where = torch.device(device)
        self.states = States(spec, SLOTS, DeviceMemory(where))
        self.table = RunTable(self.states, SLOTS, where)
        self.device, self.width, self.compensated = device, width, compensated
        self.generator = torch.Generator().manual_seed(width)
        self.read: list[torch.Tensor] = [torch.zeros(0, width) for _ in range(SLOTS)]
        self.given: torch.Tensor | None = None
        for array in (*self.states.recent.values(), self.states._pool):
            array.fill_(torch.nan)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def begin(self, runs: Sequence[Run], *, draft: bool = False) -> tuple[Any, Any, Rows]:
        """The projection of a step's rows, its compensation, and their places."""
        slots = np.concatenate([np.full(count, slot, np.int32) for slot, _, count in runs])
        positions = np.concatenate([np.arange(start, start + count, dtype=np.int32) for _, start, count in runs])
        own = list(runs_of(slots, positions))
        for slot, start, end in own:
            self.states.check(slot, start, end, draft=draft)
            self.states.begin(slot, start, end, draft=draft)
        self.table.write(own)
        rows = self.normal(len(slots), self.width) if self.given is None else self.given[positions]
        row = 0
        for slot, start, count in runs:
            self.read[slot] = torch.cat((self.read[slot][:start], rows[row : row + count]))
            row += count
        y, dec = (rows, None) if not self.compensated else (rows - 1, torch.ones_like(rows).to(self.device))
        return y.to(self.device), dec, Rows(*(torch.from_numpy(x).to(self.device) for x in (positions, slots)))

    def expect(self, runs: Sequence[Run], whole: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What a function of whole sequences gives for a step's rows."""
        return torch.cat([whole(self.read[slot])[start : start + count] for slot, start, count in runs])


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize(
    ("compensated", "bias", "C", "_order"),
    [(True, True, 40, "backwards"), pytest.param(False, False, 300, "forwards", marks=SLOW)],
    indirect=["_order"],
)
def test_convolutions_are_those_of_whole_sequences(device: str, compensated: bool, bias: bool, C: int) -> None:
    """Rows across the border of a ring, as many as have a launch of their own to enter it and one less, and two
    sequences at once; of the most taps, which read furthest."""
    taps = LONGEST_TAPS
    spec = make_spec(hidden_size=C, num_layers=1, conv_kernel_size=taps, mixers=("convolution",))
    slots = Slots(spec, 3 * C, device, compensated=compensated)
    weight, added = slots.normal(taps, C), slots.normal(C) if bias else None
    recent = Recent(slots.states.recent[0], *(None if x is None else x.to(device) for x in (weight.flatten(), added)))

    def whole(y: torch.Tensor) -> torch.Tensor:
        before, after, u = y.chunk(3, dim=1)
        padded = torch.cat((torch.zeros(taps - 1, C), before * u))
        return after * recurrent.convolve(padded, weight, added)

    at = ALONE + 4
    steps = [[(0, 0, 3), (2, 0, 1)], [(2, 1, 2), (0, 3, 1)], [(0, 4, ALONE)], [(0, at, ALONE - 1)]]
    for runs in (*steps, [(0, at + ALONE - 1, RING + 2)], [(2, 3, 1), (0, at + ALONE + RING + 1, 1)]):
        y, dec, rows = slots.begin(runs)
        x = torch.full((len(y), C), torch.nan, dtype=torch.float16, device=device)
        left = left_of(len(y), C, device, rotated=len(runs) > 1)
        convolve(y, dec, rows, recent, x, left)
        assert_close(x, slots.expect(runs, whole), HALF)
        assert_left(left, x)


def layer_of(slots: Slots, spec: DeltaSpec) -> tuple[DeltaLayer, Callable[[torch.Tensor], torch.Tensor]]:
    """A layer with random numbers, and the oracle of a whole sequence."""
    own = {"conv": slots.normal(TAPS * spec.channels)}
    if spec.normed:
        own["gain"] = slots.normal(spec.gain_width)
    own |= {"decay": -slots.normal(spec.value_heads).exp(), "dt": slots.normal(spec.value_heads)}
    if spec.mamba:
        own |= {"conv_bias": slots.normal(spec.channels), "skip": slots.normal(spec.value_heads)}
    held = {name: vector.to(slots.device) for name, vector in own.items()}
    recent = Recent(slots.states.recent[0], held["conv"], held.get("conv_bias"))
    rates = Rates(held["decay"], held["dt"], held.get("skip"))
    layer = DeltaLayer(spec, recent, rates, held.get("gain"), EPS, slots.states.matrices[0])

    def whole(y: torch.Tensor) -> torch.Tensor:
        entered = torch.cat((torch.zeros(TAPS - 1, spec.inputs), y[:, : spec.inputs]))
        read = recurrent.delta_inputs(spec, entered, TAPS, own)
        start = torch.zeros(spec.value_heads, spec.key_dim, spec.value_dim)
        found, _ = recurrent.delta_rule(read, start)
        return recurrent.finish(spec, found, y[:, spec.inputs :], own.get("gain"), EPS)

    return layer, whole


class Rule:
    """A delta rule in slots, step by step."""

    def __init__(self, spec: DeltaSpec, model: ModelSpec, device: str, *, compensated: bool) -> None:
        self.slots = Slots(model, spec.inputs + spec.value_width, device, compensated=compensated)
        self.layer, self.whole = layer_of(self.slots, spec)

    def step(self, runs: Sequence[Run], *, draft: bool = False) -> torch.Tensor:
        """What the kernels give, within a tolerance of what the oracle does."""
        spec, device = self.layer.spec, self.slots.device
        y, dec, rows = self.slots.begin(runs, draft=draft)
        M, width = len(y), spec.value_width
        waiting = torch.full((min(M, RUNS_TOGETHER) * WAITING, spec.inputs), torch.nan, device=device)
        chunks = torch.full((M, spec.value_heads, 2, CHUNK), torch.nan, device=device)
        mixed = Mixed(waiting, torch.full((M, spec.inputs), torch.nan, device=device), chunks)
        x = torch.full((M, width), torch.nan, dtype=torch.float16, device=device)
        left = None if spec.value_dim % 32 else left_of(M, width, device, rotated=spec.value_dim % 64 == 0)
        delta_rule(y, dec, rows, self.slots.table.tensor, self.layer, mixed, x, left)
        assert_close(x, self.slots.expect(runs, self.whole), HALF)
        if left is not None:
            assert_left(left, x)
        return x


@pytest.fixture
def rule(device: str) -> Callable[..., Rule]:
    def make(spec: DeltaSpec = NARROW, *, compensated: bool = False) -> Rule:
        model = make_spec(num_layers=1, conv_kernel_size=TAPS, mixers=("delta",), delta=spec, gated=True)
        return Rule(spec, model, device, compensated=compensated)

    return make


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize(
    ("spec", "compensated", "_order"),
    [
        (NARROW, True, "backwards"),
        (replace(NARROW, mamba=True), True, "backwards"),
        (replace(NARROW, mamba=True, normed=False), True, "backwards"),
        pytest.param(NARROW, True, "forwards", marks=SLOW),
        pytest.param(DeltaSpec(key_heads=1, value_heads=3, key_dim=32, value_dim=64), False, "backwards", marks=SLOW),
        pytest.param(replace(DELTA, value_dim=8), True, "backwards", marks=SLOW),
    ],
    indirect=["_order"],
)
def test_delta_rules_are_those_of_whole_sequences(rule: Any, spec: DeltaSpec, compensated: bool) -> None:
    """Rows across the border of a ring, chunks of them and fewer, alone and in one step, and two sequences at once."""
    own, long = rule(spec, compensated=compensated), RING + 2
    steps = [[(0, 0, 3), (2, 0, 1)], [(2, 1, 2), (0, 3, 1)], [(0, 4, long)], [(2, 3, SMALL_STEP + 1), (0, long + 4, 1)]]
    for runs in (*steps, [(0, long + 5, SMALL_STEP)], [(0, long + SMALL_STEP + 5, 1), (2, SMALL_STEP + 4, 2)]):
        own.step(runs)


def test_rows_that_wait_are_absorbed_once_and_only_if_they_stay(rule: Any) -> None:
    """A checked draft of which two rows stay, drafts one by one that wait, their check, and tokens behind it."""
    own = rule()
    own.step([(1, 0, SMALL_STEP + 1)])
    own.step([(1, 17, SMALL_STEP)])
    own.step([(1, 19, 1)], draft=True)
    before = own.layer.matrices[1].clone()
    for position in (20, 21):
        own.step([(1, position, 1)], draft=True)
    assert torch.equal(before, own.layer.matrices[1])
    own.step([(1, 19, 4)])
    own.step([(1, 21, 1)])
    own.step([(1, 22, SMALL_STEP + 4)])
    own.step([(1, 42, 1)])
    others = torch.cat((own.layer.matrices[:1], own.layer.matrices[2:]))
    assert not others.any(), "slots without rows are left alone"


def test_more_sequences_than_are_prepared_together(rule: Any) -> None:
    """Two heads share each key."""
    own = rule(DELTA)
    for position in range(2):
        own.step([(slot, position, 1) for slot in reversed(range(SLOTS))])


def test_a_row_has_the_same_bits_alone_and_among_others(rule: Any) -> None:
    """As drafts must, to be checked by several rows at once; and whoever absorbed them goes on with the same bits."""
    together, alone = rule(), rule()
    together.slots.given = alone.slots.given = together.slots.normal(7, together.slots.width)
    single = [alone.step([(0, position, 1)]) for position in range(6)]
    assert torch.equal(together.step([(0, 0, 6)]), torch.cat(single))
    assert torch.equal(together.step([(0, 6, 1)]), alone.step([(0, 6, 1)]))
    assert torch.equal(together.layer.matrices, alone.layer.matrices)


def test_a_prompt_beside_it_leaves_a_row_its_bits(rule: Any) -> None:
    """A step of so many rows has chunks, but not of a sequence of which it has one row."""
    beside, alone = rule(), rule()
    beside.slots.given = alone.slots.given = beside.slots.normal(SMALL_STEP + 1, beside.slots.width)
    for each in (beside, alone):
        each.step([(1, 0, 1)])
    row = beside.step([(1, 1, 1), (0, 0, SMALL_STEP + 1)])[:1]
    assert torch.equal(row, alone.step([(1, 1, 1)]))
    assert torch.equal(beside.layer.matrices[1], alone.layer.matrices[1])
