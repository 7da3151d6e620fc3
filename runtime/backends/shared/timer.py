"""Timer of a shared model: the mean time of a layer type over the blocks of both parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.backends.decoder import Decoder

if TYPE_CHECKING:
    from tuner.timer import Timer


class SharedTimer:
    """Times the layer types of a shared model. Implements `tuner.timer.Timer`.

    Args:
        parts: The decoder of each part, and its timer.
    """

    measured = True

    def __init__(self, parts: Sequence[tuple[Decoder, Timer]]) -> None:
        self._parts = parts

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """See `tuner.timer.Timer.seconds`. Parts without a layer of that type don't count."""
        counts = [part.spec.products(kind) for part, _ in self._parts]
        times = (
            count * timer.seconds(kind, n_tb, k_chunk)
            for count, (_, timer) in zip(counts, self._parts, strict=True)
            if count
        )
        return sum(times) / sum(counts)
