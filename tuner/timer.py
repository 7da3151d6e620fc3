"""`Timer`, the source of the times that a search compares, and how its readings are stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tuner.errors import Cancelled

Cancel = Callable[[], bool]
"""Whether the work should stop; called before every measurement."""


def never() -> bool:
    """Never stop; the default `Cancel`."""
    return False


def check(cancelled: Cancel) -> None:
    """Raise if `cancelled` returns True.

    Raises:
        Cancelled: the work was asked to stop.
    """
    if cancelled():
        raise Cancelled("the tuning was stopped. Its measurements are kept; start it again to continue")


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
