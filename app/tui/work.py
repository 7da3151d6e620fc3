"""A runner of one long job at a time: loading, quantizing, tuning. Independent of widgets and runtime."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING

from app.errors import ClientError
from app.tui.jobs import Job, Meter

if TYPE_CHECKING:
    from models.progress import Progress


class Work:
    """Runs a job, can stop it, and reports its state as a `Job`."""

    def __init__(self, report: Callable[[Job], object], clock: Callable[[], float]) -> None:
        """Start without a job.

        Args:
            report: receives the job whenever it changes.
            clock: returns seconds, for speeds.
        """
        self.job: Job | None = None
        self._report = report
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether a job is running."""
        return self._task is not None

    async def ended(self) -> None:
        """Wait until no job is running."""
        while (task := self._task) is not None:
            await asyncio.wait([task])
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop the running job and wait for its end."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])

    def recall(self, job: Job) -> None:
        """Report a job that an earlier run of the program left unfinished, unless there is another."""
        if self.job is None or self.job.outcome == "done":
            self._tell(job)

    def dismiss(self) -> None:
        """Dismiss a finished job."""
        if not self.running:
            self.job = None

    async def run(
        self,
        title: str,
        reports: AsyncGenerator[Progress, None],
        explain: Callable[[Exception], Awaitable[str]],
        *,
        message: str = "",
        stages: tuple[str, ...] = (),
    ) -> bool:
        """Stop the running job and run this one instead.

        Args:
            title: its title.
            reports: its progress reports; closing the generator stops the job.
            explain: turns the error that ended the job into text.
            message: text to show until the first report.
            stages: its stages, if it has several.

        Returns:
            Whether it finished; it may also have been stopped or have failed.
        """
        await self.stop()
        meter = Meter(title, self._clock, message, stages)

        async def follow() -> None:
            async with contextlib.aclosing(reports) as stream:
                async for progress in stream:
                    self._tell(meter.take(progress))

        task = self._task = asyncio.create_task(follow())
        self._tell(meter.job)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            if self._task is task:
                self._task = None
        if task.cancelled():
            self._tell(meter.end("stopped"))
        elif (error := task.exception()) is None:
            self._tell(meter.end("done"))
            return True
        elif isinstance(error, (ClientError, OSError)):
            self._tell(meter.end("failed", await explain(error)))
        else:
            raise error
        return False

    def _tell(self, job: Job) -> None:
        self.job = job
        self._report(job)
