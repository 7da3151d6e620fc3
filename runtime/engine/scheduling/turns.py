"""Which thread runs the steps: the one that has the turn, for everybody's requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from runtime.engine.generation import Piece
from runtime.engine.scheduling.request import Request
from runtime.engine.scheduling.scheduler import Scheduler

POLL_S = 0.05
"""How often a thread looks what came of its request while another one has the turn."""


class Turns:
    """A scheduler that several threads may use. Thread-safe.

    Args:
        scheduler: The requests.
        session: Opens what lasts while there are requests; see `runtime.backends.decoder.Decoder.session`.
    """

    def __init__(self, scheduler: Scheduler, session: Callable[[], AbstractContextManager[None]]) -> None:
        self._scheduler, self._open = scheduler, session
        self._turn = threading.Condition()  # notified when all requests have ended
        self._session = ExitStack()
        self._in_session = self._stepping = False
        self.closed = False
        """Whether requests end at once."""

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While entered, no step is run."""
        with self._turn:
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While entered, nobody's request is being answered: begins when all have ended, and others wait."""
        with self._turn:
            self._turn.wait_for(lambda: not self._scheduler.busy)
            yield

    def submit(self, request: Request) -> None:
        """Hand a request to the scheduler."""
        with self._turn:
            self._add(request)

    def step(self) -> bool:
        """Do one step of all requests. Returns whether there is more to do."""
        with self._turn:
            return self._step()

    def end(self, error: Exception | None = None) -> None:
        """End all requests, as cancelled or by an error."""
        with self._turn:
            self._scheduler.end_all(error)
            self._rest()

    def pieces(self, request: Request, items: deque[Piece | Exception]) -> Iterator[Piece]:
        """Submit a request and run steps until it ends, or look what another thread's steps gave. To be closed.

        Args:
            request: The request.
            items: What its receiver fills.
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
            if not request.answer.ended:  # nobody wants the rest
                request.cancelled = _always
                with self._turn:
                    self._rest()

    def _turn_of(self, request: Request, items: deque[Piece | Exception], *, begun: bool) -> bool:
        """Wait for the turn, a while at most, and run a step if that is needed. Returns whether it was submitted."""
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
        """One step, in a session that lasts while there are requests. Returns whether there is more to do."""
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
        """End what was cancelled, and the session where nobody is left. Returns whether somebody is."""
        if self._stepping:  # a generator that nobody holds any longer was found in the middle of a step
            return True
        self._scheduler.end_cancelled()
        if self._scheduler.busy:
            return True
        self._in_session = False
        self._session.close()
        self._turn.notify_all()
        return False


def _always() -> bool:
    """Cancelled."""
    return True
