"""Refining a budget's choice by whole decoding steps and by a text, after a search that timed layers alone.

The times of single layers do not add up to a token's, and losses measured beside full-precision layers are not those of
a low-bit model. So each layer type is compensated alone: what it recovers is read off a text, and what it costs off
whole steps. Both add up well enough to rank combinations; those that are taken are measured themselves.

The MLP of the last block is chosen by itself: massive activations leave the residual stream there, so that its errors
weigh many times those of other blocks (docs/decisions.md), while it costs no more than they do.

The text repeats exactly. Times do not, so each type's cost is a line through all its readings, and a configuration's
slowdown is a median of up to nine readings. Everything measured is kept: an interrupted refinement continues.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.errors import TimerError
from tuner.findings import FEWEST, Finding, Findings, channels_of
from tuner.losses import Losses, priced, type_loss
from tuner.progress import Cancel, Progress, Report, check, never, silent
from tuner.shapes import LayerShape

Slowdown = Callable[[Mapping[str, int], Mapping[str, int]], float]
"""One reading of decoding's slowdown in percent with a `k_chunk` and `n_tb` by layer type."""
Loss = Callable[[Mapping[str, int]], float]
"""What a text loses in nats per token with a `k_chunk` by layer type."""

Costs = Mapping[str, Callable[[int], float]]
"""Predicted slowdown in percent by `k_chunk`, by layer type."""
TIMED = (2, 8, 32, 128)
"""`k_chunk` at which whole steps are timed with one layer type compensated."""
ROUNDS = 3
"""Readings of each of them, in turns, so that a slow minute of the machine affects all alike."""
GRID = (0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024)
"""Values of `k_chunk` that are chosen from."""
READINGS = 9
"""Most readings of a configuration."""
_AGREED = 5
"""So many are enough if all lie on one side of the limit; `FEWEST`, if they are clearly off it."""
_CLEAR, _CLEAR_SHARE = 1.0, 0.2
"""A slowdown is clear that is off the limit by more than so many percent and this share of the limit."""
_FAR = 2.0
"""A type that costs so many times the limit at a `k_chunk` is not timed at larger ones."""
_TRIES = 7
"""Most configurations along the line of best predictions that are timed."""
_CLOSE = 1.03
"""Two allowances with no more than this ratio between them are not told apart."""
_RIVALS = 8
"""Configurations of other sets of layer types that are read, and timed if the text prefers them."""
_RAISES = 3
"""Times that what the best configuration leaves of the budget is spent."""
_STEPS = 60
"""About how many measurements a refinement takes beyond those of single types, for progress bars."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A predicted configuration."""

    cost: float
    """Slowdown in percent."""
    loss: float
    """Nats per token."""
    k_chunk: tuple[int, ...]
    """In the order of the layer types."""


class Refinement:
    """Refines choices of a loaded model; `findings` are complete to the last measurement at any time.

    Args:
        layers: Layer types that a token passes, those of single blocks behind the others.
        findings: What is known already.
        loss: Reads the text.
        slowdown: Times decoding once.
        n_tb: Thread blocks by layer type.
        limits: Largest `k_chunk` by layer type.
        progress: Called before every measurement.
        cancelled: Called before every measurement.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        findings: Findings,
        loss: Loss,
        slowdown: Slowdown,
        *,
        n_tb: Mapping[str, int],
        limits: Mapping[str, int],
        progress: Progress = silent,
        cancelled: Cancel = never,
    ) -> None:
        self._layers, self._loss, self._slowdown = layers, loss, slowdown
        self._types = {layer.kind: layer for layer in layers if layer.kind == layer.type}
        self._n_tb, self._limits = dict(n_tb), limits
        self._progress, self._cancelled = progress, cancelled
        self._start = findings
        self._known = {(channels_of(own.k_chunk), channels_of(own.n_tb)): own for own in findings.measured}
        self._done = 0

    @property
    def findings(self) -> Findings:
        """Everything measured so far."""
        return replace(self._start, measured=tuple(self._known.values()))

    def within(self, limit_percent: float, budget_percent: float, start: Mapping[str, int]) -> None:
        """Measure what a budget needs. Its choice is then `findings.best(limit_percent)`.

        Args:
            limit_percent: Largest measured slowdown.
            budget_percent: The budget that counts as refined afterwards.
            start: The choice so far by layer type, which is measured too.

        Raises:
            TimerError: decoding could not be timed.
            Cancelled: `cancelled` said so.
        """
        losses, costs = priced(self._layers, self._read), self._costs(limit_percent)
        fits = self._walk(self._front(costs, losses), limit_percent)
        so_far = {layer.kind: start.get(layer.kind, start[layer.type]) for layer in self._layers}
        for k_chunk in (so_far, self._mapping(fits)):
            self._judge(k_chunk, limit_percent)
        rivals = self._rivals(costs, losses, max(fits.cost, limit_percent / 2))
        for k_chunk in sorted(rivals, key=self._read):
            best = self.findings.best(limit_percent)
            if best is None or best.loss is None or self._read(k_chunk) < best.loss:
                self._judge(k_chunk, limit_percent)
        for _ in range(_RAISES):
            if not self._raised(costs, limit_percent):
                break
        while (best := self.findings.best(limit_percent)) is not None and not self._is_settled(best, limit_percent):
            self._settled(best.k_chunk, limit_percent)
        self._start = replace(self._start, refined=tuple(sorted({*self._start.refined, budget_percent})))

    def _front(
        self, costs: Costs, losses: Losses, compensated: Collection[str] | None = None, most: float = math.inf
    ) -> list[_Point]:
        """The combinations that no other one beats in both predicted cost and loss, by rising cost.

        Args:
            costs: Costs of the layer types.
            losses: Their losses.
            compensated: The types that all combinations compensate, and no others but in single blocks; None: any.
            most: Largest cost.
        """
        front = [_Point(0.0, 0.0, ())]
        for layer in self._layers:
            grid = [k for k in GRID if k <= self._limits[layer.kind]]
            if compensated is not None and layer.kind in self._types:
                grid = grid[1:] if layer.kind in compensated else [0]
            own = [(costs[layer.kind](k), type_loss(losses, layer, k), k) for k in grid]
            front = _pareto(
                _Point(point.cost + cost, point.loss + loss, (*point.k_chunk, k))
                for point in front
                for cost, loss, k in own
                if point.cost + cost <= most
            )
        return front

    def _costs(self, limit: float) -> Costs:
        """What whole steps cost by each type's `k_chunk`, in percent; a single block costs its share of its type."""
        for wanted in range(1, ROUNDS + 1):
            for kind in self._types:
                for k in TIMED:
                    if k > self._limits[kind]:
                        break
                    found = self._timed(self._alone(kind, k), wanted)
                    if sorted(found)[len(found) // 2] > _FAR * limit:
                        break
        lines = {}
        for kind in self._types:
            readings = [(k, self._finding(self._alone(kind, k)).slowdowns) for k in TIMED]
            lines[kind] = line([(k, percent) for k, found in readings for percent in found])

        def cost(layer: LayerShape) -> Callable[[int], float]:
            share, whole = layer.count / self._types[layer.type].count, lines[layer.type]
            return lambda k: share * whole(k)

        return {layer.kind: cost(layer) for layer in self._layers}

    def _walk(self, points: Sequence[_Point], limit: float) -> _Point:
        """The last point whose measured slowdown is within the limit, up where there is room and down where not."""
        fits, over, allowance = 0.0, math.inf, limit
        best = points[0]
        for _ in range(_TRIES):
            point = max((own for own in points if own.cost <= allowance), key=lambda own: own.cost)
            measured = self._settled(self._mapping(point), limit) if any(point.k_chunk) else 0.0
            if measured <= limit:
                fits, best = allowance, max(best, point, key=lambda own: own.cost)
            else:
                over = allowance
            if over <= _CLOSE * fits or (math.isinf(over) and point == points[-1]):
                break
            if math.isinf(over):
                allowance *= min(2.0, max(_CLOSE, limit / max(measured, 0.1)))
            elif fits == 0:
                allowance *= max(0.5, min(1 / _CLOSE, limit / measured))
            else:
                allowance = math.sqrt(fits * over)
        return best

    def _rivals(self, costs: Costs, losses: Losses, most: float) -> list[dict[str, int]]:
        """The best predictions up to a cost, each of another set of layer types."""
        found = []
        for count in range(len(self._types) + 1):
            for compensated in itertools.combinations(self._types, count):
                check(self._cancelled)
                found += self._front(costs, losses, compensated, most)[-1:]
        return [self._mapping(point) for point in sorted(found, key=lambda own: own.loss)[:_RIVALS]]

    def _raised(self, costs: Costs, limit: float) -> bool:
        """Spend what the best configuration leaves on one of its layer types. Returns whether that is better."""
        best = self.findings.best(limit)
        if best is None or best.loss is None:
            return False
        spare, more = limit - best.slowdown_percent, []
        for kind, k in best.k_chunk.items():
            fitting = [at for at in GRID if k < at <= self._limits[kind] and costs[kind](at) - costs[kind](k) <= spare]
            if k and fitting:
                more.append({**best.k_chunk, kind: fitting[-1]})
        for k_chunk in sorted(more, key=self._read):
            if self._read(k_chunk) < best.loss:
                self._judge(k_chunk, limit)
            if self.findings.best(limit) != best:
                return True
        return False

    def _judge(self, k_chunk: Mapping[str, int], limit: float) -> None:
        """Time a configuration, and read the text with it if it fits."""
        if not any(k_chunk.values()) or self._settled(k_chunk, limit) <= limit:
            self._read(k_chunk)

    def _settled(self, k_chunk: Mapping[str, int], limit: float) -> float:
        """The median slowdown, of as many readings as it takes to know on which side of the limit it lies."""
        while not _enough(found := self._finding(k_chunk).slowdowns, limit):
            self._timed(k_chunk, len(found) + 1)
        return self._finding(k_chunk).slowdown_percent

    def _is_settled(self, found: Finding, limit: float) -> bool:
        return not any(found.k_chunk.values()) or found.n_tb != self._n_tb or _enough(found.slowdowns, limit)

    def _timed(self, k_chunk: Mapping[str, int], wanted: int) -> tuple[float, ...]:
        """At least so many readings of a slowdown."""
        while len(found := self._finding(k_chunk).slowdowns) < wanted:
            self._tell(k_chunk, "decoding")
            percent = self._slowdown(k_chunk, self._n_tb)
            if not math.isfinite(percent):
                raise TimerError(f"the measured slowdown of decoding is {percent} percent; tune again")
            self._keep(replace(self._finding(k_chunk), slowdowns=(*found, percent)))
        return found

    def _read(self, k_chunk: Mapping[str, int]) -> float:
        """What the text loses."""
        known = self._finding(k_chunk)
        if known.loss is None:
            self._tell(k_chunk, "reading a text")
            known = replace(known, loss=self._loss(k_chunk))
            self._keep(known)
        assert known.loss is not None
        return known.loss

    def _finding(self, k_chunk: Mapping[str, int]) -> Finding:
        key = (channels_of(k_chunk), channels_of(self._n_tb))
        return self._known.get(key) or Finding(k_chunk=dict(k_chunk), n_tb=self._n_tb)

    def _keep(self, found: Finding) -> None:
        self._known[channels_of(found.k_chunk), channels_of(found.n_tb)] = found

    def _alone(self, kind: str, k_chunk: int) -> dict[str, int]:
        return {layer.kind: k_chunk if layer.kind == kind else 0 for layer in self._layers}

    def _mapping(self, point: _Point) -> dict[str, int]:
        return {layer.kind: k for layer, k in zip(self._layers, point.k_chunk, strict=True)}

    def _tell(self, k_chunk: Mapping[str, int], work: str) -> None:
        check(self._cancelled)
        total = (len(self._types) * ROUNDS + len(self._layers)) * len(TIMED) + _STEPS
        shown = " / ".join(str(k_chunk[layer.kind]) for layer in self._layers)
        self._progress(Report(done=min(self._done, total - 1), total=total, message=f"{work} with k_chunk {shown}"))
        self._done += 1


def line(readings: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """A cost by `k_chunk`: 0 at 0, then the line through all readings that is nearest in relative terms.

    Readings of a small `k_chunk` weigh more, because a line that is off by a percent there is of no use. A cost is
    never negative and never falls.

    Args:
        readings: (k_chunk, percent).
    """
    weights = [1 / (1 + k / 16) for k, _ in readings]
    whole = sum(weights)
    at = sum(weight * k for weight, (k, _) in zip(weights, readings, strict=True)) / whole
    mean = sum(weight * percent for weight, (_, percent) in zip(weights, readings, strict=True)) / whole
    spread = sum(weight * (k - at) ** 2 for weight, (k, _) in zip(weights, readings, strict=True))
    rise = sum(weight * (k - at) * (percent - mean) for weight, (k, percent) in zip(weights, readings, strict=True))
    slope = max(0.0, rise / spread) if spread else mean / at
    return lambda k: max(0.0, mean + slope * (k - at)) if k else 0.0


def _enough(found: Sequence[float], limit: float) -> bool:
    """Whether readings say on which side of a limit their median lies, or are as many as are taken."""
    if len(found) >= READINGS:
        return True
    off = [percent - limit for percent in found]
    if len(found) < FEWEST or len(found) % 2 == 0 or min(off) <= 0 < max(off):
        return False
    clear = _CLEAR + _CLEAR_SHARE * limit
    return len(found) >= _AGREED or (min(map(abs, off)) > clear and min(found) > -_CLEAR)


def _pareto(points: Iterable[_Point]) -> list[_Point]:
    """The points that no other one beats in both cost and loss, by rising cost."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda own: (own.cost, own.loss, own.k_chunk)):
        if not front or point.loss < front[-1].loss:
            front.append(point)
    return front
