"""The work behind the screens: one runtime and its model, the open chats, and long work. Knows no widgets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from textual.message import Message as Event

from app.conversation import Conversation
from app.errors import ClientError
from app.settings import Settings
from app.tui.answers import Answers, Writing
from app.tui.connection import Connection
from app.tui.figures import tuning_title
from app.tui.getting import Getting, forget, title_of, unfinished
from app.tui.jobs import STAGES, Job
from app.tui.kept import KeptChats
from app.tui.messages import ChatEnded, JobChanged, RuntimeLost, StatusChanged
from app.tui.open_chats import OpenChats
from app.tui.prompts import Prompts
from app.tui.recent import Recent
from app.tui.runtime import SupervisorLike
from app.tui.tally import Tally
from app.tui.work import Work
from runtime.compensation import of_settings

if TYPE_CHECKING:
    from app.history.store import Chat
    from models.progress import Progress
    from runtime.problem import Problem
    from runtime.wire.answers import Caches, Holding, ModelEntry, Status
    from runtime.wire.device import DeviceReport
    from runtime.wire.inspection import Inspection
    from runtime.wire.prospects import Prospect
    from runtime.wire.requests import LoadRequest, QuantizeRequest

FORGET_TIMEOUT_S = 3.0
"""Whoever quits does not wait longer for the runtime to forget the chat."""


class Session:
    """Connects the runtime and the chats, and says what happens as events."""

    def __init__(
        self,
        supervisor: Callable[[], SupervisorLike],
        settings: Settings,
        post: Callable[[Event], object],
        *,
        conversation: Conversation | None = None,
        kept: KeptChats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a session; nothing is started yet.

        Args:
            supervisor: makes the supervisor, called when the runtime is started and not before.
            settings: the settings to begin with.
            post: takes the events, on the event loop's thread.
            conversation: the conversation; a new one by default.
            kept: where conversations are kept; they end with the program where there is none.
            clock: seconds, for speeds.
        """
        self.settings = settings
        self.wanted: str | None = None if settings.endpoint else settings.model
        """The model that is loaded, or is to be."""
        self.summarizes = False
        """Whether what is left out next is summarized, because the person said so this time."""
        self.newcomer = False
        """Whether no model was ever picked, and there is none but what came with the program."""
        self.recent = Recent()
        self._post = post
        self._connection = Connection(supervisor, self._status_changed, lambda reason: post(RuntimeLost(reason)))
        self._work = Work(lambda job: post(JobChanged(job)), clock)
        self._tuned_by: object = None
        self._recovering = False
        self._prompts = Prompts(self._connection, lambda: self.settings, self.note, post, self._wants_summary)
        self.answers = Answers(
            self._connection,
            self.recent,
            clock,
            ready=self._ready_to_answer,
            prompt=self._prompts.make,
            shorten=self._prompts.shorten,
            ended=self._answer_ended,
        )
        self._chats = OpenChats(
            Conversation() if conversation is None else conversation,
            kept=kept,
            keeps=lambda: self.settings.history == "on",
            connection=self._connection,
            answers=self.answers,
        )

    # The runtime

    def _wants_summary(self) -> bool:
        """Whether what is left out now is to be summarized; the wish is for once."""
        wanted, self.summarizes = self.summarizes, False
        return wanted

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

    async def close(self) -> None:
        """Stop what runs and end what was started; chats that are not kept end with it. Safe to call twice."""
        await self.answers.stop()
        await self.stop_work()
        self.note(self.conversation)
        self._chats.begin()
        with contextlib.suppress(ClientError, OSError, TimeoutError):
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await self.forget_ended()
        try:
            if self.kept is not None:
                await self.kept.close()
        finally:
            await self._connection.close()

    @property
    def remote(self) -> str | None:
        """The address of the server that answers, where it is not our own runtime."""
        return self.settings.endpoint

    async def switch(self) -> None:
        """Let the server answer that the settings name now; answers and work of the one before are stopped."""
        await self.answers.stop()
        await self.stop_work()
        await self._connection.close()
        self.wanted = None if self.remote else self.settings.model
        await self._connect(restart=False)

    async def refresh(self) -> None:
        """Ask the runtime how it is; a runtime that does not answer is lost."""
        if not self._recovering:
            await self._ask_status()

    async def wake(self) -> None:
        """The machine slept: what ran on a graphics card is started again, for drivers lose it in a suspend."""
        status = self.status
        if status is not None and status.backend == "triton" and not self._recovering:
            await self.answers.stop()
            await self.recover()

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

    # Chats

    @property
    def conversation(self) -> Conversation:
        """The conversation in sight."""
        return self._chats.conversation

    @property
    def kept(self) -> KeptChats | None:
        """Where conversations are kept."""
        return self._chats.kept

    @property
    def keeps(self) -> bool:
        """Whether what is said is kept for later."""
        return self._chats.keeps

    async def open_chat(self, chat: Chat) -> None:
        """Go on with a chat that is kept, in the place of the present one, whose answer is written on.

        Raises:
            HistoryError: it can't be read.
        """
        await self._chats.open(chat)

    async def delete_chat(self, chat: str) -> None:
        """Delete a chat that is kept; what the runtime keeps of it goes at once, the chat itself can be had back.

        Raises:
            HistoryError: it can't be deleted.
        """
        if await self._chats.delete(chat):
            self._post(ChatEnded())

    def end_chat(self) -> None:
        """Begin another conversation. Where none is kept, nobody can open this one any more: `forget_ended`."""
        self._chats.begin()

    async def forget_ended(self) -> None:
        """Let the runtime delete what it keeps of conversations that ended; where it is not there, it is asked later.

        Raises:
            ClientError: it refused; it is asked again next time.
        """
        await self._chats.forget_ended()

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
        await self.answers.stop()
        self.note(self.conversation, model=name)
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
        getting = Getting(client, request, self._loading, lambda: not len(self.conversation) and not self.generating)
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

    # Answers

    @property
    def generating(self) -> bool:
        """Whether an answer is being written, in whatever chat."""
        return self.answers.any

    @property
    def tally(self) -> Tally:
        """The answer that is being written in the chat in sight, as counted so far."""
        writing = self.answers.of(self.conversation.id)
        return Tally(started=0.0) if writing is None else writing.tally

    @property
    def context_used(self) -> int | None:
        """Tokens of the chat in sight, as the runtime last counted them."""
        counted = [message.statistics.context_used for message in self.conversation.path() if message.statistics]
        return next((used for used in reversed(counted) if used is not None), None)

    async def _ready_to_answer(self, conversation: Conversation) -> str | None:
        """Wait until the model of a conversation can answer; returns why it can't, or None."""
        await self._connection.settled.wait()
        if self._connection.client is None:
            await self.recover()
        bound, status = conversation.extras.model, self.status
        if bound is not None and status is not None and status.model != bound and not self.working:
            await self._load(bound)
        elif self.resting and self.wanted is not None:
            await self._load(self.wanted)
        if self._connection.client is None or not self.ready:
            return self.problem or "no model is loaded; pick one with F2"
        if bound is None and self.status is not None and self.status.model is not None:
            self.note(conversation, model=self.status.model)
        return None

    def note(self, conversation: Conversation, **changes: Any) -> None:
        """Change what belongs to a conversation beside its messages, and keep that and its head."""
        self._chats.note(conversation, **changes)

    def setting_of(self, conversation: Conversation, key: str) -> Any:
        """A setting as it is for a conversation: its own, or everybody's."""
        return self._prompts.setting_of(conversation, key)

    def will_leave_out(self, typed: str = "") -> int:
        """Messages of the chat in sight that the next prompt leaves out and the last one did not."""
        return self._prompts.will_leave_out(self.conversation, typed)

    async def inspect(self, answer: str) -> AsyncGenerator[Progress | Inspection, None]:
        """Let the model that wrote an answer of the chat in sight read it again, token by token.

        Raises:
            ClientError: another model is loaded, or it can't be done.
        """
        from runtime.wire.inspection import InspectRequest, Said

        message, model = self.conversation[answer], self.status.model if self.status is not None else None
        if not self.ready or model is None:
            raise ClientError("no model is loaded")
        if message.model not in (None, model):
            raise ClientError(f"{message.model} wrote it, and {model} is loaded; F2 loads the other one")
        before = [Said(**said) for said in self._prompts.read_before(self.conversation, answer)]
        request = InspectRequest(model=model, messages=before, answer=message.text)
        async with contextlib.aclosing(self._connection.require().inspect(request)) as reports:
            async for report in reports:
                yield report

    async def _answer_ended(self, _writing: Writing) -> None:
        if self._connection.client is not None:
            await self.refresh()
