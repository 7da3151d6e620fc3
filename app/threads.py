"""Blocking work on threads, for callers that hold a lock or own what the work opens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(act: Callable[[], T], *, interrupt: Callable[[], object] | None = None) -> T:
    """Run a function on a thread. A cancelled caller stays until it has ended.

    `asyncio.to_thread` leaves at once, and with it the lock that the caller holds: the thread goes on, and opens a file
    beside the next caller's, or starts a process that nobody will end.

    Args:
        act: The function.
        interrupt: Called when the caller is cancelled, to have `act` end soon.
    """
    work = asyncio.ensure_future(asyncio.to_thread(act))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if interrupt is not None:
            interrupt()
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):  # who cancels twice waits as well
                await asyncio.wait([work])
        raise
