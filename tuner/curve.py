"""Knee curves: time of a product with compensation over the time without, against `k_chunk`.

Source: QDEC Fig. 17.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.candidates import CHUNK, k_chunk_limit, n_tb_candidates
from tuner.errors import TimerError
from tuner.progress import Cancel, Progress, Report, check, never, silent
from tuner.search import Configuration
from tuner.shapes import LayerShape
from tuner.timer import Timer

_SAMPLES = 3
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


def knee_curve(kind: str, timer: Timer, n_tb: int, k_chunks: Sequence[int], *, cancelled: Cancel = never) -> Curve:
    """Time one curve.

    Args:
        kind: Layer type.
        timer: Times its product.
        n_tb: Thread blocks.
        k_chunks: The values to time, without 0, which is the reference.
        cancelled: Called before every measurement.

    Raises:
        TimerError: a product could not be timed.
        Cancelled: `cancelled` returned True.
    """
    base = _median(timer, kind, 0, 0, cancelled)
    points = [(k, _median(timer, kind, n_tb, k, cancelled) / base) for k in sorted({*k_chunks} - {0})]
    return Curve(kind=kind, n_tb=n_tb, points=((0, 1.0), *points))


def knee_curves(
    layers: Sequence[LayerShape],
    timer: Timer,
    configuration: Configuration,
    *,
    limit: int | None = None,
    others: bool = False,
    progress: Progress = silent,
    cancelled: Cancel = never,
) -> tuple[Curve, ...]:
    """Time the curves around a configuration.

    Args:
        layers: Layer types.
        timer: Times their products.
        configuration: Determines each type's `n_tb` and the curve's right end.
        limit: Shared memory of a block in bytes; None does not bound `k_chunk` below 1024.
        others: Whether to time other block counts up to the configuration's bound as well (powers of two).
        progress: Called before every curve.
        cancelled: Called before every measurement.

    Raises:
        TimerError: a product could not be timed.
        Cancelled: `cancelled` returned True.
    """
    wanted = [(layer, n_tb) for layer in layers for n_tb in _block_counts(layer, configuration, others)]
    curves = []
    for done, (layer, n_tb) in enumerate(wanted):
        progress(Report(done=done, total=len(wanted), message=f"curve of {layer.kind}"))
        largest = CHUNK if limit is None else k_chunk_limit(layer.n, layer.k, max(1, n_tb), limit)
        reach = min(largest, max(_MIN_REACH, 2 * configuration.k_chunk[layer.kind]))
        curves.append(knee_curve(layer.kind, timer, n_tb, list(_spread(reach)), cancelled=cancelled))
    return tuple(curves)


def as_json(curves: Sequence[Curve]) -> list[Mapping[str, object]]:
    """Curves as plain lists and dictionaries."""
    return [
        {"kind": curve.kind, "n_tb": curve.n_tb, "points": [list(point) for point in curve.points]} for curve in curves
    ]


def _block_counts(layer: LayerShape, configuration: Configuration, others: bool) -> list[int]:
    chosen = configuration.n_tb[layer.kind]
    if not others or configuration.n_tb_max is None:
        return [chosen]
    bound = configuration.n_tb_max
    powers = {count for count in n_tb_candidates(layer.n, layer.k) if count.bit_count() == 1 and count <= bound}
    return sorted({chosen} | powers)


def _spread(reach: int) -> Iterator[int]:
    """Eight values up to `reach`, evenly."""
    for eighth in range(1, 9):
        yield max(1, reach * eighth // 8)


def _median(timer: Timer, kind: str, n_tb: int, k_chunk: int, cancelled: Cancel) -> float:
    readings = []
    for _ in range(_SAMPLES if timer.measured else 1):
        check(cancelled)
        readings.append(timer.seconds(kind, n_tb, k_chunk))
    seconds = sorted(readings)[len(readings) // 2]
    if not 0 < seconds < float("inf"):
        raise TimerError(f"the timer reports {seconds} s for {kind} with k_chunk {k_chunk}; tune again")
    return seconds
