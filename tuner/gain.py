"""The last step of the search: the `k_chunk` of each layer type that win back most loss in the time there is.

Times rise in a step at the first channel (choosing costs as much for one as for many) and losses fall steeply at first,
so single steps up can't find the best: all combinations count. Losses of layer types add up, and so do times: a
knapsack with several choices a type, solved exactly up to the rounding of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuner.losses import Losses
from tuner.shapes import LayerShape

TIMED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Values of `k_chunk` that are timed."""
_BETWEEN = 4
"""Each distance between two timed values is divided into so many."""
_UNITS = 2000
"""Parts of the time to be spent; a choice's time is rounded up to whole ones."""

Seconds = Callable[[LayerShape, int], float]
"""Time of one product of a layer type with `k_chunk` channels compensated."""


@dataclass(frozen=True, slots=True)
class _Choice:
    k_chunk: int
    units: int
    """Of the time to be spent that it takes."""
    won: float


def most_won(
    layers: Sequence[LayerShape], limits: Mapping[str, int], seconds: Seconds, losses: Losses, spare: float
) -> dict[str, int]:
    """Choose `k_chunk` of each layer type.

    Args:
        layers: Layer types.
        limits: Largest `k_chunk` by layer type.
        seconds: Times products. Called for ascending `k_chunk` until a layer type alone takes too long, and once more
            for each of these when all are timed.
        losses: What compensation wins back.
        spare: Seconds of a token that compensation may take.

    Returns:
        `k_chunk` by layer type; of combinations that win back the same the one that takes less time.
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
    """The values of `k_chunk` that are worth timing, up to the first that takes too long."""
    found = []
    for k_chunk in sorted({min(value, limit) for value in TIMED} - {0}):
        found.append(k_chunk)
        if layer.count * (seconds(layer, k_chunk) - seconds(layer, 0)) > spare:
            break
    return found


def _choices(layer: LayerShape, timed: Sequence[int], seconds: Seconds, losses: Losses, spare: float) -> list[_Choice]:
    """What there is to choose from for a layer type: 0, and what fits of the timed values and of values between."""
    plain, without = seconds(layer, 0), losses.at(layer, 0)
    choices = [_Choice(0, 0, 0.0)]
    for low, high in zip(timed, timed[1:] or timed, strict=False):
        first, last = seconds(layer, low), seconds(layer, high)
        for k_chunk in sorted({low + (high - low) * part // _BETWEEN for part in range(_BETWEEN + 1)}):
            share = (k_chunk - low) / (high - low) if high > low else 0.0
            extra = layer.count * (first + share * (last - first) - plain)
            if extra <= spare:
                units = math.ceil(max(0.0, extra) / spare * _UNITS) if spare > 0 else 0
                choices.append(_Choice(k_chunk, min(units, _UNITS), without - losses.at(layer, k_chunk)))
    return choices
