"""The runtime behind the screens: started or found, asked how it is, lost, and started again. Knows no widgets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.errors import ClientError
from app.tui.runtime import ClientLike, SupervisorLike

if TYPE_CHECKING:
    from runtime.wire.answers import Status

CHECK_TIMEOUT_S = 5.0
"""A runtime that does not tell its status in this time, after a failure, counts as gone."""


class Connection:
    """One runtime, or none."""

    def __init__(
        self,
        supervisor: Callable[[], SupervisorLike],
        changed: Callable[[], object],
        lost: Callable[[str], object],
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            supervisor: makes the supervisor, called when the runtime is started and not before.
            changed: called when there is another status, or none.
            lost: called with the reason when the runtime is gone.
        """
        self.client: ClientLike | None = None
        self.status: Status | None = None
        self.last_status: Status | None = None
        """The last one there was."""
        self.problem: str | None = None
        """Why there is no runtime or no model, when that is a failure."""
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
            restart: whether one that was started here is ended first.

        Returns:
            What it is doing; None where there is none, and `problem` says why.
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
        """End what was started. Safe to call twice."""
        supervisor, self._supervisor, self.client = self._supervisor, None, None
        if supervisor is not None:
            await supervisor.close()

    def require(self) -> ClientLike:
        """The client.

        Raises:
            ClientError: there is no runtime.
        """
        if self.client is None:
            raise ClientError(self.problem or "the runtime is not running yet")
        return self.client

    async def alive(self) -> Status | None:
        """What the runtime is doing; None where it does not say."""
        client = self.client
        if client is None:
            return None
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await client.status()
        except (ClientError, OSError, TimeoutError):
            return None

    def show(self, status: Status | None) -> None:
        """Take another status."""
        self.status = status
        self.last_status = status or self.last_status
        self._changed()

    def how_it_ended(self) -> str:
        """What became of a runtime that does not answer, in one line."""
        report = self._supervisor.crash_report() if self._supervisor is not None else None
        return (report or "").partition("\n")[0].rstrip(":") or "the runtime stopped unexpectedly"

    def drop(self, reason: str) -> None:
        """Take note that the runtime is gone, while somebody works with it who tells that himself."""
        self.client = None
        self.problem = reason
        self.show(None)

    def lose(self) -> str:
        """Take note that the runtime is gone, and tell it.

        Returns:
            Why, and what comes next.
        """
        reason = self.how_it_ended()
        self.settled.clear()
        self.drop(reason)
        told = reason if self._supervisor is None else f"{reason}; {self._supervisor.remedy}"
        self._lost(told)
        return told

    async def why(self, error: Exception) -> str:
        """Why work failed: what the runtime said, or how it ended."""
        if await self.alive() is not None:
            return str(error)
        reason = self.how_it_ended()
        self.drop(reason)
        return reason
