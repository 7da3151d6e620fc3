"""The runtime behind the screens, its model, and long work with it: loading, making, tuning. Knows no chats."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from textual.message import Message as Event

from app.errors import ClientError
from app.settings import Settings
from app.tui.connection import Connection
from app.tui.figures import tuning_title
from app.tui.getting import Getting, forget, title_of, unfinished
from app.tui.jobs import STAGES, Job
from app.tui.messages import JobChanged, RuntimeLost, StatusChanged
from app.tui.recent import Recent
from app.tui.runtime import SupervisorLike
from app.tui.work import Work
from runtime.compensation import of_settings

if TYPE_CHECKING:
    from models.progress import Progress
    from runtime.problem import Problem
    from runtime.wire.answers import Caches, Holding, ModelEntry, Status
    from runtime.wire.device import DeviceReport
    from runtime.wire.prospects import Prospect
    from runtime.wire.requests import LoadRequest, QuantizeRequest


class ModelWork(ABC):
    """One runtime and its model, found or started, lost and started again; what is done with models, and to them."""

    def __init__(
        self,
        supervisor: Callable[[], SupervisorLike],
        settings: Settings,
        post: Callable[[Event], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin; nothing is started yet.

        Args:
            supervisor: makes the supervisor, called when the runtime is started and not before.
            settings: the settings to begin with.
            post: takes the events, on the event loop's thread.
            clock: seconds, for speeds.
        """
        self.settings = settings
        self.wanted: str | None = None if settings.endpoint else settings.model
        """The model that is loaded, or is to be."""
        self.newcomer = False
        """Whether no model was ever picked, and there is none but what came with the program."""
        self.recent = Recent()
        self._post = post
        self._connection = Connection(supervisor, self._status_changed, lambda reason: post(RuntimeLost(reason)))
        self._work = Work(lambda job: post(JobChanged(job)), clock)
        self._tuned_by: object = None
        self._recovering = False

    @property
    @abstractmethod
    def generating(self) -> bool:
        """Whether an answer is being written, in whatever chat."""

    @abstractmethod
    def _takes_over(self) -> bool:
        """Whether a model that was made just now is loaded at once, for nobody talks to another one."""

    @abstractmethod
    async def forget_ended(self) -> None:
        """Let the runtime delete what it keeps of conversations that ended."""

    # The runtime

    @property
    def status(self) -> Status | None:
        """What the runtime is doing; None while there is none."""
        return self._connection.status

    @property
    def problem(self) -> str | None:
        """Why there is no runtime or no model, when that is a failure."""
        return self._connection.problem

    @property
    def ready(self) -> bool:
        """Whether a model is loaded and can answer."""
        return self._connection.ready

    async def start(self) -> None:
        """Start the runtime, or find one, and load the model that the settings name or that runs already."""
        await self._connect(restart=False)
        if (request := unfinished()) is not None:
            self._work.recall(Job(title=title_of(request), stages=STAGES, outcome="stopped"))

    async def recover(self) -> None:
        """Start the runtime anew after it was lost, and load the same model again."""
        if not self._recovering:
            self._recovering = True
            try:
                await self._connect(restart=True)
            finally:
                self._recovering = False

    async def _connect(self, *, restart: bool) -> None:
        status = await self._connection.open(restart=restart)
        if status is not None:
            running = status.model if status.state in ("ready", "generating") else None
            self.wanted = self.wanted or running or await self._only_model()
            if self.wanted and self.wanted != running:
                await self._load(self.wanted)
        self._connection.settled.set()
        with contextlib.suppress(ClientError, OSError):
            await self.forget_ended()

    async def _only_model(self) -> str | None:
        """The model to begin with where nothing was picked yet and there is no choice."""
        try:
            models = await self.models()
        except (ClientError, OSError):
            return None
        self.newcomer = bool(models) and all(model.bundled for model in models)
        return models[0].name if len(models) == 1 else None

    @property
    def remote(self) -> str | None:
        """The address of the server that answers, where it is not our own runtime."""
        return self.settings.endpoint

    async def refresh(self) -> None:
        """Ask the runtime how it is; a runtime that does not answer is lost.

        A server elsewhere is left alone while it answers: llama-cpp-python's ends an answer when it is asked something.
        """
        if not self._recovering and not (self.remote is not None and self.generating):
            await self._ask_status()

    @property
    def resting(self) -> bool:
        """Whether the model left memory because nobody used it; the next message brings it back."""
        status = self.status
        empty = status is not None and status.state == "empty"
        return empty and self.wanted is not None and self.problem is None and not self.working

    async def _ask_status(self) -> None:
        connection = self._connection
        if connection.client is None:
            return
        if (status := await connection.alive()) is not None:
            connection.show(status)
        elif not (self.generating or self.working):
            connection.lose()

    def _status_changed(self) -> None:
        if self.status is not None:
            self.recent.hold(self.status.memory_bytes)
        self._post(StatusChanged())

    async def caches(self) -> Caches:
        """What is on disk of conversations' caches, and what each kind of cache means for the loaded model.

        Raises:
            ClientError: the runtime did not say.
        """
        return await self._connection.require().caches()

    async def forget_all(self) -> Holding:
        """Delete what memory and disk hold of all conversations, so that the next prompt is read from its beginning.

        Raises:
            ClientError: it could not be deleted.
        """
        return await self._connection.require().forget()

    # Models

    async def models(self) -> Sequence[ModelEntry]:
        """The stored models.

        Raises:
            ClientError: the runtime did not say.
        """
        return await self._connection.require().models()

    async def remove(self, name: str) -> None:
        """Delete a stored model.

        Raises:
            ClientError: it cannot be deleted.
        """
        await self._connection.require().remove(name)
        if self.wanted == name:
            self.wanted = None
        await self.refresh()

    async def load(self, name: str) -> bool:
        """Load a model with the present settings.

        Returns:
            Whether it is loaded.
        """
        if self._connection.client is None:
            self.wanted = name
            await self.recover()
            return self.ready
        self._connection.settled.clear()
        try:
            return await self._load(name)
        finally:
            self._connection.settled.set()

    async def _load(self, name: str) -> bool:
        connection = self._connection
        if connection.client is None:
            return False
        self.wanted = name
        connection.problem = None
        loaded = await self._run(f"Loading {name}", connection.client.load(self._load_request(name)))
        if not loaded and self.job is not None:
            connection.problem = connection.problem or self.job.error
        await self._ask_status()
        return loaded

    def _load_request(self, name: str) -> LoadRequest:
        """How a model is loaded by the present settings."""
        from runtime.wire.requests import LoadRequest

        settings = self.settings
        wanted = of_settings(settings.k_chunk, settings.budget, prompt_budget=settings.prompt_budget)
        return LoadRequest(
            model=name,
            kv=None if settings.speculation else settings.kv,
            speculate=None if settings.drafts is None else bool(settings.drafts),
            gamma=settings.gamma,
            k_chunk=wanted.k_chunk,
            budget=wanted.budget_percent,
            prompt_budget=wanted.prompt_budget_percent,
            context=settings.context,
            num_parallel=settings.num_parallel,
            backend=settings.backend,
        )

    async def get(self, request: QuantizeRequest) -> Getting | None:
        """Fetch a checkpoint where need be, make a low-bit model of it, and load it unless somebody chats by then.

        Returns:
            What became of it; None where there is no runtime.
        """
        client = self._connection.client
        if client is None:
            return None
        getting = Getting(client, request, self._loading, self._takes_over)
        done = await self._run(getting.title, getting.reports(), stages=getting.stages)
        self.newcomer = self.newcomer and getting.made is None
        if not done and getting.made is not None and self.job is not None:
            self._connection.problem = self.job.error
        await self._ask_status()
        return getting

    async def _loading(self, name: str) -> AsyncGenerator[Progress, None]:
        """Load a model as a part of other work; what is sent meanwhile waits for it."""
        client, self.wanted = self._connection.require(), name
        self._connection.settled.clear()
        try:
            async with contextlib.aclosing(client.load(self._load_request(name))) as reports:
                async for progress in reports:
                    yield progress
        finally:
            self._connection.settled.set()

    async def prospects(self) -> Sequence[Prospect]:
        """The models that can be fetched, seen from this machine as it is now.

        Raises:
            ClientError: the runtime did not say.
        """
        return await self._connection.require().prospects()

    async def tune(self, *, force: bool = False) -> bool:
        """Apply the budget, or the k_chunk that overrides it, to the model that runs; load and quantize end first.

        The chat goes on: what is sent meanwhile waits for its turn in the runtime.

        Args:
            force: whether to measure again what was measured before.

        Returns:
            Whether it is applied. Without a model there is nothing to do: the next load takes the settings.
        """
        from runtime.wire.requests import TuneRequest

        while self.working and not self.tuning:
            await self._work.ended()
        await self._connection.settled.wait()
        client = self._connection.client
        if client is None or not self.ready:
            return False
        waits = "waits for the answer to end" if self.generating else ""
        settings = self.settings
        wanted = of_settings(settings.k_chunk, settings.budget, prompt_budget=settings.prompt_budget)
        request = TuneRequest(
            k_chunk=wanted.k_chunk,
            budget=wanted.budget_percent,
            prompt_budget=wanted.prompt_budget_percent,
            force=force,
        )
        this = self._tuned_by = object()
        try:
            done = await self._run(tuning_title(wanted), client.tune(request), message=waits)
        finally:
            if self._tuned_by is this:  # else another tuning took its place
                self._tuned_by = None
        await self._ask_status()
        return done

    async def without_effect(self) -> Sequence[Problem]:
        """Why the budget has no effect on the model that runs; nothing where it has one, or where k_chunk is given."""
        status = self.status
        if status is None or self.settings.k_chunk is not None or status.budget_percent is not None:
            return ()
        try:
            return (await self.device()).problems
        except (ClientError, OSError):
            return ()

    @property
    def tuning(self) -> bool:
        """Whether the budget is being applied to the model that runs."""
        return self._tuned_by is not None and self.working

    async def device(self) -> DeviceReport:
        """The device that runs models, and how the loaded model was tuned to it.

        Raises:
            ClientError: the runtime did not say.
        """
        return await self._connection.require().device()

    @property
    def working(self) -> bool:
        """Whether a model is being loaded, made or tuned."""
        return self._work.running

    @property
    def job(self) -> Job | None:
        """The work that runs, or ended last."""
        return self._work.job

    async def stop_work(self) -> None:
        """Stop loading, quantizing or tuning."""
        await self._work.stop()

    def dismiss_job(self) -> None:
        """Forget a job that ended, and do not offer it again."""
        if self.job is not None and self.job.stages and self.job.outcome != "running":
            forget()
        self._work.dismiss()

    async def _run(
        self, title: str, reports: AsyncGenerator[Progress, None], *, message: str = "", stages: tuple[str, ...] = ()
    ) -> bool:
        return await self._work.run(title, reports, self._connection.why, message=message, stages=stages)
