"""The session: open chats and their answers, over a runtime and its model. Independent of widgets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from textual.message import Message as Event

from app.chat.documents import Documents
from app.chat.prompts import Prompts, rate_of
from app.chat.tally import Tally
from app.chat.tools import ChatTools
from app.conversation import Conversation
from app.errors import ClientError, NotReadyError
from app.language import _
from app.settings import Settings
from app.tui.answers import Answers, AnswerTask, Recent
from app.tui.background_history import BackgroundHistory
from app.tui.connection import Connection
from app.tui.figures import tuning_title
from app.tui.jobs import STAGES, Job, Work
from app.tui.messages import ChatEnded, JobChanged, RuntimeLost, StatusChanged, ToolsChanged, WithoutEffect
from app.tui.model_setup import ModelSetup, forget, title_of, unfinished
from app.tui.open_chats import OpenChats
from app.tui.runtime import ClientLike, SupervisorLike

if TYPE_CHECKING:
    from app.history.exchange import ImportedChat
    from app.history.store import Chat
    from models.progress import Progress
    from runtime.wire.answers import Status
    from runtime.wire.requests import Inspection, QuantizeRequest

FORGET_TIMEOUT_S = 3.0
"""Quitting waits at most this long for the runtime to delete the chat's caches."""


class Session:
    """Connects the runtime and the chats, and posts events about both."""

    def __init__(
        self,
        supervisor: Callable[[], SupervisorLike],
        settings: Settings,
        post: Callable[[Event], object],
        *,
        conversation: Conversation | None = None,
        history: BackgroundHistory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a session without starting anything.

        Args:
            supervisor: makes the supervisor; called when the runtime is started, not before.
            settings: the initial settings.
            post: receives the events, on the event loop's thread.
            conversation: the conversation; a new one by default.
            history: where conversations are saved; without one they end with the program.
            clock: returns seconds, for speeds.
        """
        self.settings = settings
        self._wanted: dict[str | None, str | None] = {None: settings.model}  # by endpoint
        self.newcomer = False
        """Whether the user never picked a model and has only the bundled ones."""
        self.made: str | None = None
        """A model that was made during a chat with another one; the next new chat uses it."""
        self.recent = Recent()
        self._post = post
        self._connection = Connection(supervisor, self._status_changed, lambda reason: post(RuntimeLost(reason)))
        self._work = Work(lambda job: post(JobChanged(job)), clock)
        self._tuned_by: object = None
        self._recovering = False
        self._connecting = asyncio.Lock()
        self._measured: tuple[str | None, str | None] | None = None  # the server and model that `recent` is about
        self.documents = Documents(history.path if history is not None else None, lambda: self.saves)
        self.tools = ChatTools(self.note, changed=lambda: post(ToolsChanged()))
        """Servers of tools, and what chats may do with them."""
        self._prompts = Prompts(self, self.documents, self.tools)
        self.answers = Answers(
            self, self._prompts, self.tools, self.recent, post, self.send_queued, self._answer_ended, clock
        )
        self._chats = OpenChats(
            Conversation() if conversation is None else conversation,
            history=history,
            enabled=lambda: self.settings.history == "on",
            connection=self._connection,
            answers=self.answers,
        )

    async def close(self) -> None:
        """Stop all work and the runtime that was started. Unsaved chats are lost. Safe to call twice."""
        await self.answers.stop()
        await self.stop_work()
        await self.tools.close()
        await self.documents.close()
        self.note(self.conversation)
        self._chats.begin()
        with contextlib.suppress(ClientError, OSError, TimeoutError):
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await self.forget_ended()
        try:
            if self.history is not None:
                await self.history.close()
        finally:
            await self._connection.close()

    async def switch(self) -> None:
        """Switch to the server that the settings now name; answers and jobs of the previous one are stopped."""
        await self.answers.stop()
        await self.stop_work()
        async with self._connecting:  # what is being started may finish, and is closed then
            await self._connection.close()
            await self._connect(restart=False)

    async def wake(self) -> None:
        """Restart a runtime on a graphics card after a suspend, because drivers lose its memory."""
        status = self.status
        if status is not None and status.backend in ("triton", "shared") and not self._recovering:
            await self.answers.stop()
            await self.recover()

    # The runtime

    @property
    def wanted(self) -> str | None:
        """The model that is loaded or will be, on the server in use."""
        return self._wanted.get(self.remote)

    @wanted.setter
    def wanted(self, name: str | None) -> None:
        self._wanted[self.remote] = name

    @property
    def status(self) -> Status | None:
        """The runtime's status; None while there is none."""
        return self._connection.status

    @property
    def problem(self) -> str | None:
        """The failure because of which there is no runtime or no model."""
        return self._connection.problem

    @property
    def ready(self) -> bool:
        """Whether a model is loaded and can answer."""
        return self._connection.ready

    async def start(self) -> None:
        """Find or start the runtime, and load the model from the settings unless one is running."""
        async with self._connecting:
            await self._connect(restart=False)
        if (request := unfinished()) is not None:
            self._work.recall(Job(title=title_of(request), stages=STAGES, outcome="stopped"))
        await self.tools.open()

    async def recover(self) -> None:
        """Restart the runtime after it was lost, and load the same model again."""
        if not self._recovering:
            self._recovering = True
            lost = self._connection.client
            try:
                async with self._connecting:
                    if self._connection.client is lost:  # otherwise it was connected while this waited
                        await self._connect(restart=True)
            finally:
                self._recovering = False

    async def _connect(self, *, restart: bool) -> None:
        server = self.remote
        status = await self._connection.open(restart=restart)
        if status is not None and self.remote == server:  # otherwise another server is connected next
            running = status.model if status.state in ("ready", "generating") else None
            self.wanted = self.wanted or running or await self._only_model()
            if self.wanted and self.wanted != running:
                await self._load(self.wanted)
        self._connection.settled.set()
        with contextlib.suppress(ClientError, OSError):
            await self.forget_ended()

    async def _only_model(self) -> str | None:
        """The user's only model, or the bundled one of a user who has none; None if there are several to pick from."""
        try:
            models = await self.client().models()
        except (ClientError, OSError):
            return None
        self.newcomer = bool(models) and all(model.bundled for model in models)
        own = [model.name for model in models if not model.bundled] or [model.name for model in models]
        return own[0] if len(own) == 1 else None

    def client(self) -> ClientLike:
        """The client of the runtime.

        Raises:
            ClientError: there is no runtime.
        """
        return self._connection.require()

    @property
    def remote(self) -> str | None:
        """The address of the remote server in use; None for our own runtime."""
        return self.settings.endpoint

    async def refresh(self) -> None:
        """Poll the runtime's status. A runtime that does not answer is lost.

        A remote server is not polled while it answers: llama-cpp-python's aborts an answer on any other request.
        """
        if not self._recovering and not (self.remote is not None and self.generating):
            await self._ask_status()

    @property
    def resting(self) -> bool:
        """Whether the model was unloaded because it was idle; the next message loads it again."""
        status = self.status
        empty = status is not None and status.state == "empty"
        return empty and self.wanted is not None and self.problem is None and not self.working

    async def _ask_status(self) -> None:
        connection = self._connection
        if connection.client is not None and await connection.gone():
            self._lose()

    def watch(self) -> None:
        """Notice at once that the process of our own runtime has ended."""
        if self.remote is None and not self._recovering and self._connection.ended:
            self._lose()

    def _lose(self) -> None:
        """Report that the runtime is gone, unless an answer or a job notices it itself."""
        if self._connection.client is not None and not (self.generating or self.working):
            self._connection.lose()

    def _status_changed(self) -> None:
        if self.status is not None:
            now = (self.remote, self.status.model)
            if self.status.model is not None and self._measured != now:
                self.recent.clear()
                self._measured = now
            self.recent.hold(self.status.memory_bytes)
        self._post(StatusChanged())

    # Models

    async def remove(self, name: str) -> None:
        """Delete a stored model.

        Raises:
            ClientError: it cannot be deleted.
        """
        await self.client().remove(name)
        if self.wanted == name:
            self.wanted = None
        await self.refresh()

    async def load(self, name: str) -> bool:
        """Load a model with the current settings, and bind the chat on screen to it.

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
        loaded = await self._run(
            _("Loading {name}", name=name), connection.client.load(self.settings.load_request(name))
        )
        if not loaded and self.job is not None:
            connection.problem = connection.problem or self.job.error
        await self._ask_status()
        if loaded and self.settings.compensation().exact:
            await self._tell_without_effect()
        return loaded

    async def get(self, request: QuantizeRequest) -> ModelSetup | None:
        """Download a checkpoint if needed, quantize it, and load the result unless a chat uses another model by then.

        Returns:
            The finished job; None if there is no runtime.
        """
        client = self._connection.client
        if client is None:
            return None
        getting = ModelSetup(client, request, self._loading, self._takes_over)
        done = await self._run(getting.title, getting.reports(), stages=getting.stages)
        self.newcomer = self.newcomer and getting.made is None
        if not done and getting.made is not None and self.job is not None:
            self._connection.problem = self.job.error
        await self._ask_status()
        return getting

    async def _loading(self, name: str) -> AsyncGenerator[Progress, None]:
        """Load a model as part of another job. Messages sent in the meantime wait for it."""
        client, self.wanted = self._connection.require(), name
        self._connection.settled.clear()
        try:
            async with contextlib.aclosing(client.load(self.settings.load_request(name))) as reports:
                async for progress in reports:
                    yield progress
        finally:
            self._connection.settled.set()

    async def tune(self, *, force: bool = False) -> bool:
        """Apply the budget, or the k_chunk that overrides it, to the running model, after any other job.

        The chat stays usable; messages sent in the meantime wait for their turn in the runtime.

        Returns:
            Whether it was applied. Without a model there is nothing to do: the next load uses the settings.
        """
        from runtime.wire.requests import TuneRequest

        while self.working and not self.tuning:
            await self._work.ended()
        await self._connection.settled.wait()
        client = self._connection.client
        if client is None or not self.ready:
            return False
        waits = _("waiting for the answer to end") if self.generating else ""
        wanted = self.settings.compensation()
        request = TuneRequest(
            k_chunk=wanted.k_chunk,
            budget=wanted.budget,
            prompt_budget=wanted.prompt_budget_percent,
            force=force,
        )
        this = self._tuned_by = object()
        reloads = self.status is not None and self.status.exact != wanted.exact
        if reloads:
            self._connection.settled.clear()
        try:
            done = await self._run(tuning_title(wanted), client.tune(request), message=waits)
        finally:
            if self._tuned_by is this:  # otherwise another tuning replaced this one
                self._tuned_by = None
            await self._ask_status()
            if reloads and not self.working:
                self._connection.settled.set()
        if done:
            await self._tell_without_effect()
        return done

    async def _tell_without_effect(self) -> None:
        """Report why the budget has no effect on the running model, unless it has one or k_chunk overrides it."""
        status, wanted = self.status, self.settings.compensation().budget
        if status is not None and wanted not in (None, status.budget):
            with contextlib.suppress(ClientError, OSError):
                for problem in (await self.client().device()).problems:
                    self._post(WithoutEffect(problem))

    @property
    def tuning(self) -> bool:
        """Whether the budget is being applied to the running model."""
        return self._tuned_by is not None and self.working

    @property
    def working(self) -> bool:
        """Whether a model is being loaded, quantized or tuned."""
        return self._work.running

    @property
    def job(self) -> Job | None:
        """The running job, or the last one."""
        return self._work.job

    async def stop_work(self) -> None:
        """Stop loading, quantizing or tuning."""
        await self._work.stop()

    def dismiss_job(self) -> None:
        """Dismiss a finished job, and do not offer to resume it."""
        if self.job is not None and self.job.stages and self.job.outcome != "running":
            forget()
        self._work.dismiss()

    async def _run(
        self, title: str, reports: AsyncGenerator[Progress, None], *, message: str = "", stages: tuple[str, ...] = ()
    ) -> bool:
        return await self._work.run(title, reports, self._connection.why, message=message, stages=stages)

    def _takes_over(self) -> bool:
        """Whether to load a new model at once, because no chat is using another one."""
        return not len(self.conversation) and not self.generating

    # Chats

    @property
    def conversation(self) -> Conversation:
        """The conversation on screen."""
        return self._chats.conversation

    @property
    def history(self) -> BackgroundHistory | None:
        """Where conversations are saved."""
        return self._chats.history

    @property
    def saves(self) -> bool:
        """Whether conversations are saved."""
        return self._chats.saves

    async def open_chat(self, chat: Chat | ImportedChat) -> None:
        """Open a saved chat, or one from a file, in place of the present one, whose answer continues in the background.

        Raises:
            HistoryError: it can't be read.
        """
        await self._chats.open(chat)

    async def delete_chat(self, chat: str) -> None:
        """Delete a saved chat. Its caches go at once; the chat itself can be restored.

        Raises:
            HistoryError: it can't be deleted.
        """
        if await self._chats.delete(chat):
            self._post(ChatEnded())

    def end_chat(self) -> None:
        """Start a new conversation. If this one is not saved, it can't be opened again: see `forget_ended`."""
        self._chats.begin()

    async def forget_ended(self) -> None:
        """Forget documents of ended conversations, and have the runtime delete their caches, later if there is none.

        Raises:
            ClientError: it refused; the next call tries again.
        """
        if not self.saves and not self.conversation.extras.sources:
            await self.documents.forget_unsaved()
        await self._chats.forget_ended()

    # Answers

    @property
    def generating(self) -> bool:
        """Whether an answer is being generated in any chat."""
        return self.answers.any

    @property
    def tally(self) -> Tally:
        """The count so far of the answer that is being generated in the chat on screen."""
        writing = self.answers.of(self.conversation.id)
        return Tally(started=0.0) if writing is None else writing.tally

    @property
    def context_used(self) -> int | None:
        """Tokens of the chat on screen, as the runtime last counted them, and an estimate of later results of tools."""
        path = self.conversation.path()
        for message in reversed(path):
            if message.statistics is not None and message.statistics.context_used is not None:
                results = sum(len(call.result) for call in message.calls)
                fixed = len(str(self.setting_of(self.conversation, "system_prompt")))
                rate = rate_of(path, fixed + self.tools.size(self.conversation))
                return message.statistics.context_used + round(results * rate)
        return None

    async def model_for(self, conversation: Conversation) -> ClientLike:
        """Wait until the model of a conversation can answer; load it where it is not.

        Raises:
            NotReadyError: it can't.
        """
        await self._connection.settled.wait()
        if self._connection.client is None:
            await self.recover()
        bound, status = conversation.extras.model, self.status
        if bound is not None and status is not None and status.model != bound and not self.working:
            if not await self._load(bound):
                reason = self.problem or _("{name} is not loaded", name=bound)
                raise NotReadyError(_("{reason}; F2 picks another model for this chat", reason=reason))
        elif self.resting and self.wanted is not None:
            await self._load(self.wanted)
        if self._connection.client is None or not self.ready:
            raise NotReadyError(self.problem or _("no model is loaded; pick one with F2"))
        if bound is None and self.status is not None and self.status.model is not None:
            self.note(conversation, model=self.status.model)
        return self._connection.client

    async def why(self, failure: Exception) -> str:
        """Why an answer failed. A runtime that is gone is reported."""
        if not await self._connection.gone():
            return str(failure)
        return _("{reason}; this chat is safe", reason=self._connection.lose())

    def note(self, conversation: Conversation, **changes: Any) -> None:
        """Change a conversation's `Extras`, and save them with its head."""
        self._chats.note(conversation, **changes)

    def setting_of(self, conversation: Conversation, key: str) -> Any:
        """A conversation's value of a setting: its own, or the general one."""
        return self._prompts.setting_of(conversation, key)

    def will_leave_out(self, typed: str = "") -> int:
        """Number of messages of the chat on screen that the next prompt leaves out and the last one did not."""
        return self._prompts.will_leave_out(self.conversation, typed)

    async def inspect(self, answer: str) -> AsyncGenerator[Progress | Inspection, None]:
        """Have the model read its answer in the chat on screen again, token by token.

        Raises:
            ClientError: another model is loaded, or the runtime can't do it.
        """
        from runtime.wire.requests import InspectedMessage, InspectRequest

        message, model = self.conversation[answer], self.status.model if self.status is not None else None
        if not self.ready or model is None:
            raise ClientError(_("no model is loaded"))
        if message.model not in (None, model):
            raise ClientError(
                _(
                    "{name} wrote this answer, but {loaded} is loaded; load {name} with F2",
                    name=message.model,
                    loaded=model,
                )
            )
        read = self._prompts.read_before(self.conversation, answer)
        if any(said["role"] == "tool" for said in read):
            raise ClientError(_("the tokens of an answer can't be inspected after tools were called"))
        before = [InspectedMessage(**said) for said in read]
        request = InspectRequest(model=model, messages=before, answer=message.text)
        async with contextlib.aclosing(self._connection.require().inspect(request)) as reports:
            async for report in reports:
                yield report

    def answer(self, conversation: Conversation, prompt: str, *, summarize: bool = False) -> AnswerTask:
        """Start an answer to a prompt, by its id. What is left out for it may be summarized."""
        model = conversation.extras.model or self.wanted
        answer = conversation.add("assistant", "", parent=prompt, state="streaming", model=model)
        return self.answers.begin(conversation, answer.id, summarize=summarize)

    def send_queued(self, before: AnswerTask) -> None:
        """Send the next queued prompt after a complete answer, unless the user is to be asked about a full chat."""
        conversation = before.conversation
        queued = conversation.extras.queued
        complete = conversation.head == before.message and conversation[before.message].state == "done"
        if not queued or not complete or self.answers.of(conversation.id) is not None:
            return
        if self.settings.overflow != "ask" or not self._prompts.will_leave_out(conversation, queued[0]):
            prompt = conversation.add("user", queued[0], parent=conversation.head)
            self.note(conversation, queued=queued[1:])
            self.answer(conversation, prompt.id)

    async def _answer_ended(self) -> None:
        if self._connection.client is not None:
            await self.refresh()
