"""The last step of the search: the `k_chunk` of each layer type that recover the most loss in the available time.

Times jump at the first channel (selecting one costs as much as selecting many) and losses fall steeply at first, so a
greedy search fails and all combinations matter. The losses of layer types add up, and so do their times: a
multiple-choice knapsack, solved exactly up to the rounding of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuner.losses import Losses, type_loss
from tuner.shapes import LayerShape

TIMED = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
"""Values of `k_chunk` that are timed: a product's time rises about evenly between them."""
_BETWEEN = 4
"""Number of steps between two timed values."""
_UNITS = 2000
"""Resolution of the knapsack: the available time in units, to which a choice's time is rounded up."""

Seconds = Callable[[LayerShape, int], float]
"""Time in seconds of one product of a layer type with a given `k_chunk`."""


@dataclass(frozen=True, slots=True)
class _Choice:
    k_chunk: int
    units: int
    """Its time in units."""
    won: float


def best_choice(
    layers: Sequence[LayerShape], limits: Mapping[str, int], seconds: Seconds, losses: Losses, spare: float
) -> dict[str, int]:
    """Choose `k_chunk` of each layer type.

    Args:
        layers: Layer types.
        limits: Largest `k_chunk` by layer type.
        seconds: Times products. Called for ascending `k_chunk` until a layer type alone takes too long, and again for
            each of these values once all are timed.
        losses: The layer types' losses.
        spare: Seconds per token that compensation may take.

    Returns:
        `k_chunk` by layer type. Of combinations that recover the same loss, the fastest one.
    """
    timed = {layer.kind: _timed(layer, limits[layer.kind], seconds, spare) for layer in layers}
    nothing: tuple[float, tuple[int, ...]] = (-math.inf, ())
    best = [nothing] * (_UNITS + 1)
    best[0] = (0.0, ())
    for layer in layers:
        following = [nothing] * (_UNITS + 1)
        for choice in _choices(layer, timed[layer.kind], seconds, losses, spare):
            for spent in range(_UNITS + 1 - choice.units):
                won, chosen = best[spent]
                if won + choice.won > following[spent + choice.units][0]:
                    following[spent + choice.units] = (won + choice.won, (*chosen, choice.k_chunk))
        best = following
    _, chosen = max(best, key=lambda found: found[0])
    return {layer.kind: k_chunk for layer, k_chunk in zip(layers, chosen, strict=True)}


def _timed(layer: LayerShape, limit: int, seconds: Seconds, spare: float) -> list[int]:
    """The values of `k_chunk` to time, up to the first one that takes too long."""
    found = []
    for k_chunk in sorted({min(value, limit) for value in TIMED} - {0}):
        found.append(k_chunk)
        if layer.count * (seconds(layer, k_chunk) - seconds(layer, 0)) > spare:
            break
    return found


def _choices(layer: LayerShape, timed: Sequence[int], seconds: Seconds, losses: Losses, spare: float) -> list[_Choice]:
    """The choices of a layer type: 0, and the timed and intermediate values that fit."""
    plain, without = seconds(layer, 0), type_loss(losses, layer, 0)
    choices = [_Choice(0, 0, 0.0)]
    for low, high in zip(timed, timed[1:] or timed, strict=False):
        first, last = seconds(layer, low), seconds(layer, high)
        for k_chunk in sorted({low + (high - low) * part // _BETWEEN for part in range(_BETWEEN + 1)}):
            share = (k_chunk - low) / (high - low) if high > low else 0.0
            extra = layer.count * (first + share * (last - first) - plain)
            if extra <= spare:
                units = math.ceil(max(0.0, extra) / spare * _UNITS) if spare > 0 else 0
                choices.append(_Choice(k_chunk, min(units, _UNITS), without - type_loss(losses, layer, k_chunk)))
    return choices
