"""The two-phase search for `n_tb` and `k_chunk` within a slowdown budget.

Σ count · seconds(with compensation) stays at or below (1 + budget) · Σ count · seconds(without), over all linear layers
that a token passes. Everything else (attention, norms) only makes the slowdown of a whole token smaller.

Source: QDEC §4.4, Fig. 11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuner.candidates import CHUNK, k_chunk_limit, n_tb_candidates
from tuner.errors import BudgetError, TimerError
from tuner.shapes import LayerShape, check_layers
from tuner.timer import Cancel, Timer, check, never

_SAMPLES, _BASE_SAMPLES = 3, 9
"""Readings per point with a clock. The baseline affects every decision, so it is read more often."""
_AGAIN = "the device disappeared or its clock is wrong; tune again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The result of a search."""

    n_tb_max: int | None
    """Bound on the thread blocks of all layers; None if the device has none."""
    n_tb: Mapping[str, int]
    """Thread blocks of the compensation, by layer type; 0 if the device has none."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type; 0 for an uncompensated layer."""
    predicted_slowdown_percent: float
    """Slowdown of all linear layers together, by the search's times."""


def check_budget(budget_percent: float) -> None:
    """Check that a budget is in range.

    Raises:
        BudgetError: it is not above 0 and at most 100.
    """
    if not 0 < budget_percent <= 100:
        raise BudgetError(f"a slowdown budget must be above 0 and at most 100 percent, not {budget_percent:g}")


def tune(
    layers: Sequence[LayerShape],
    timer: Timer,
    *,
    budget_percent: float,
    sm_count: int | None,
    limit: int | None = None,
    cancelled: Cancel = never,
) -> Configuration:
    """The paper's search: the largest `k_chunk` of every layer type within the budget, see `Search`.

    Args:
        layers: As for `Search`.
        timer: As for `Search`.
        budget_percent: Allowed slowdown of the linear layers, above 0 and at most 100 percent.
        sm_count: As for `Search`.
        limit: As for `Search`.
        cancelled: As for `Search`.

    Raises:
        BudgetError: the budget is out of range.
        ShapeError: no layers, or a type twice.
        TimerError: a product could not be timed.
        Cancelled: `cancelled` returned True.

    Source: QDEC §4.4.
    """
    check_budget(budget_percent)
    search = Search(layers, timer, sm_count=sm_count, limit=limit, cancelled=cancelled)
    return search.within(budget_percent)


class Search:
    """Finds the best configuration within a budget. Times are measured once and serve every budget.

    Args:
        layers: Layer types that a token passes, each once.
        timer: Times their products.
        sm_count: Multiprocessors of the device; None for a device without thread blocks (a CPU), where `n_tb` is 0.
        limit: Shared memory of a block in bytes; None does not bound `k_chunk` below 1024.
        cancelled: Called before every measurement.

    Raises:
        ShapeError: no layers, or a type twice.
        TimerError: a device without multiprocessors.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        timer: Timer,
        *,
        sm_count: int | None,
        limit: int | None = None,
        cancelled: Cancel = never,
    ) -> None:
        check_layers(layers)
        if sm_count is not None and sm_count < 1:
            raise TimerError(f"can't tune for a device with {sm_count} multiprocessors")
        self._layers = layers
        self._times = _Times(timer, cancelled)
        self._plans = _plans(layers, sm_count, limit)

    def within(self, budget_percent: float) -> Configuration:
        """Find the best configuration within a budget.

        Args:
            budget_percent: Allowed slowdown of the linear layers, above 0 and at most 100 percent.

        Raises:
            BudgetError: the budget is out of range.
            TimerError: a product could not be timed.
            Cancelled: `cancelled` returned True.

        Source: QDEC §4.4.
        """
        check_budget(budget_percent)
        allowed = self.base * (1 + budget_percent / 100)
        plan, start = _phase_1(self._layers, self._plans, self._times, allowed)
        k_chunk = _phase_2(self._layers, plan, self._times, allowed, start)
        slower = self._times.total(self._layers, plan, k_chunk) / self.base - 1
        return Configuration(
            n_tb_max=plan.n_tb_max,
            n_tb=dict(plan.n_tb),
            k_chunk=dict(k_chunk),
            predicted_slowdown_percent=100 * slower,
        )

    @property
    def base(self) -> float:
        """Seconds of a token's linear layers without compensation."""
        return sum(layer.count * self._times.base(layer.kind) for layer in self._layers)

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Seconds of one product; those of a layer type never fall as `k_chunk` rises."""
        return self._times.at(kind, n_tb, k_chunk)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Thread blocks of all layers under one bound, and the largest `k_chunk` that each allows."""

    n_tb_max: int | None
    n_tb: Mapping[str, int]
    limits: Mapping[str, int]


class _Times:
    """Times of single products. Each point is timed once; with a clock, as the median of a few readings.

    A product can't get faster when more channels are compensated. Readings that say so are pooled (isotonic regression
    over the points of one layer type and `n_tb`).
    """

    def __init__(self, timer: Timer, cancelled: Cancel) -> None:
        self._timer = timer
        self._cancelled = cancelled
        self._alone: dict[str, float] = {}
        self._curves: dict[tuple[str, int], dict[int, float]] = {}

    def base(self, kind: str) -> float:
        """Seconds of a product without compensation."""
        if kind not in self._alone:
            self._alone[kind] = self._read(kind, 0, 0)
        return self._alone[kind]

    def at(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Seconds of a product with compensation."""
        if k_chunk == 0:
            return self.base(kind)
        curve = self._curves.setdefault((kind, n_tb), {})
        if k_chunk not in curve:
            curve[k_chunk] = self._read(kind, n_tb, k_chunk)
        return max(self.base(kind), pooled(curve)[k_chunk]) if self._timer.measured else curve[k_chunk]

    def total(self, layers: Iterable[LayerShape], plan: _Plan, k_chunk: Mapping[str, int]) -> float:
        """Seconds of all linear layers of a token."""
        return sum(layer.count * self.at(layer.kind, plan.n_tb[layer.kind], k_chunk[layer.kind]) for layer in layers)

    def _read(self, kind: str, n_tb: int, k_chunk: int) -> float:
        samples = (_SAMPLES if k_chunk else _BASE_SAMPLES) if self._timer.measured else 1
        readings = []
        for _ in range(samples):
            check(self._cancelled)
            seconds = self._timer.seconds(kind, n_tb, k_chunk)
            if not 0 < seconds < float("inf"):
                raise TimerError(f"the timer reports {seconds} s for {kind} with k_chunk {k_chunk}: {_AGAIN}")
            readings.append(seconds)
        return sorted(readings)[samples // 2]


def pooled(curve: Mapping[int, float]) -> dict[int, float]:
    """The nearest non-decreasing curve: neighbours that decrease are replaced by their mean (isotonic regression)."""
    blocks: list[tuple[float, int]] = []
    for k_chunk in sorted(curve):
        mean, size = curve[k_chunk], 1
        while blocks and blocks[-1][0] > mean:
            before, members = blocks.pop()
            mean, size = (before * members + mean * size) / (members + size), members + size
        blocks.append((mean, size))
    means = [mean for mean, size in blocks for _ in range(size)]
    return dict(zip(sorted(curve), means, strict=True))


def _plans(layers: Sequence[LayerShape], sm_count: int | None, limit: int | None) -> list[_Plan]:
    """The plans of phase 1, by ascending bound. Bounds between two candidates give the same blocks."""
    if sm_count is None:
        return [_Plan(None, {layer.kind: 0 for layer in layers}, {layer.kind: CHUNK for layer in layers})]
    candidates = {layer.kind: n_tb_candidates(layer.n, layer.k) for layer in layers}
    bounds = sorted({count for counts in candidates.values() for count in counts if count <= max(1, sm_count // 2)})
    plans = []
    for bound in bounds:
        n_tb = {kind: max(count for count in counts if count <= bound) for kind, counts in candidates.items()}
        limits = {
            layer.kind: CHUNK if limit is None else k_chunk_limit(layer.n, layer.k, n_tb[layer.kind], limit)
            for layer in layers
        }
        plans.append(_Plan(bound, n_tb, limits))
    return plans


def _phase_1(
    layers: Sequence[LayerShape], plans: Sequence[_Plan], times: _Times, allowed: float
) -> tuple[_Plan, dict[str, int]]:
    """The plan under which all layers can take the most steps together, and the resulting `k_chunk`.

    Of plans with equally many steps the fastest wins. If no plan allows a step, the smallest matrix is left without
    compensation, and all plans are tried again.
    """
    compensated = list(layers)
    while compensated:
        best, steps, seconds = plans[0], 0, float("inf")
        for plan in plans:

            def spent(step: int, plan: _Plan = plan) -> float:
                return times.total(layers, plan, _uniform(layers, compensated, plan, step))

            if steps and spent(steps) > allowed:
                continue
            found = _largest(lambda step: spent(step) <= allowed, steps, max(plan.limits.values()))
            if found and (found, -spent(found)) > (steps, -seconds):
                best, steps, seconds = plan, found, spent(found)
        if steps:
            return best, _uniform(layers, compensated, best, steps)
        compensated.remove(min(compensated, key=lambda layer: layer.weights))
    return plans[0], {layer.kind: 0 for layer in layers}


def _uniform(layers: Sequence[LayerShape], compensated: Sequence[LayerShape], plan: _Plan, step: int) -> dict[str, int]:
    """`k_chunk` after a number of steps that all compensated layers take together."""
    return {layer.kind: min(step, plan.limits[layer.kind]) if layer in compensated else 0 for layer in layers}


def _phase_2(
    layers: Sequence[LayerShape], plan: _Plan, times: _Times, allowed: float, start: Mapping[str, int]
) -> dict[str, int]:
    """Raise `k_chunk` step by step: in each step as many layers as the budget allows, the cheapest first.

    A layer that was skipped once no longer grows. As long as all growing layers can take a step, the order does not
    matter, so those steps are bisected.
    """
    k_chunk = dict(start)
    growing = [layer for layer in layers if k_chunk[layer.kind]]

    def grown(steps: int) -> dict[str, int]:
        return k_chunk | {layer.kind: min(k_chunk[layer.kind] + steps, plan.limits[layer.kind]) for layer in growing}

    while True:
        room = max((plan.limits[layer.kind] - k_chunk[layer.kind] for layer in growing), default=0)
        k_chunk = grown(_largest(lambda steps: times.total(layers, plan, grown(steps)) <= allowed, 0, room))
        growing = [layer for layer in growing if k_chunk[layer.kind] < plan.limits[layer.kind]]
        if not growing:
            return k_chunk
        spent, before, cost = times.total(layers, plan, k_chunk), k_chunk, {}
        for layer in growing:
            cost[layer.kind] = layer.count * (
                times.at(layer.kind, plan.n_tb[layer.kind], before[layer.kind] + 1)
                - times.at(layer.kind, plan.n_tb[layer.kind], before[layer.kind])
            )
        left, growing = sorted(growing, key=lambda layer: cost[layer.kind]), []
        for layer in left:
            if spent + cost[layer.kind] <= allowed:
                spent += cost[layer.kind]
                k_chunk = k_chunk | {layer.kind: before[layer.kind] + 1}
                growing.append(layer)


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to `high` that fits, given that `low` fits and that fitting is monotonic."""
    stride = 1
    while low < high and fits(reached := min(low + stride, high)):
        low, stride = reached, stride * 2
    high = min(high, low + stride)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
