"""Predicted loss of a low-bit model, from the losses of its layer types and the channels that are compensated.

Losses of single types add up to that of the whole model within some percent (`docs/decisions.md`), so the search adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tuner.candidates import CHUNK
from tuner.errors import ShapeError
from tuner.shapes import LayerShape

PRICED_AT = (2, 8, 32, 128)
"""`k_chunk` at which layer types are priced on a text."""


class Losses(Protocol):
    """Measured losses of a model's layer types at a few values of `k_chunk`."""

    @property
    def k_chunk(self) -> tuple[int, ...]:
        """The measured values, ascending; the first is 0."""

    @property
    def nats(self) -> Mapping[str, tuple[float, ...]]:
        """Loss of the model in which only this layer type is low-bit, for each `k_chunk`, by layer type."""


def check_losses(losses: Losses, layers: Iterable[LayerShape]) -> None:
    """Refuse layer types without losses.

    Raises:
        ShapeError: a layer type has none.
    """
    missing = [layer.kind for layer in layers if layer.kind not in losses.nats]
    if missing:
        raise ShapeError(f"losses of {', '.join(missing)} are missing; the losses belong to another model")


def type_loss(losses: Losses, layer: LayerShape, k_chunk: int) -> float:
    """Loss of a layer type, in nats per token.

    Up to the first measured point, the loss falls linearly with the number of compensated channels (a narrow layer has
    few). Between two points it falls linearly with the logarithm of that number. It never rises with `k_chunk`: rising
    measurements count as flat. After the last point it falls to 0, which it reaches when all channels are compensated.
    """
    points = {0: losses.nats[layer.kind][0]}
    for measured, nats in zip(losses.k_chunk, losses.nats[layer.kind], strict=True):
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


def total_loss(losses: Losses, layers: Iterable[LayerShape], k_chunk: Mapping[str, int]) -> float:
    """Predicted loss of the whole model, in nats per token."""
    return sum(type_loss(losses, layer, k_chunk[layer.kind]) for layer in layers)


def recovered_loss(losses: Losses, layers: Iterable[LayerShape], k_chunk: Mapping[str, int]) -> float:
    """Predicted loss that compensation recovers, in nats per token."""
    return sum(type_loss(losses, layer, 0) - type_loss(losses, layer, k_chunk[layer.kind]) for layer in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Losses of layer types on a text, with the other types low-bit as well."""

    k_chunk: tuple[int, ...]
    """As `Losses.k_chunk`."""
    nats: Mapping[str, tuple[float, ...]]
    """As `Losses.nats`: what the type can recover at most, less what it recovers."""


def priced(layers: Sequence[LayerShape], text: Callable[[Mapping[str, int]], float]) -> Priced:
    """Measure the losses of layer types on a text: each is compensated alone, beside low-bit ones.

    Args:
        layers: All layer types.
        text: Divergence of a text from that with all residuals, in nats per token, by `k_chunk` of each layer type.
            Of what no measured `k_chunk` recovers, each type has a share as it has of what the largest one does.
    """
    none = {layer.kind: 0 for layer in layers}
    without = text(none)
    won = {layer.kind: [without - text({**none, layer.kind: at}) for at in PRICED_AT] for layer in layers}
    most = {kind: max(0.0, *found) for kind, found in won.items()}
    whole = sum(most.values())
    scale = max(1.0, without / whole) if whole > 0 else 1.0
    return Priced(
        k_chunk=(0, *PRICED_AT),
        nats={
            kind: (scale * most[kind], *(max(0.0, scale * most[kind] - gain) for gain in found))
            for kind, found in won.items()
        },
    )


def compensated(width: int, k_chunk: int) -> int:
    """Number of compensated channels of a layer with `width` input channels: each chunk's share, rounded up."""
    return sum(-(-k_chunk * min(CHUNK, width - start) // CHUNK) for start in range(0, width, CHUNK))
