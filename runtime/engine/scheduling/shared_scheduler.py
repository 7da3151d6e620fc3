"""Shared scheduler: lets several threads share a scheduler; one of them at a time runs the steps for all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from runtime.engine.generation import Piece
from runtime.engine.scheduling.request import Request
from runtime.engine.scheduling.scheduler import Scheduler

POLL_S = 0.05
"""Seconds between a thread's checks of its own request while another thread runs the steps."""


class SharedScheduler:
    """A scheduler shared by several threads. Thread-safe.

    Args:
        scheduler: The scheduler.
        session: Opens resources that are held while there are requests; see `runtime.backends.decoder.Decoder.session`.
    """

    def __init__(self, scheduler: Scheduler, session: Callable[[], AbstractContextManager[None]]) -> None:
        self._scheduler, self._open = scheduler, session
        self._turn = threading.Condition()  # notified when all requests have ended
        self._session = ExitStack()
        self._in_session = self._stepping = False
        self.closed = False
        """Whether requests end immediately."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: no step runs inside."""
        with self._turn:
            yield

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Context manager: no request is in progress inside. Waits for running ones, and holds back new ones."""
        with self._turn:
            self._turn.wait_for(lambda: not self._scheduler.busy)
            yield

    def submit(self, request: Request) -> None:
        """Queue a request."""
        with self._turn:
            self._add(request)

    def step(self) -> bool:
        """Run one step of all requests. Returns whether work remains."""
        with self._turn:
            return self._step()

    def end(self, error: Exception | None = None) -> None:
        """End all requests, as cancelled or with an error."""
        with self._turn:
            self._scheduler.end_all(error)
            self._rest()

    def pieces(self, request: Request, items: deque[Piece | Exception]) -> Iterator[Piece]:
        """Submit a request and run steps until it ends, or follow another thread's steps. Close the generator.

        Args:
            request: The request.
            items: Filled by the request's receiver.
        """
        begun = False
        try:
            while items or not request.answer.ended:
                if not items:
                    begun = self._turn_of(request, items, begun=begun)
                while items:
                    item = items.popleft()
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            if not request.answer.ended:  # the rest is not wanted
                request.cancelled = _always
                with self._turn:
                    self._rest()

    def _turn_of(self, request: Request, items: deque[Piece | Exception], *, begun: bool) -> bool:
        """Wait briefly for the turn and run a step if needed. Returns whether the request was submitted."""
        if not self._turn.acquire(timeout=POLL_S):
            if not begun and request.cancelled():
                request.answer.end("cancelled")
            return begun
        try:
            if not begun:
                self._add(request)
            if not items:
                self._step()
        finally:
            self._turn.release()
        return True

    def _add(self, request: Request) -> None:
        self._scheduler.add(request)
        if self.closed:
            self._scheduler.end_all()

    def _step(self) -> bool:
        """Run one step, in a session that lasts while there are requests. Returns whether work remains."""
        if self._scheduler.busy:
            if not self._in_session:
                self._session.enter_context(self._open())
                self._in_session = True
            self._stepping = True
            try:
                self._scheduler.step()
            finally:
                self._stepping = False
        return self._rest()

    def _rest(self) -> bool:
        """End cancelled requests, and the session if none is left. Returns whether any is left."""
        if self._stepping:  # an abandoned generator was collected in the middle of a step
            return True
        self._scheduler.end_cancelled()
        if self._scheduler.busy:
            return True
        self._in_session = False
        self._session.close()
        self._turn.notify_all()
        return False


def _always() -> bool:
    """A cancelled request."""
    return True
