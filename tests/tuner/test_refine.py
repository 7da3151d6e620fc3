"""Refining a budget on a device whose times are known, with a clock that is not exact and a text that is."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tuner.errors import Cancelled
from tuner.findings import Findings, FindingsStore
from tuner.profiles import ProfileKey
from tuner.refine import ROUNDS, TIMED, Refinement, line
from tuner.shapes import LayerShape

LAYERS = [LayerShape("qkv", 960, 576, 30), LayerShape("down", 576, 1536, 30), LayerShape("head", 49152, 576, 1)]
N_TB = {"qkv": 0, "down": 0, "head": 0}
FIXED, EACH = {"qkv": 0.9, "down": 2.3, "head": 1.5}, {"qkv": 0.045, "down": 0.14, "head": 0.043}
WORTH = {"qkv": 0.03, "down": 0.1, "head": 0.03}
KEY = ProfileKey(
    backend="cpu",
    device="a processor",
    driver="",
    capability="2 threads",
    model="m",
    content="c",
    recipe="r",
    versions={},
    budget_percent=0.0,
)
NONE = dict.fromkeys(N_TB, 0)


class Device:
    """Each layer type costs something from its first channel on; a text gains by each, by the first most."""

    def __init__(self, noise: float = 0.0, seed: int = 0, stop_after: int = 10**9, worth: float = 1.0) -> None:
        self.noise, self.rng, self.stop_after, self.worth = noise, random.Random(seed), stop_after, worth
        self.timed: list[dict[str, int]] = []
        self.read: list[dict[str, int]] = []

    def true(self, k_chunk: Mapping[str, int]) -> float:
        return sum(FIXED[kind] + EACH[kind] * k for kind, k in k_chunk.items() if k)

    def slowdown(self, k_chunk: Mapping[str, int], n_tb: Mapping[str, int]) -> float:
        assert n_tb == N_TB
        self.timed.append(dict(k_chunk))
        return self.true(k_chunk) + self.rng.gauss(0, self.noise)

    def loss(self, k_chunk: Mapping[str, int]) -> float:
        self.read.append(dict(k_chunk))
        return 0.16 - self.worth * sum(WORTH[kind] * (k / 1024) ** 0.3 for kind, k in k_chunk.items())

    def stopped(self) -> bool:
        return len(self.timed) + len(self.read) >= self.stop_after

    def refine(
        self,
        findings: Findings,
        budget: float,
        start: Mapping[str, int] = NONE,
        layers: Sequence[LayerShape] = tuple(LAYERS),
    ) -> Findings:
        refinement = Refinement(
            layers,
            findings,
            self.loss,
            self.slowdown,
            n_tb=N_TB,
            limits={layer.kind: 1024 for layer in layers},
            cancelled=self.stopped,
        )
        with contextlib.suppress(Cancelled):
            refinement.within(budget, budget, start)
        return refinement.findings


def loss_within(findings: Findings, budget: float) -> float:
    found = findings.best(budget)
    assert found is not None
    assert found.loss is not None
    return found.loss


@pytest.mark.parametrize("budget", [2, 5, 10, 20])
def test_the_budget_is_spent_on_what_the_text_gains_by(budget: float) -> None:
    """No combination on a grid of its own that fits loses clearly less."""
    device = Device()
    found = device.refine(Findings(key=KEY), budget)
    best = found.best(budget)
    assert best is not None
    assert device.true(best.k_chunk) == pytest.approx(best.slowdown_percent)
    assert best.slowdown_percent <= budget
    grid = (0, 1, 3, 7, 15, 30, 60, 120, 250, 500)
    others = ({"qkv": a, "down": b, "head": c} for a in grid for b in grid for c in grid)
    least = min(device.loss(k_chunk) for k_chunk in others if device.true(k_chunk) <= budget)
    assert loss_within(found, budget) < least + 0.005
    assert found.refined == (budget,)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_device_buys_the_same_twice(seed: int) -> None:
    """A reading is half a percent of slowdown off."""
    for budget in (5, 10):
        losses = [
            loss_within(Device(0.5, 2 * seed + half).refine(Findings(key=KEY), budget), budget) for half in (0, 1)
        ]
        assert losses[0] == pytest.approx(losses[1], abs=0.01)


class LastBlock(Device):
    """`down` of block 29 is worth six times its share, and costs its share."""

    LAYERS = (
        LAYERS[0],
        LayerShape("down", 576, 1536, 29),
        LAYERS[2],
        LayerShape("layers.29.down", 576, 1536, 1),
    )

    def true(self, k_chunk: Mapping[str, int]) -> float:
        own, k = dict(k_chunk), k_chunk["layers.29.down"]
        del own["layers.29.down"]
        return super().true(own) + ((FIXED["down"] + EACH["down"] * k) / 29 if k else 0)

    def loss(self, k_chunk: Mapping[str, int]) -> float:
        own, k = dict(k_chunk), k_chunk["layers.29.down"]
        del own["layers.29.down"]
        return super().loss(own) - 6 / 30 * WORTH["down"] * (k / 1024) ** 0.3


def test_the_last_block_is_compensated_before_the_others() -> None:
    """Its cost is not timed: it is a share of its type's."""
    device = LastBlock(0.1)
    found = device.refine(Findings(key=KEY), 1.5, layers=device.LAYERS)
    best = found.best(1.5)
    assert best is not None
    assert best.k_chunk["layers.29.down"] >= 64
    assert best.k_chunk["down"] == 0
    assert {"qkv": 0, "down": 0, "head": 0, "layers.29.down": 8} not in device.timed


def test_a_choice_so_far_by_type_holds_for_every_block() -> None:
    device = LastBlock()
    found = device.refine(Findings(key=KEY), 5, {"qkv": 0, "down": 7, "head": 0}, layers=device.LAYERS)
    assert {"qkv": 0, "down": 7, "head": 0, "layers.29.down": 7} in [dict(own.k_chunk) for own in found.measured]


@pytest.mark.parametrize("order", [(2, 5, 10, 20), (20, 10, 5, 2)])
def test_more_budget_never_buys_worse(order: tuple[float, ...]) -> None:
    """At any time, also for budgets between those that were refined."""
    for seed in range(3):
        device, found = Device(0.5, seed), Findings(key=KEY)
        for budget in order:
            found = device.refine(found, budget)
            losses = [loss_within(found, percent / 2) for percent in range(2, 60)]
            assert losses == sorted(losses, reverse=True)


def test_what_was_measured_is_not_measured_again() -> None:
    device = Device(0.5)
    found = device.refine(Findings(key=KEY), 5)
    timed, read = len(device.timed), len(device.read)
    assert len(device.read) == len({tuple(k_chunk.items()) for k_chunk in device.read})
    again = device.refine(found, 5)
    assert (len(device.timed), len(device.read), again) == (timed, read, found)
    device.refine(found, 10)
    assert len(device.timed) < 2 * timed


@pytest.mark.parametrize("every", [1, 7, 40])
def test_an_interrupted_refinement_loses_nothing(every: int) -> None:
    """It takes no more measurements in pieces than at once, and with the same clock finds the same."""
    whole = Device()
    wanted = whole.refine(Findings(key=KEY), 10)
    pieces, found = Device(), Findings(key=KEY)
    for _ in range(1000):
        pieces.stop_after = len(pieces.timed) + len(pieces.read) + every
        found = pieces.refine(found, 10)
        if found.refined:
            break
    assert found == wanted
    assert (len(pieces.timed), len(pieces.read)) == (len(whole.timed), len(whole.read))


def test_what_does_not_pay_on_the_text_is_not_taken() -> None:
    found = Device(worth=-1).refine(Findings(key=KEY), 10).best(10)
    assert found is not None
    assert not any(found.k_chunk.values())
    assert found.slowdown_percent == 0


def test_the_choice_so_far_counts() -> None:
    """What a tuning found is measured as well, and stays if nothing beats it."""
    device = Device()
    start = {"qkv": 3, "down": 5, "head": 3}
    found = device.refine(Findings(key=KEY), 10, start)
    assert any(own.k_chunk == start and own.loss is not None for own in found.measured)
    assert loss_within(found, 10) <= device.loss(start)


def test_no_choice_counts_before_it_has_its_readings() -> None:
    device = Device(stop_after=len(LAYERS) * len(TIMED) + 1 + ROUNDS)
    found = device.refine(Findings(key=KEY), 10)
    assert device.timed
    best = found.best(100)
    assert best is not None
    assert not any(best.k_chunk.values())
    assert not found.refined
    assert Findings(key=KEY).best(10) is None


def test_a_line_through_readings() -> None:
    exact = line([(k, 2 + 0.1 * k) for k in TIMED])
    assert (exact(0), exact(2), exact(100)) == (0, pytest.approx(2.2), pytest.approx(12))
    assert line([(2, 3.0)])(4) == pytest.approx(6)
    falling = line([(2, 5.0), (128, 1.0)])
    assert falling(2) == falling(128) > 0


def test_findings_are_kept_for_every_budget_and_one_text(tmp_path: Path) -> None:
    store = FindingsStore(tmp_path)
    found = Device(0.5).refine(store.known(KEY, "text"), 5)
    store.save(found)
    assert store.known(KEY, "text") == found
    assert store.known(KEY, "another") == Findings(key=KEY, text="another")
    front = found.front()
    assert front[0] == (0, 0)
    assert list(front) == sorted(front)
    (file,) = tmp_path.glob("*.findings.json")
    file.write_text(file.read_text().replace('"slowdowns"', '"slow"'))
    assert store.known(KEY, "text").measured == ()
