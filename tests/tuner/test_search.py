from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from tuner.candidates import k_chunk_limit, n_tb_candidates
from tuner.devices import DEVICES
from tuner.errors import BudgetError, Cancelled, ShapeError, TimerError
from tuner.search import Configuration, pooled, tune
from tuner.shapes import SHAPES, LayerShape
from tuner.simulate import SimulatedTimer

LAYERS = SHAPES["llama-3-8b"].layers
KINDS = [layer.kind for layer in LAYERS]


class Formula:
    """A timer that computes times and counts how often it was asked."""

    def __init__(self, seconds: Callable[[str, int, int], float], *, measured: bool = False) -> None:
        self.formula = seconds
        self.measured = measured
        self.asked: Counter[tuple[str, int, int]] = Counter()

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        self.asked[kind, n_tb, k_chunk] += 1
        return self.formula(kind, n_tb, k_chunk)


def knees(seed: int) -> Callable[[str, int, int], float]:
    """Random knee curves, better with more blocks up to a point."""
    rng = random.Random(seed)
    base = {layer.kind: layer.weights / 1e6 * rng.uniform(0.8, 1.2) for layer in LAYERS}
    free = {kind: rng.randint(0, 40) for kind in KINDS}
    slope = {kind: rng.uniform(0.002, 0.05) for kind in KINDS}
    taken = rng.uniform(0.0005, 0.01)

    def seconds(kind: str, n_tb: int, k_chunk: int) -> float:
        if k_chunk == 0:
            return base[kind]
        over = max(0, k_chunk - free[kind] * min(n_tb, 16) / 16)
        return base[kind] * (1 + slope[kind] * over + taken * n_tb + 1e-6 * k_chunk)

    return seconds


def walked(
    layers: Sequence[LayerShape], seconds: Callable[[str, int, int], float], budget: float, sms: int, limit: int
) -> tuple[int, dict[str, int]]:
    """The paper's two phases one step at a time."""
    base = sum(layer.count * seconds(layer.kind, 0, 0) for layer in layers)
    allowed = base * (1 + budget / 100)
    candidates = {layer.kind: n_tb_candidates(layer.n, layer.k) for layer in layers}

    def blocks(bound: int) -> dict[str, int]:
        return {kind: max(count for count in counts if count <= bound) for kind, counts in candidates.items()}

    def total(n_tb: Mapping[str, int], k_chunk: Mapping[str, int]) -> float:
        return sum(layer.count * seconds(layer.kind, n_tb[layer.kind], k_chunk[layer.kind]) for layer in layers)

    kept = sorted(layers, key=lambda layer: layer.weights)
    while kept:
        ranking = []
        for bound in range(1, sms // 2 + 1):
            k_chunk, n_tb = dict.fromkeys(candidates, 0), blocks(bound)
            while max(k_chunk.values()) < limit:
                more = k_chunk | {layer.kind: k_chunk[layer.kind] + 1 for layer in kept}
                if total(n_tb, more) > allowed:
                    break
                k_chunk = more
            ranking.append((-max(k_chunk.values()), total(n_tb, k_chunk), bound))
        if min(ranking)[0] < 0:
            break
        kept = kept[1:]
    else:
        return 1, dict.fromkeys(candidates, 0)
    steps, _, bound = min(ranking)
    n_tb, k_chunk = blocks(bound), dict.fromkeys(candidates, 0) | {layer.kind: -steps for layer in kept}
    growing = [layer for layer in layers if k_chunk[layer.kind]]
    while growing:
        cost = {
            layer.kind: total(n_tb, k_chunk | {layer.kind: k_chunk[layer.kind] + 1}) - total(n_tb, k_chunk)
            for layer in growing
        }
        still = []
        for layer in sorted(growing, key=lambda layer: cost[layer.kind]):
            more = k_chunk | {layer.kind: k_chunk[layer.kind] + 1}
            if more[layer.kind] <= limit and total(n_tb, more) <= allowed:
                k_chunk = more
                still.append(layer)
        growing = still
    return bound, k_chunk


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("budget", [1.0, 5.0, 20.0])
def test_bisection_finds_what_single_steps_find(seed: int, budget: float) -> None:
    found = tune(LAYERS, Formula(knees(seed)), budget_percent=budget, sm_count=40, limit=49152)
    bound, k_chunk = walked(LAYERS, knees(seed), budget, 40, k_chunk_limit(6144, 4096, 1, 49152))
    assert found.k_chunk == k_chunk
    assert found.n_tb_max == bound
    assert found.predicted_slowdown_percent <= budget + 1e-9


@pytest.mark.parametrize("device", ["rtx-4090", "rtx-4050m"])
@pytest.mark.parametrize("budget", [2.5, 20.0])
def test_it_finds_on_a_simulated_device_what_single_steps_find(device: str, budget: float) -> None:
    spec = DEVICES[device]
    timer = SimulatedTimer(spec, LAYERS, 3)
    found = tune(LAYERS, timer, budget_percent=budget, sm_count=spec.sm_count, limit=49152)
    assert (found.n_tb_max, found.k_chunk) == walked(LAYERS, timer.seconds, budget, spec.sm_count, 367)


def test_a_layer_gets_the_largest_candidate_up_to_the_bound() -> None:
    """Figure 11's bound of 24 on 56 multiprocessors gives 24, 16 and 23 blocks."""

    def seconds(kind: str, n_tb: int, k_chunk: int) -> float:
        best = {"qkv": 24, "o": 16, "gate_up": 23, "down": 16}[kind]
        return 100.0 + (0.01 * abs(n_tb - best) + 0.001 * k_chunk if k_chunk else 0)

    found = tune(LAYERS, Formula(seconds), budget_percent=1, sm_count=56, limit=49152)
    assert found.n_tb == {"qkv": 24, "o": 16, "gate_up": 23, "down": 16}
    assert found.n_tb_max in (23, 24)


def test_no_more_than_half_of_the_multiprocessors_are_tried() -> None:
    timer = Formula(knees(1))
    tune(LAYERS, timer, budget_percent=5, sm_count=20)
    assert max(n_tb for _, n_tb, _ in timer.asked) == 10


def test_one_multiprocessor_is_enough() -> None:
    assert tune(LAYERS, Formula(knees(1)), budget_percent=20, sm_count=1).n_tb_max == 1


def fixed_cost(cost: Mapping[str, float]) -> Callable[[str, int, int], float]:
    """Compensation costs so many seconds at once and next to nothing per channel; every product alone takes 1 s."""
    return lambda kind, n_tb, k_chunk: 1 + (cost[kind] + 1e-6 * k_chunk if k_chunk else 0)


def test_the_smallest_matrix_is_left_out_first() -> None:
    timer = Formula(fixed_cost({"qkv": 0.1, "o": 0.4, "gate_up": 0.05, "down": 0.05}))
    found = tune(LAYERS, timer, budget_percent=6, sm_count=20, limit=49152)
    assert found.k_chunk["o"] == 0
    assert all(found.k_chunk[kind] == 367 for kind in ("qkv", "gate_up", "down"))


def test_it_goes_on_leaving_out_by_size() -> None:
    timer = Formula(fixed_cost({"qkv": 0.0, "o": 0.0, "gate_up": 0.01, "down": 9.0}))
    found = tune(LAYERS, timer, budget_percent=5, sm_count=20, limit=49152)
    assert found.k_chunk == {"qkv": 0, "o": 0, "gate_up": 367, "down": 0}


def test_where_nothing_fits_nothing_is_compensated() -> None:
    found = tune(LAYERS, Formula(fixed_cost(dict.fromkeys(KINDS, 9.0))), budget_percent=5, sm_count=20, limit=49152)
    assert set(found.k_chunk.values()) == {0}
    assert found.predicted_slowdown_percent == 0


def test_counts_weigh_the_layers() -> None:
    """A head that costs a tenth of its own time costs a thousandth of a token's."""
    layers = [LayerShape("down", 4096, 4096, 99), LayerShape("head", 32000, 4096, 1)]
    timer = Formula(lambda kind, n_tb, k: 1.0 + (0.001 * k if kind == "down" else 0.1 if k else 0))
    found = tune(layers, timer, budget_percent=1, sm_count=20, limit=49152)
    assert found.k_chunk["head"] == 367
    assert found.k_chunk["down"] == 9
    assert found.predicted_slowdown_percent == pytest.approx(0.1 + 99 * 0.009)


def test_on_a_processor_only_k_chunk_is_searched() -> None:
    timer = Formula(lambda kind, n_tb, k: 1.0 + 0.001 * k)
    found = tune(LAYERS, timer, budget_percent=5, sm_count=None)
    assert found == Configuration(
        n_tb_max=None,
        n_tb=dict.fromkeys(KINDS, 0),
        k_chunk=dict.fromkeys(KINDS, 50),
        predicted_slowdown_percent=pytest.approx(5),
    )
    assert {n_tb for _, n_tb, _ in timer.asked} == {0}


def test_free_compensation_goes_up_to_every_channel() -> None:
    found = tune(LAYERS, Formula(lambda *_: 1.0), budget_percent=0.1, sm_count=None)
    assert set(found.k_chunk.values()) == {1024}


def test_a_clock_is_asked_rarely() -> None:
    timer = Formula(knees(3), measured=True)
    tune(LAYERS, timer, budget_percent=5, sm_count=None)
    points = [point for point in timer.asked if point[2]]
    assert len(points) < 100
    assert {count for (_, _, k), count in timer.asked.items() if k} == {3}
    assert {count for (_, _, k), count in timer.asked.items() if not k} == {9}


def test_noise_moves_the_result_little() -> None:
    rng = random.Random(0)
    exact = knees(3)
    quiet = tune(LAYERS, Formula(exact), budget_percent=10, sm_count=36, limit=49152)
    timer = Formula(lambda *point: exact(*point) * rng.uniform(0.95, 1.05), measured=True)
    noisy = tune(LAYERS, timer, budget_percent=10, sm_count=36, limit=49152)
    base = sum(layer.count * exact(layer.kind, 0, 0) for layer in LAYERS)
    spent = sum(layer.count * exact(layer.kind, noisy.n_tb[layer.kind], noisy.k_chunk[layer.kind]) for layer in LAYERS)
    assert spent / base - 1 < 0.16
    assert sum(noisy.k_chunk.values()) == pytest.approx(sum(quiet.k_chunk.values()), rel=0.5)


def test_pooling_gives_the_nearest_curve_that_never_falls() -> None:
    assert pooled({1: 1.0, 2: 3.0, 4: 2.0, 8: 4.0}) == {1: 1.0, 2: 2.5, 4: 2.5, 8: 4.0}
    assert pooled({4: 1.0, 1: 4.0, 2: 1.0}) == {1: 2.0, 2: 2.0, 4: 2.0}
    assert pooled({3: 1.0}) == {3: 1.0}


def test_a_dip_in_a_measured_curve_is_not_believed() -> None:
    times = {0: 1.0, 1: 1.04, 2: 1.0, 3: 1.06}
    timer = Formula(lambda kind, n_tb, k: times[k], measured=True)
    found = tune(LAYERS[:1], timer, budget_percent=5, sm_count=None)
    assert found.k_chunk == {"qkv": 2}
    assert found.predicted_slowdown_percent == pytest.approx(2)


def test_compensation_that_seems_to_speed_up_is_free() -> None:
    timer = Formula(lambda kind, n_tb, k: 0.9 if k else 1.0, measured=True)
    assert tune(LAYERS, timer, budget_percent=5, sm_count=None).predicted_slowdown_percent == 0


@pytest.mark.parametrize("budget", [0, -1, 100.1, math.nan, math.inf])
def test_a_budget_out_of_range_is_refused(budget: float) -> None:
    timer = Formula(knees(0))
    with pytest.raises(BudgetError, match="above 0 and at most 100 percent"):
        tune(LAYERS, timer, budget_percent=budget, sm_count=20)
    assert not timer.asked


def test_no_layers_are_refused() -> None:
    with pytest.raises(ShapeError, match="a model without residuals"):
        tune([], Formula(knees(0)), budget_percent=5, sm_count=20)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    timer = Formula(lambda kind, n_tb, k: seconds if k == 3 else 1.0, measured=True)
    with pytest.raises(TimerError, match="with k_chunk 3"):
        tune(LAYERS, timer, budget_percent=5, sm_count=20)


def test_a_device_without_multiprocessors_is_refused() -> None:
    with pytest.raises(TimerError, match="0 multiprocessors"):
        tune(LAYERS, Formula(knees(0)), budget_percent=5, sm_count=0)


def test_it_stops_before_the_next_measurement() -> None:
    timer = Formula(knees(0), measured=True)
    with pytest.raises(Cancelled, match="measurements are kept"):
        tune(LAYERS, timer, budget_percent=5, sm_count=20, cancelled=lambda: timer.asked.total() == 50)
    assert timer.asked.total() == 50
