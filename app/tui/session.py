"""The work behind the screens: one runtime, one conversation, one answer at a time. Knows no widgets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from textual.message import Message as Event

from app.conversation import Conversation, Message, State, prompt_of
from app.errors import ClientError
from app.settings import Settings
from app.tui.figures import tuning_title
from app.tui.jobs import Job
from app.tui.kept import KeptChats
from app.tui.messages import ChatEnded, JobChanged, RuntimeLost, StatusChanged
from app.tui.recent import Recent
from app.tui.runtime import ClientLike, SupervisorLike
from app.tui.tally import Tally, reported, tallied
from app.tui.work import Work
from runtime.compensation import of_settings

if TYPE_CHECKING:
    from app.history.store import Chat
    from app.protocol import ChatDelta
    from models.progress import Progress
    from runtime.problem import Problem
    from runtime.wire.answers import Caches, Holding, ModelEntry, Status
    from runtime.wire.device import DeviceReport
    from runtime.wire.requests import QuantizeRequest

CHECK_TIMEOUT_S = 5.0
"""A runtime that does not tell its status in this time, after a failure, counts as gone."""
FORGET_TIMEOUT_S = 3.0
"""Whoever quits does not wait longer for the runtime to forget the chat."""
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "max_tokens")


class Session:
    """Connects the runtime and the conversation, and says what happens as events."""

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
        self.conversation = Conversation() if conversation is None else conversation
        self.conversation.on_change = self._keep
        self.kept = kept
        self.status: Status | None = None
        self._last_status: Status | None = None
        self.problem: str | None = None
        """Why there is no runtime or no model, when that is a failure."""
        self.wanted: str | None = settings.model
        """The model that is loaded, or is to be."""
        self.recent = Recent()
        self.context_used: int | None = None
        self._make_supervisor = supervisor
        self._supervisor: SupervisorLike | None = None
        self._client: ClientLike | None = None
        self._post = post
        self._clock = clock
        self._work = Work(lambda job: post(JobChanged(job)), clock)
        self._tuned_by: object = None
        self._reader: asyncio.Task[str | None] | None = None
        self._stopping = False
        self._recovering = False
        self._settled = asyncio.Event()
        self._tally = Tally(started=0.0)
        self._ended: list[str] = []  # conversations that the runtime has still to forget

    # The runtime

    @property
    def ready(self) -> bool:
        """Whether a model is loaded and can answer."""
        return self._client is not None and self.status is not None and self.status.state in ("ready", "generating")

    @property
    def tally(self) -> Tally:
        """The answer that is being written, as counted so far."""
        return self._tally

    @property
    def generating(self) -> bool:
        """Whether an answer is being written."""
        return self._reader is not None

    async def start(self) -> None:
        """Start the runtime, or find one, and load the model that the settings name or that runs already."""
        await self._connect(restart=False)

    async def recover(self) -> None:
        """Start the runtime anew after it was lost, and load the same model again."""
        if not self._recovering:
            self._recovering = True
            try:
                await self._connect(restart=True)
            finally:
                self._recovering = False

    async def _connect(self, *, restart: bool) -> None:
        self.problem = None
        self._settled.clear()
        self._show(None)
        try:
            if self._supervisor is None:
                self._supervisor = self._make_supervisor()
            self._client = await (self._supervisor.restart() if restart else self._supervisor.ensure())
            status = await self._client.status()
        except (ClientError, OSError) as error:
            self.problem = str(error)
            self._settled.set()
            self._show(None)
            return
        self._show(status)
        running = status.model if status.state in ("ready", "generating") else None
        self.wanted = self.wanted or running or await self._only_model()
        if self.wanted and self.wanted != running:
            await self._load(self.wanted)
        self._settled.set()
        with contextlib.suppress(ClientError, OSError):
            await self.forget_ended()

    async def _only_model(self) -> str | None:
        """The model to begin with where nothing was picked yet and there is no choice."""
        try:
            names = [model.name for model in await self.models()]
        except (ClientError, OSError):
            return None
        return names[0] if len(names) == 1 else None

    async def close(self) -> None:
        """Stop what runs and end what was started; the chat ends with it. Safe to call twice."""
        await self.stop()
        await self.stop_work()
        self.end_chat()
        with contextlib.suppress(ClientError, OSError, TimeoutError):
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await self.forget_ended()
        supervisor, self._supervisor, self._client = self._supervisor, None, None
        try:
            if self.kept is not None:
                await self.kept.close()
        finally:
            if supervisor is not None:
                await supervisor.close()

    # What is kept of chats

    @property
    def keeps(self) -> bool:
        """Whether what is said is kept for later."""
        return self.kept is not None and self.settings.history == "on"

    def _keep(self, message: Message) -> None:
        if self.kept is not None and self.keeps:
            self.kept.record(self.conversation, message)

    async def open_chat(self, chat: Chat) -> None:
        """Go on with a chat that is kept, in the place of the present one.

        Raises:
            HistoryError: it can't be read.
        """
        if self.kept is None or chat.id == self.conversation.id:
            return
        messages = await self.kept.messages(chat.id)
        await self.stop()
        self.end_chat()
        self.conversation.restore(chat.id, messages, chat.head)

    async def delete_chat(self, chat: str) -> None:
        """Delete a chat that is kept; what the runtime keeps of it goes at once, the chat itself can be had back.

        Raises:
            HistoryError: it can't be deleted.
        """
        if self.kept is None:
            return
        await self.kept.delete(chat)
        if chat == self.conversation.id:
            await self.stop()
            self.conversation.clear()
            self.context_used = None
            self._post(ChatEnded())
        self._ended.append(chat)
        with contextlib.suppress(ClientError, OSError):
            await self.forget_ended()

    def end_chat(self) -> None:
        """End the conversation and begin another. Where none is kept, nobody can open it any more: `forget_ended`."""
        if len(self.conversation) and not self.keeps:
            self._ended.append(self.conversation.id)
        self.conversation.clear()
        self.context_used = None

    async def forget_ended(self) -> None:
        """Let the runtime delete what it keeps of conversations that ended; where it is not there, it is asked later.

        Raises:
            ClientError: it refused; it is asked again next time.
        """
        while self._ended and (client := self._client) is not None:
            chat = self._ended[0]
            await client.forget(chat)
            if chat in self._ended:
                self._ended.remove(chat)

    async def caches(self) -> Caches:
        """What is on disk of conversations' caches, and what each kind of cache means for the loaded model.

        Raises:
            ClientError: the runtime did not say.
        """
        if self._client is None:
            raise ClientError("the runtime is not running yet")
        return await self._client.caches()

    async def forget_all(self) -> Holding:
        """Delete what memory and disk hold of all conversations, so that the next prompt is read from its beginning.

        Raises:
            ClientError: it could not be deleted.
        """
        if self._client is None:
            raise ClientError("the runtime is not running yet")
        return await self._client.forget()

    async def refresh(self) -> None:
        """Ask the runtime how it is; a runtime that does not answer is lost."""
        if not self._recovering:
            await self._ask_status()

    async def _ask_status(self) -> None:
        if self._client is None:
            return
        if (status := await self._alive()) is not None:
            self._show(status)
        elif not (self.generating or self.working):
            self._lose(self._how_it_ended())

    async def _alive(self) -> Status | None:
        client = self._client
        if client is None:
            return None
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await client.status()
        except (ClientError, OSError, TimeoutError):
            return None

    def _how_it_ended(self) -> str:
        """What became of a runtime that does not answer, in one line."""
        report = self._supervisor.crash_report() if self._supervisor is not None else None
        return (report or "").partition("\n")[0].rstrip(":") or "the runtime stopped unexpectedly"

    def _show(self, status: Status | None) -> None:
        self.status = status
        self._last_status = status or self._last_status
        if status is not None:
            self.recent.hold(status.memory_bytes)
        self._post(StatusChanged())

    def _lose(self, reason: str) -> None:
        self._client = None
        self.problem = reason
        self._settled.clear()
        self._show(None)
        self._post(RuntimeLost(reason))

    # Models

    async def models(self) -> Sequence[ModelEntry]:
        """The stored models.

        Raises:
            ClientError: the runtime did not say.
        """
        if self._client is None:
            raise ClientError("the runtime is not running yet")
        return await self._client.models()

    async def remove(self, name: str) -> None:
        """Delete a stored model.

        Raises:
            ClientError: it cannot be deleted.
        """
        if self._client is None:
            raise ClientError("the runtime is not running yet")
        await self._client.remove(name)
        if self.wanted == name:
            self.wanted = None
        await self.refresh()

    async def load(self, name: str) -> bool:
        """Load a model with the present settings.

        Returns:
            Whether it is loaded.
        """
        await self.stop()
        if self._client is None:
            self.wanted = name
            await self.recover()
            return self.ready
        self._settled.clear()
        try:
            return await self._load(name)
        finally:
            self._settled.set()

    async def _load(self, name: str) -> bool:
        if self._client is None:
            return False
        self.wanted = name
        self.problem = None
        from runtime.wire.requests import LoadRequest

        settings = self.settings
        wanted = of_settings(settings.k_chunk, settings.budget, prompt_budget=settings.prompt_budget)
        request = LoadRequest(
            model=name,
            kv=settings.kv,
            k_chunk=wanted.k_chunk,
            budget=wanted.budget_percent,
            prompt_budget=wanted.prompt_budget_percent,
            context=settings.context,
            backend=settings.backend,
        )
        loaded = await self._run(f"Loading {name}", self._client.load(request))
        if not loaded and self.job is not None:
            self.problem = self.problem or self.job.error
        await self._ask_status()
        return loaded

    async def quantize(self, request: QuantizeRequest) -> bool:
        """Make a low-bit model of a checkpoint.

        Returns:
            Whether it is there now.
        """
        if self._client is None:
            return False
        name = request.source.rstrip("/").rpartition("/")[2]
        return await self._run(f"Quantizing {name} to {request.bits:g} bits", self._client.quantize(request))

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
        await self._settled.wait()
        if self._client is None or not self.ready:
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
            done = await self._work.run(tuning_title(wanted), self._client.tune(request), self._why, message=waits)
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
        if self._client is None:
            raise ClientError(self.problem or "the runtime is not running yet")
        return await self._client.device()

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
        """Forget a job that ended."""
        self._work.dismiss()

    async def _run(self, title: str, reports: AsyncGenerator[Progress, None]) -> bool:
        return await self._work.run(title, reports, self._why)

    async def _why(self, error: Exception) -> str:
        """Why work failed: what the runtime said, or how it ended."""
        if await self._alive() is not None:
            return str(error)
        self.problem = self._how_it_ended()
        self._client = None
        self._show(None)
        return self.problem

    # Answers

    async def answer(self, answer_id: str, on_text: Callable[[str], None], *, resume: bool = False) -> Message:
        """Let the model write one answer into the conversation.

        Args:
            answer_id: the answer's message, which is empty, or is continued.
            on_text: takes every piece of text as it comes.
            resume: whether to go on from the text that is there.

        Returns:
            The message as it ended: done, stopped or failed. Failures are told in it, not raised.
        """
        self._stopping = False
        self._tally = Tally(started=self._clock())
        self.recent.begin()
        self.conversation.revise(answer_id, state="streaming", error=None, statistics=None)
        reader = self._reader = asyncio.create_task(self._read(answer_id, on_text, resume=resume))
        state: State = "failed"
        error: str | None = "something unexpected went wrong"
        try:
            error = await reader
            state = "done" if error is None else "failed"
        except asyncio.CancelledError:
            state, error = "stopped", None
            if not self._stopping:
                reader.cancel()
                raise
        finally:
            self._reader = None
            message = self.conversation.revise(answer_id, state=state, error=error)
        if message.statistics is None and self._tally.pieces:
            message = self.conversation.revise(answer_id, statistics=tallied(self._tally, self._last_status))
        if self._client is not None:
            await self.refresh()
        return message

    async def stop(self) -> None:
        """Stop the answer that is being written; what came stays."""
        if (reader := self._reader) is not None:
            self._stopping = True
            reader.cancel()
            await asyncio.wait([reader])

    async def _read(self, answer_id: str, on_text: Callable[[str], None], *, resume: bool) -> str | None:
        """Read the stream to its end; returns why it failed, or None."""
        await self._settled.wait()
        if self._client is None:
            await self.recover()
        if self._client is None or not self.ready:
            return self.problem or "no model is loaded; pick one with F2"
        from app.protocol import ChatOptions

        sampling: dict[str, Any] = {key: self.settings.get(key) for key in SAMPLING_KEYS}
        path = self.conversation.path(answer_id)
        prompt = prompt_of(path if resume else path[:-1], self.settings.system_prompt)
        chat = self.conversation.id
        stream = self._client.chat(prompt, ChatOptions(**sampling, chat=chat, continue_final=resume))
        try:
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    self._take(answer_id, delta, on_text)
        except (ClientError, OSError) as failure:
            if await self._alive() is not None:
                return str(failure)
            reason = self._how_it_ended()
            self._lose(reason)
            return f"{reason}; it is started again, and this chat is kept"
        return None

    def _take(self, answer_id: str, delta: ChatDelta, on_text: Callable[[str], None]) -> None:
        message = self.conversation[answer_id]
        if delta.text:
            now = self._clock()
            self._tally.count(now)
            self.recent.count(now)
            self.conversation.revise(answer_id, text=message.text + delta.text)
            on_text(delta.text)
        if delta.timings is not None:
            statistics = reported(delta.timings, self._last_status)
            self.context_used, self.recent.last_speed = statistics.context_used, statistics.tokens_per_s
            self.conversation.revise(answer_id, statistics=statistics)
