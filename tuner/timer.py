"""`Timer`, the source of the times that a search compares."""

from __future__ import annotations

from typing import Protocol


class Timer(Protocol):
    """Times the product of one layer type, with concurrent error compensation."""

    @property
    def measured(self) -> bool:
        """Whether the times are measured, and so have noise; False for a simulated device."""
        ...

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Time of one product.

        Args:
            kind: Layer type: `qkv`, `o`, `gate_up`, `down`, or `head`.
            n_tb: Thread blocks of the compensation; 0 without compensation, or on a device without thread blocks.
            k_chunk: Compensated channels per 1024; 0 for the product alone.

        Raises:
            TimerError: it could not be timed.
        """
        ...
