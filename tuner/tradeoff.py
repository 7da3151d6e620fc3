"""Quality against slowdown around a configuration, from knee curves and the losses of the layer types.

Every point scales all `k_chunk` of a configuration by one factor. Its time is the sum of the types' curves, weighted by
the bytes of their weights (decoding reads each once) and normalized to the slowdown predicted for the configuration
itself. Its loss is the sum of the types' losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tuner.candidates import CHUNK
from tuner.curve import Curve
from tuner.losses import Losses, total_loss
from tuner.search import Configuration
from tuner.shapes import LayerShape

_PARTS = 8
"""Number of points up to the configuration, and again beyond it."""


def tradeoff(
    configuration: Configuration, curves: Sequence[Curve], layers: Sequence[LayerShape], losses: Losses
) -> tuple[tuple[float, float], ...]:
    """Points (slowdown in percent, share of the loss recovered), by rising slowdown; the first is (0, 0).

    Args:
        configuration: The chosen configuration.
        curves: Knee curves around it.
        layers: All layer types.
        losses: Their losses.

    Returns:
        The points; empty without compensation, or if too little was measured.
    """
    own = {curve.kind: curve.points for curve in curves if curve.n_tb == configuration.n_tb.get(curve.kind)}
    none = dict.fromkeys(configuration.k_chunk, 0)
    lost = total_loss(losses, layers, none)
    cost = _cost(layers, own, configuration.k_chunk)
    if lost <= 0 or cost <= 0 or configuration.predicted_slowdown_percent <= 0:
        return ()
    scale = configuration.predicted_slowdown_percent / cost
    points = [(0.0, 0.0)]
    for part in range(1, 2 * _PARTS + 1):
        k_chunk = {kind: min(CHUNK, k * part // _PARTS) for kind, k in configuration.k_chunk.items()}
        slowdown, won = scale * _cost(layers, own, k_chunk), 1 - total_loss(losses, layers, k_chunk) / lost
        while len(points) > 1 and points[-1][0] >= slowdown and points[-1][1] <= won:
            points.pop()  # measured times are noisy; drop points that are dominated
        if slowdown > points[-1][0] and won >= points[-1][1]:
            points.append((slowdown, won))
    return tuple(points)


def _cost(
    layers: Sequence[LayerShape], curves: Mapping[str, Sequence[tuple[int, float]]], k_chunk: Mapping[str, int]
) -> float:
    """Additional time as a share of decoding without compensation, before normalization."""
    whole = sum(layer.count * layer.weights for layer in layers)
    return sum(
        layer.count * layer.weights / whole * (_at(curves[layer.kind], k_chunk[layer.kind]) - 1)
        for layer in layers
        if k_chunk.get(layer.kind) and layer.kind in curves
    )


def _at(points: Sequence[tuple[int, float]], k_chunk: int) -> float:
    """A curve's value, linear between its points and extrapolated after the last one."""
    for (low, first), (high, last) in pairwise(points):
        if k_chunk <= high or (high, last) == points[-1]:
            return first + (last - first) * (k_chunk - low) / (high - low)
    return points[-1][1]
