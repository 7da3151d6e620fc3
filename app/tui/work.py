"""One long piece of work at a time: loading, quantizing, tuning. Knows no widgets and no runtime."""

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
    """Follows the progress of a piece of work, can stop it, and tells what it is doing as a `Job`."""

    def __init__(self, report: Callable[[Job], object], clock: Callable[[], float]) -> None:
        """Begin with nothing to do.

        Args:
            report: takes the job whenever it changed.
            clock: seconds, for speeds.
        """
        self.job: Job | None = None
        self._report = report
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether something is being done."""
        return self._task is not None

    async def ended(self) -> None:
        """Wait until nothing runs."""
        while (task := self._task) is not None:
            await asyncio.wait([task])
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop what runs, and wait for its end."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])

    def recall(self, job: Job) -> None:
        """Tell of work that another run of the program left unfinished, unless something else is told."""
        if self.job is None or self.job.outcome == "done":
            self._tell(job)

    def dismiss(self) -> None:
        """Forget a job that ended."""
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
        """Stop what runs and do this instead.

        Args:
            title: what it is, for a person.
            reports: its progress; closing it stops the work.
            explain: turns the error that ended the work into words.
            message: what happens until the first report.
            stages: its stages, where it has several.

        Returns:
            Whether it was done: it may also have been stopped, or have failed.
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
