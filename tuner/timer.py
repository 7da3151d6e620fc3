"""What the search times through."""

from __future__ import annotations

from typing import Protocol


class Timer(Protocol):
    """Times the product of one layer type, with error compensation running beside it."""

    @property
    def measured(self) -> bool:
        """Whether the times come from a clock, and so have noise; False for a model of a device."""
        ...

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Time of one product.

        Args:
            kind: Layer type: `qkv`, `o`, `gate_up`, `down`, or `head`.
            n_tb: Thread blocks given to the compensation; 0 on a device where that means nothing, and without
                compensation.
            k_chunk: Channels compensated of every 1024; 0 is the product alone.

        Raises:
            TimerError: it could not be timed.
        """
        ...
