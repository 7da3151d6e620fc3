"""Worker: the engine's thread, and the streams that carry its results to the event loop.

A stream belongs to the loop that created it. Closing it (or a client's disconnection, which cancels the task that reads
it) sets a flag that the job polls between steps.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from runtime.errors import Cancelled

T = TypeVar("T")
Job = Callable[[], None]


class Later(Exception):
    """A job cannot be done beside ongoing work: it is called again once that has ended.

    Args:
        waits: Polled between steps, whether it still waits for that.
    """

    def __init__(self, waits: Callable[[], bool]) -> None:
        super().__init__()
        self.waits = waits


class Stream(Generic[T]):
    """Results on their way from a worker thread to one reader in the event loop."""

    def __init__(self) -> None:
        """Create a stream of the running loop."""
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[T | BaseException | None] = asyncio.Queue()
        self._cancelled = threading.Event()

    def cancelled(self) -> bool:
        """Whether the rest is no longer wanted; polled by the worker."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the worker to stop. The reader still gets what arrives until then."""
        self._cancelled.set()

    def put(self, item: T) -> None:
        """Send an item; called by the worker."""
        self._send(item)

    def end(self, error: BaseException | None = None) -> None:
        """Close the stream; called by the worker. The reader stops, or raises `error`."""
        self._send(error)

    def _send(self, item: T | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop is closed, so there is no reader
            self._cancelled.set()

    async def read(self) -> AsyncGenerator[T, None]:
        """The items as they arrive. Closing this iterator cancels the work."""
        try:
            while True:
                item = await self._items.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._cancelled.set()


class Worker:
    """A thread that runs jobs in order, with steps of ongoing work between them.

    Args:
        name: Name of the thread.
        step: Runs a step of the ongoing work, and returns whether work remains. Must not raise.
    """

    def __init__(self, name: str, step: Callable[[], bool] = lambda: False) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[], bool]] | None] = queue.SimpleQueue()
        self._step = step
        self._held = 0
        self._closed = False
        self._idle: list[tuple[float, Job]] = []
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that have not started."""
        return self._jobs.qsize() + self._held

    def when_idle(self, seconds: float, job: Job) -> None:
        """Run `job` in the thread whenever it has been idle for this long (`math.inf`: never); several by rising time.

        A job that was given before gets another time. A long job polls `waiting`, and returns when something else is to
        be done.
        """
        self._idle = sorted([*(own for own in self._idle if own[1] != job), (seconds, job)], key=lambda own: own[0])
        if threading.current_thread() is not self._thread:
            self.submit(lambda: None)  # wakes the thread, so that it looks at the clock

    def submit(self, job: Job, alone: Callable[[], bool] = lambda: True) -> None:
        """Queue a job. A job must raise nothing but `Later`.

        Args:
            job: The job.
            alone: Called in the thread when it is the job's turn; returns whether ongoing work must end first.

        Raises:
            Cancelled: the worker has been closed.
        """
        if self._closed:
            raise Cancelled("the server is shutting down")
        self._jobs.put((job, alone))

    def close(self, last: Job) -> None:
        """Stop accepting jobs; run those queued, then `last`, and end. Does not wait. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._jobs.put((last, lambda: True))
            self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `close`. Returns whether it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        since = time.monotonic()
        stepping, rested = False, 0
        while True:
            try:
                taken = self._jobs.get(timeout=0 if stepping else self._patience(since, rested))
            except queue.Empty:
                if stepping:
                    stepping, since = self._step(), time.monotonic()
                    continue
                self._idle[rested][1]()
                rested += 1
                continue
            if taken is None:
                return
            self._do(*taken)
            del taken  # release the job's results while the thread waits
            stepping = self._step()
            since, rested = time.monotonic(), 0

    def _do(self, job: Job, alone: Callable[[], bool]) -> None:
        """Run a job, after ongoing work has ended if the job requires it."""
        while True:
            self._held = 1
            while alone() and self._step():
                pass
            self._held = 0
            try:
                job()
                return
            except Later as later:
                alone = later.waits

    def _patience(self, since: float, rested: int) -> float | None:
        """Seconds until the next idle job is due, of which `rested` have run; None if none is left."""
        if rested >= len(self._idle) or math.isinf(self._idle[rested][0]):
            return None
        return max(0.0, since + self._idle[rested][0] - time.monotonic())
