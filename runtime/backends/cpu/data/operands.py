"""Reading a cache's description."""

from __future__ import annotations

import numba

from runtime.backends.cpu.machine.vector import get_word


@numba.njit(nogil=True)
def word(cache: int, index: int) -> int:
    """A word of a cache's description (`runtime.backends.cpu.data.pages`)."""
    return get_word(cache + 8 * index)
