"""The connection to the runtime: found or started, polled, lost and restarted. Independent of widgets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.errors import ClientError, ConnectionLostError
from app.language import _
from app.tui.runtime import ClientLike, SupervisorLike

if TYPE_CHECKING:
    from runtime.wire.answers import Status

CHECK_TIMEOUT_S = 5.0
"""Maximum wait for a status, in seconds. A runtime that takes longer is busy, not gone."""
_ENDING_S, _POLL_S = 1.0, 0.02
"""How long a process may take to end after its connections broke, and the interval between looks at it, in seconds."""


class Connection:
    """One runtime, or none."""

    def __init__(
        self,
        supervisor: Callable[[], SupervisorLike],
        changed: Callable[[], object],
        lost: Callable[[str], object],
    ) -> None:
        """Prepare a connection without starting anything.

        Args:
            supervisor: makes the supervisor; called when the runtime is started, not before.
            changed: called when the status changes, also to None.
            lost: called with the reason when the runtime is gone.
        """
        self.client: ClientLike | None = None
        self.status: Status | None = None
        self.last_status: Status | None = None
        """The last status that was not None."""
        self.problem: str | None = None
        """The failure because of which there is no runtime or no model."""
        self.settled = asyncio.Event()
        """Whether nothing is being started or loaded."""
        self._make_supervisor = supervisor
        self._supervisor: SupervisorLike | None = None
        self._changed, self._lost = changed, lost

    @property
    def ready(self) -> bool:
        """Whether a model is loaded and can answer."""
        return self.client is not None and self.status is not None and self.status.state in ("ready", "generating")

    async def open(self, *, restart: bool) -> Status | None:
        """Find or start a runtime.

        Args:
            restart: whether to end one that was started here first.

        Returns:
            Its status; None if there is no runtime, with the reason in `problem`.
        """
        self.problem = None
        self.settled.clear()
        self.show(None)
        try:
            if self._supervisor is None:
                self._supervisor = self._make_supervisor()
            self.client = await (self._supervisor.restart() if restart else self._supervisor.ensure())
            status = await self.client.status()
        except (ClientError, OSError) as error:
            self.problem = str(error)
            self.show(None)
            return None
        self.show(status)
        return status

    async def close(self) -> None:
        """Stop the runtime if it was started here. Safe to call twice."""
        supervisor, self._supervisor, self.client = self._supervisor, None, None
        if supervisor is not None:
            await supervisor.close()

    def require(self) -> ClientLike:
        """The client.

        Raises:
            ClientError: there is no runtime.
        """
        if self.client is None:
            raise ClientError(self.problem or _("the runtime is not running yet"))
        return self.client

    async def gone(self) -> bool:
        """Whether the runtime has ended; if it has not, its status is shown. One that does not answer is only busy."""
        client, ending_s = self.client, 0.0
        if client is None:
            return True
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                status = await client.status()
        except TimeoutError:
            return False
        except (ClientError, OSError) as error:
            ending_s = _ENDING_S if isinstance(error, ConnectionLostError) else 0.0
        else:
            if client is self.client:
                self.show(status)
            return False
        until = time.monotonic() + ending_s
        while client is self.client:
            if self.ended:
                return True
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_POLL_S)
        return False  # another one is used by now

    @property
    def ended(self) -> bool:
        """Whether the process of the runtime in use has ended. A remote server's is out of sight and counts."""
        supervisor = self._supervisor
        return self.client is not None and supervisor is not None and supervisor.crash_report() is not None

    def show(self, status: Status | None) -> None:
        """Store a new status and report the change."""
        self.status = status
        self.last_status = status or self.last_status
        self._changed()

    def how_it_ended(self) -> str:
        """Why a runtime that does not answer ended, in one line."""
        report = self._supervisor.crash_report() if self._supervisor is not None else None
        return (report or "").partition("\n")[0].rstrip(":") or _("the runtime stopped unexpectedly")

    def drop(self, reason: str) -> None:
        """Record that the runtime is gone, without reporting it; the caller does."""
        self.client = None
        self.problem = reason
        self.show(None)

    def lose(self) -> str:
        """Record and report that the runtime is gone.

        Returns:
            The reason, and what happens next.
        """
        reason = self.how_it_ended()
        self.settled.clear()
        self.drop(reason)
        told = reason if self._supervisor is None else f"{reason}; {self._supervisor.remedy}"
        self._lost(told)
        return told

    async def why(self, error: Exception) -> str:
        """Why work failed: the runtime's error, or how the runtime ended."""
        if not await self.gone():
            return str(error)
        reason = self.how_it_ended()
        self.drop(reason)
        return reason
