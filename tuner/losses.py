"""What each layer type loses at low bits, by how many channels are compensated: what a search weighs time against.

Losses of single types add up to that of the whole model within some percent (`docs/decisions.md`), so the search adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuner.candidates import CHUNK
from tuner.errors import ShapeError
from tuner.shapes import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses of layer types at a few values of `k_chunk`."""

    k_chunk: tuple[int, ...]
    """Where they were measured, ascending; the first is 0."""
    nats: Mapping[str, tuple[float, ...]]
    """By layer type, for each of these: loss of the model in which the layers of that type alone are low-bit."""

    def check(self, layers: Iterable[LayerShape]) -> None:
        """Refuse layer types without losses.

        Raises:
            ShapeError: a layer type has none.
        """
        missing = [layer.kind for layer in layers if layer.kind not in self.nats]
        if missing:
            raise ShapeError(f"there are no losses of {', '.join(missing)}; they belong to another model")

    def at(self, layer: LayerShape, k_chunk: int) -> float:
        """Loss of a layer type, in nats a token.

        Between two measured points it falls evenly with the logarithm of the channels that are really compensated
        (a narrow layer's are few), up to the first point evenly with their number. It never rises with `k_chunk`: where
        a measurement says so it counts as flat. Behind the last point it falls to 0, where all channels are
        compensated.
        """
        points = {0: self.nats[layer.kind][0]}
        for measured, nats in zip(self.k_chunk, self.nats[layer.kind], strict=True):
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

    def total(self, layers: Iterable[LayerShape], k_chunk: Mapping[str, int]) -> float:
        """Predicted loss of the whole model, in nats a token."""
        return sum(self.at(layer, k_chunk[layer.kind]) for layer in layers)

    def won(self, layers: Iterable[LayerShape], k_chunk: Mapping[str, int]) -> float:
        """Predicted loss that compensation wins back, in nats a token."""
        return sum(self.at(layer, 0) - self.at(layer, k_chunk[layer.kind]) for layer in layers)


def compensated(width: int, k_chunk: int) -> int:
    """Channels of a layer of `width` input channels that are compensated: every chunk's share, rounded up."""
    return sum(-(-k_chunk * min(CHUNK, width - start) // CHUNK) for start in range(0, width, CHUNK))
