"""Knee curves: time of a product with compensation over the time without, against `k_chunk`.

Source: QDEC Fig. 17.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.candidates import CHUNK, k_chunk_limit, n_tb_candidates
from tuner.search import Configuration
from tuner.shapes import LayerShape
from tuner.timer import Timer

_MIN_REACH = 16
"""Minimum right end of a curve; it also reaches twice the configuration's `k_chunk`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of the plot."""

    kind: str
    """Layer type."""
    n_tb: int
    """Thread blocks; 0 if the device has none."""
    points: tuple[tuple[int, float], ...]
    """(`k_chunk`, time relative to no compensation), `k_chunk` ascending, starting with (0, 1)."""


def knee_curves(
    layers: Sequence[LayerShape],
    timer: Timer,
    configuration: Configuration,
    *,
    limit: int | None = None,
    others: bool = False,
) -> tuple[Curve, ...]:
    """Curves of a simulated device around a configuration, of eight points each.

    Args:
        layers: Layer types.
        timer: Times their products.
        configuration: Determines each type's `n_tb` and the curve's right end.
        limit: Shared memory of a block in bytes; None does not bound `k_chunk` below 1024.
        others: Whether to time other block counts up to the configuration's bound as well (powers of two).

    Raises:
        TimerError: a product could not be timed.
    """
    curves = []
    for layer in layers:
        for n_tb in _block_counts(layer, configuration, others):
            largest = CHUNK if limit is None else k_chunk_limit(layer.n, layer.k, max(1, n_tb), limit)
            reach = min(largest, max(_MIN_REACH, 2 * configuration.k_chunk[layer.kind]))
            base = timer.seconds(layer.kind, 0, 0)
            wanted = sorted({max(1, reach * eighth // 8) for eighth in range(1, 9)})
            points = [(k, timer.seconds(layer.kind, n_tb, k) / base) for k in wanted]
            curves.append(Curve(kind=layer.kind, n_tb=n_tb, points=((0, 1.0), *points)))
    return tuple(curves)


def _block_counts(layer: LayerShape, configuration: Configuration, others: bool) -> list[int]:
    chosen = configuration.n_tb[layer.kind]
    if not others or configuration.n_tb_max is None:
        return [chosen]
    bound = configuration.n_tb_max
    powers = {count for count in n_tb_candidates(layer.n, layer.k) if count.bit_count() == 1 and count <= bound}
    return sorted({chosen} | powers)
