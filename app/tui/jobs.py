"""Long jobs, one at a time (load, quantize, tune), and how the progress panel shows them: phase, speed, time left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from app.amounts import Estimate, byte_count
from app.errors import ClientError
from app.language import _, number
from app.reports import reported

if TYPE_CHECKING:
    from models.progress import Progress


Outcome = Literal["running", "done", "stopped", "failed"]
PHASES = {
    "allocate": _("choosing bits"),
    "certify": _("certify"),
    "check": _("check"),
    "compile": _("compile"),
    "download": _("download"),
    "fetch": _("fetch"),
    "inspect": _("inspect"),
    "load": _("load"),
    "open": _("open"),
    "quantize": _("quantize"),
    "sensitivities": _("gradients"),
    "tokenizer": _("tokenizer"),
    "tune": _("tuning"),
    "verify": _("verify"),
    "wait": _("wait"),
}
"""Display names of phases."""
UNITS = {
    "blocks": _("blocks"),
    "files": _("files"),
    "kernels": _("kernels"),
    "measurements": _("measurements"),
    "prompts": _("prompts"),
    "steps": _("steps"),
    "tokens": _("tokens"),
    "ways": _("ways"),
}
"""Display names of units other than bytes."""
STAGES = ("fetch", "quantize", "load", "tune")
"""The stages of setting up a model, in order."""
_STAGE_OF = {
    "download": "fetch",
    "quantize": "quantize",
    "allocate": "quantize",
    "sensitivities": "quantize",
    "verify": "quantize",
    "load": "load",
    "compile": "load",
    "tune": "tune",
}
"""The stage of each phase. Other phases belong to the current stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The state of one job."""

    title: str
    phase: str = ""
    message: str = ""
    done: float = 0.0
    total: float | None = None
    unit: str = ""
    speed: float | None = None
    """Units per second."""
    left: str = ""
    """Time left, in words."""
    stages: tuple[str, ...] = ()
    """All its stages, if it has several."""
    stage: int = 0
    """Index of the current stage."""
    outcome: Outcome = "running"
    error: str | None = None

    @property
    def fraction(self) -> float | None:
        """Share of the phase that is done; None if the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def share(self) -> float | None:
        """Share of the job that is done, each stage counted alike; None if it is unknown."""
        if not self.stages:
            return self.fraction
        return (self.stage + (self.fraction or 0.0)) / len(self.stages)

    @property
    def line(self) -> str:
        """The state in one line of text."""
        if self.outcome == "failed":
            return _("{title} failed: {error}", title=self.title, error=self.error)
        if self.outcome == "stopped":
            if self.stages:
                return _("{title} stopped; finished steps are kept", title=self.title)
            return _("{title} stopped", title=self.title)
        if self.message.lower().startswith(self.title.lower()):
            return self.message[:1].upper() + self.message[1:]
        phase = PHASES.get(self.phase, self.phase)
        parts = [self.title, phase if phase not in self.title.lower() else "", self.message]
        return " · ".join(part for part in parts if part)

    @property
    def course(self) -> str:
        """All stages with their states: `✓ fetch  ▸ quantize  · load  · tune`."""
        marks = ["✓" if at < self.stage else "▸" if at == self.stage else "·" for at in range(len(self.stages))]
        names = [_("tune") if stage == "tune" else PHASES.get(stage, stage) for stage in self.stages]
        return "  ".join(f"{mark} {name}" for mark, name in zip(marks, names, strict=True))

    @property
    def pace(self) -> str:
        """Progress and speed: `12 of 28 blocks · 1.5 blocks/s · about 11 s left`."""
        if self.outcome != "running" or not (self.unit or self.total):
            return ""
        parts = [self._amount(self.done) if not self.total else f"{self._amount(self.done, self.total)}"]
        if self.speed and (self._bytes or self.speed >= 1):
            rate = (
                f"{byte_count(self.speed)}/s"
                if self._bytes
                else f"{number(self.speed, '.3g')} {UNITS.get(self.unit, self.unit)}/s"
            )
            parts.append(rate)
        if self.left:
            parts.append(self.left)
        return " · ".join(parts)

    @property
    def _bytes(self) -> bool:
        return self.unit.lower() in ("b", "byte", "bytes")

    def _amount(self, done: float, total: float | None = None) -> str:
        if self._bytes:
            return (
                byte_count(done)
                if total is None
                else _("{done} of {total}", done=byte_count(done), total=byte_count(total))
            )
        unit = UNITS.get(self.unit, self.unit)
        if total is None:
            return f"{int(done)} {unit}".rstrip()
        return _("{done} of {total} {unit}", done=int(done), total=int(total), unit=unit).strip(": ")


class Meter:
    """Turns progress reports into the state of a job."""

    def __init__(self, title: str, clock: Callable[[], float], message: str = "", stages: tuple[str, ...] = ()) -> None:
        """Start a job.

        Args:
            title: the job's title.
            clock: returns seconds.
            message: text to show until the first report.
            stages: its stages from `STAGES`, if it has several.
        """
        self.job = Job(title=title, message=message, stages=stages)
        self._clock = clock
        self._estimate = Estimate()

    def take(self, progress: Progress) -> Job:
        """The job's state after one more report."""
        self._estimate.take(self._clock(), progress.phase, progress.done, progress.total)
        self.job = replace(
            self.job,
            phase=progress.phase,
            message=progress.message if progress.phase == "wait" else reported(progress.message, ""),
            done=progress.done,
            total=progress.total,
            unit=progress.unit,
            speed=self._estimate.speed,
            left=self._estimate.words,
            stage=self._stage(progress.phase),
        )
        return self.job

    def _stage(self, phase: str) -> int:
        """The stage of a phase. Stages never go backwards."""
        stages, stage = self.job.stages, _STAGE_OF.get(phase)
        return max(self.job.stage, stages.index(stage)) if stage in stages else self.job.stage

    def end(self, outcome: Outcome, error: str | None = None) -> Job:
        """The job's state after its end."""
        self.job = replace(self.job, outcome=outcome, error=error)
        return self.job


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
