"""The ladder of a model on a device: a few settings of compensation, each measured in whole decoding steps.

The times of single layers do not add up to those of a token, so a budget is kept by what whole steps took. Their times
scatter, too: a setting is within a budget if its median slowdown and twice the median's uncertainty are. The settings
aim at slowdowns a factor of two apart, and serve every budget.

Where the losses of the layer types are known, a setting is the combination that recovers most, the last block's MLP by
itself (docs/decisions/tuner.md): massive activations leave the residual stream there, so that its errors
weigh many times those of other blocks, while it costs no more than they do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

from tuner.candidates import CHUNK, k_chunk_limit
from tuner.errors import ShapeError
from tuner.search import Search
from tuner.shapes import LayerShape

TARGETS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Slowdowns in percent that the settings aim at."""
READINGS, MOST_READINGS = 3, 9
"""Readings of a setting's slowdown from which on it counts, and the most that refining takes."""
LEVELS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""`k_chunk` at which layer types are timed; between two of them, times rise about evenly."""
_LAST_SHARE = 0.4
"""Share of an MLP type's loss that lies in the last block: 0.33 to 0.44 on SmolLM2."""
_WORTH_KEEPING = 1e-3
"""Share by which a combination recovers more than a cheaper one at least; bounds their number."""
_LEAST_SCATTER = 0.25
"""Percent by which readings scatter at least; fewer are chance, where there are few readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of compensation, and what was measured of it."""

    target: float
    """Slowdown in percent that it was made for."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type, and by type of the last block."""
    n_tb: Mapping[str, int]
    """Thread blocks by layer type; 0 on a device without them."""
    predicted_slowdown_percent: float = 0.0
    """By the times of single layers."""
    predicted_won: float | None = None
    """Nats per token that it recovers by the losses of the layer types; None if these are unknown."""
    slowdowns: tuple[float, ...] = ()
    """Readings of decoding's slowdown in percent; noise can make one negative."""
    loss: float | None = None
    """Nats per token that it loses on the text; None if it was not read."""

    def __post_init__(self) -> None:
        if not self.k_chunk or max(self.k_chunk.values()) > CHUNK:
            raise ValueError(f"not a setting: {self.k_chunk}")

    @property
    def slowdown_percent(self) -> float:
        """The median slowdown; infinite without a reading."""
        return median(self.slowdowns) if self.slowdowns else math.inf


def scatter(settings: Iterable[Setting]) -> float:
    """Standard deviation of a reading in percent, from those of all settings; outliers hardly count."""
    away = []
    for setting in settings:
        off = sorted(abs(reading - setting.slowdown_percent) for reading in setting.slowdowns)
        away += off[1:]  # without the median's own
    return max(_LEAST_SCATTER, 1.5 * median(away)) if away else _LEAST_SCATTER


def bound(setting: Setting, scattering: float) -> float:
    """The slowdown in percent that a setting is held to: its median, and twice the uncertainty of that.

    Args:
        setting: The setting; one with too few readings is unbounded.
        scattering: Of single readings, as `scatter` gives.
    """
    count = len(setting.slowdowns)
    return setting.slowdown_percent + 2 * scattering / math.sqrt(count) if count >= READINGS else math.inf


def best(settings: Sequence[Setting], budget_percent: float, without: float | None = None) -> Setting | None:
    """The setting within a budget that recovers most; None if no compensation is the best.

    Losses on the text decide if all that fit were read, else the losses of layer types, else the slowdown aimed at.

    Args:
        settings: The measured settings.
        budget_percent: The budget.
        without: Loss on the text without compensation; None if it was not read.
    """
    scattering = scatter(settings)
    fitting = [setting for setting in settings if bound(setting, scattering) <= budget_percent]
    losses = {setting.loss: setting for setting in sorted(fitting, key=lambda own: -own.slowdown_percent)}
    if without is not None and None not in losses:
        least = min((loss for loss in losses if loss is not None), default=without)
        return losses[least] if least < without else None
    return max(fitting, key=lambda own: (own.predicted_won or 0.0, own.target), default=None)


class Losses(Protocol):
    """Measured losses of a model's layer types at a few values of `k_chunk`."""

    @property
    def k_chunk(self) -> tuple[int, ...]:
        """The measured values, ascending; the first is 0."""

    @property
    def nats(self) -> Mapping[str, tuple[float, ...]]:
        """Loss of the model in which only this layer type is low-bit, for each `k_chunk`, by layer type."""


class _Combination(NamedTuple):
    """Levels of the first layer types, as places in their tables."""

    seconds: float
    won: float
    levels: tuple[int, ...]


class Maker:
    """Makes settings that aim at a slowdown.

    Args:
        layers: Layer types; those of the last block's MLP may stand apart, behind the others.
        search: The paper's search over the types of all blocks.
        losses: Losses of the types; None if unknown, and then the search alone decides.
        sm_count: Multiprocessors of the device; None if it has no thread blocks.
        limit: Shared memory of a block in bytes; None does not bound `k_chunk` below 1024.

    Raises:
        ShapeError: a layer type has no losses.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        search: Search,
        losses: Losses | None,
        *,
        sm_count: int | None = None,
        limit: int | None = None,
    ) -> None:
        missing = [] if losses is None else [layer.kind for layer in layers if layer.type not in losses.nats]
        if missing:
            raise ShapeError(f"losses of {', '.join(missing)} are missing; the losses belong to another model")
        self._layers, self._search, self._losses = layers, search, losses
        self._sm_count, self._limit = sm_count, limit
        self._apart = {layer.type for layer in layers if layer.kind != layer.type}

    @property
    def lost(self) -> float | None:
        """Nats per token that the model loses without compensation; None if unknown."""
        return None if self._losses is None else sum(self._loss(layer, 0) for layer in self._layers)

    def setting(self, target: float, slowdown_percent: float) -> Setting:
        """The setting that recovers most in a slowdown of all linear layers together.

        Args:
            target: Slowdown of whole steps in percent that it is made for.
            slowdown_percent: Slowdown of the layers by their times, above 0 and at most 100.

        Raises:
            TimerError: a product could not be timed.
            Cancelled: the search was stopped.
        """
        n_tb = {layer.type: 0 for layer in self._layers}
        found, slower, base = dict[str, int](), 0.0, self._search.base
        if self._losses is None or self._sm_count is not None:
            searched = self._search.within(slowdown_percent)
            n_tb, slower = dict(searched.n_tb), searched.predicted_slowdown_percent
            found = {layer.kind: searched.k_chunk[layer.type] for layer in self._layers}
        if self._losses is not None:
            by_loss, spent = self._by_loss(n_tb, slowdown_percent / 100 * base)
            if not found or self._won(by_loss) > self._won(found):
                found, slower = by_loss, 100 * spent / base
        return Setting(
            target=target,
            k_chunk=found,
            n_tb=n_tb,
            predicted_slowdown_percent=slower,
            predicted_won=None if self._losses is None else self._won(found),
        )

    def _by_loss(self, n_tb: Mapping[str, int], allowed: float) -> tuple[dict[str, int], float]:
        """The levels that recover most in the allowed seconds a token, and between two of them what is left.

        One layer type after the other joins the combinations; of these only those stay that no cheaper one beats.

        Returns:
            `k_chunk`, and its seconds a token.
        """
        kept, tables = [_Combination(0.0, 0.0, ())], [self._table(layer, n_tb, allowed) for layer in self._layers]
        for table in tables:
            joined = [
                _Combination(one.seconds + seconds, one.won + won, (*one.levels, index))
                for one in kept
                for index, (_, seconds, won) in enumerate(table)
                if one.seconds + seconds <= allowed
            ]
            kept = []
            for one in sorted(joined, key=lambda one: (one.seconds, -one.won)):
                if not kept or one.won > kept[-1].won * (1 + _WORTH_KEEPING):
                    kept.append(one)
        spent, _, chosen = kept[-1]
        k_chunk = {
            layer.kind: table[index][0] for layer, table, index in zip(self._layers, tables, chosen, strict=True)
        }
        steps = [
            ((won - low_won) / (seconds - low_seconds), seconds - low_seconds, low, high, layer.kind)
            for layer, table, index in zip(self._layers, tables, chosen, strict=True)
            for (low, low_seconds, low_won), (high, seconds, won) in [*pairwise(table)][index : index + 1]
            if low and seconds > low_seconds and won > low_won  # the first channel costs as much as many
        ]
        for _, seconds, low, high, kind in sorted(steps, reverse=True):
            k_chunk[kind] = low + int((high - low) * min(1.0, (allowed - spent) / seconds))
            spent += seconds * (k_chunk[kind] - low) / (high - low)  # from level to level, time rises evenly
        return k_chunk, spent

    def _table(self, layer: LayerShape, n_tb: Mapping[str, int], allowed: float) -> list[tuple[int, float, float]]:
        """Levels of a layer type with their seconds a token and the nats that they recover; 0 comes first.

        The first level that takes more than all the allowed seconds is the last one that is timed.
        """
        most = CHUNK if self._limit is None else k_chunk_limit(layer.n, layer.k, max(1, n_tb[layer.type]), self._limit)
        base, table = self._search.seconds(layer.type, 0, 0), [(0, 0.0, 0.0)]
        for level in LEVELS:
            if level > most or table[-1][1] > allowed:
                break
            seconds = layer.count * (self._search.seconds(layer.type, n_tb[layer.type], level) - base)
            table.append((level, max(0.0, seconds), self._loss(layer, 0) - self._loss(layer, level)))
        return table

    def _won(self, k_chunk: Mapping[str, int]) -> float:
        return sum(self._loss(layer, 0) - self._loss(layer, k_chunk[layer.kind]) for layer in self._layers)

    def _loss(self, layer: LayerShape, k_chunk: int) -> float:
        """Nats per token that the layers of a type lose."""
        assert self._losses is not None
        share = 1.0
        if layer.type in self._apart:
            share = _LAST_SHARE if layer.kind != layer.type else 1 - _LAST_SHARE
        return share * type_loss(self._losses, layer, k_chunk)


def type_loss(losses: Losses, layer: LayerShape, k_chunk: int) -> float:
    """Loss of a layer type in all blocks, in nats per token.

    Up to the first measured point, the loss falls linearly with the number of compensated channels (a narrow layer has
    few). Between two points it falls linearly with the logarithm of that number. It never rises with `k_chunk`: rising
    measurements count as flat. After the last point it falls to 0, which it reaches when all channels are compensated.
    """
    points = {0: losses.nats[layer.type][0]}
    for measured, nats in zip(losses.k_chunk, losses.nats[layer.type], strict=True):
        channels = compensated(layer.k, measured)
        points[channels] = min(nats, *points.values())
    points.setdefault(layer.k, 0.0)
    wanted = compensated(layer.k, k_chunk)
    if wanted in points:
        return points[wanted]
    below = max(channels for channels in points if channels < wanted)
    above = min(channels for channels in points if channels > wanted)
    share = wanted / above if below == 0 else math.log(wanted / below) / math.log(above / below)
    return points[below] + share * (points[above] - points[below])


def compensated(width: int, k_chunk: int) -> int:
    """Number of compensated channels of a layer with `width` input channels: each chunk's share, rounded up."""
    return sum(-(-k_chunk * min(CHUNK, width - start) // CHUNK) for start in range(0, width, CHUNK))
