"""The chat: what was said, what is being done, and where to write."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.timer import Timer
from textual.widgets import Footer

from app.conversation import Message
from app.errors import ClientError, HistoryError
from app.tui.answers import Writing
from app.tui.greeting import Greeting
from app.tui.messages import Submitted
from app.tui.pump import Pump
from app.tui.screens.sidebar import Sidebar
from app.tui.screens.written import WrittenScreen
from app.tui.session import Session
from app.tui.widgets.composer import Composer
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.progress_panel import ProgressPanel
from app.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from app.history.store import Chat
    from app.tui.screens.chat_dialogs import Overflow

LIVE_INTERVAL_S = 0.5


class ChatScreen(WrittenScreen):
    """The screen the program begins with."""

    AUTO_FOCUS = "#composer"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._writing: Writing | None = None
        self._ticker: Timer | None = None
        self._greeting = Greeting(session)

    def compose(self) -> ComposeResult:
        """Header, the other chats, messages, progress, composer, keys."""
        yield HeaderBar()
        with Horizontal(id="chat-body"):
            yield Sidebar(self._session)
            with Vertical(id="chat-main"):
                yield Transcript(lambda: self._session.conversation, lambda: self._session.remote is None)
                yield ProgressPanel()
                yield Composer()
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Show what the session is doing."""
        self._ticker = self.set_interval(LIVE_INTERVAL_S, self._tick, pause=True)
        self.show_session()
        self.run_worker(self._recall_past(), group="past", exit_on_error=False)

    @property
    def busy(self) -> bool:
        """Whether an answer is on its way to the screen."""
        return self._writing is not None or self._session.answers.of(self._session.conversation.id) is not None

    def show_session(self) -> None:
        """Bring header, progress and context meter up to date."""
        if not self.query(Composer):
            return
        session = self._session
        self.query_one(HeaderBar).show(session)
        self.query_one(ProgressPanel).show(session.job)
        self.query_one(Sidebar).fold(self.app.size.width)
        self._show_context()
        self._greeting.keep(self)
        if self._editing is None:
            self.composer.border_title = self._title()

    def on_resize(self) -> None:
        """Let the lines use the new width."""
        self.call_after_refresh(self.show_session)

    async def _send(self, text: str) -> None:
        """Put the prompt into the conversation and let the model answer."""
        session = self._session
        conversation = session.conversation
        parent = conversation.head
        if self._editing is not None:
            parent = conversation[self._editing].parent
            self.cancel_edit()
        self._remember(text)
        user = conversation.add("user", text, parent=parent)
        session.note(conversation, draft="")
        await self._answer(user.id, rebuilt=self._branched(user))

    def _branched(self, message: Message) -> bool:
        """Whether a message stands beside others, so that another path is shown now."""
        return len(self._session.conversation.siblings(message.id)) > 1

    async def _answer(self, prompt: str, *, rebuilt: bool) -> None:
        """Let the model answer a prompt that is there."""
        session = self._session
        model = session.conversation.extras.model or session.wanted
        answer = session.conversation.add("assistant", "", parent=prompt, state="streaming", model=model)
        await (self.transcript.reopen() if rebuilt else self.transcript.extend())
        self._write(answer)

    async def regenerate(self, message_id: str | None = None) -> None:
        """Ask for another answer to a prompt, by default the last; the one before stays beside it."""
        conversation = self._session.conversation
        at = message_id or conversation.head
        if self.busy or at is None:
            return
        message = conversation[at]
        await self._answer(message.id if message.role == "user" else message.parent or message.id, rebuilt=True)

    async def resume(self) -> None:
        """Go on with an answer that ended early."""
        conversation = self._session.conversation
        if not self.busy and conversation.head is not None:
            last = conversation[conversation.head]
            if last.resumable and last.text:
                self._write(last, resume=True)

    @on(Submitted)
    async def send(self, event: Submitted) -> None:
        """Send a prompt, or give it back where that can't be."""
        event.stop()
        session = self._session
        if self.busy:
            self.notify("An answer is being written; Esc stops it.", severity="warning")
            self.composer.give_back(event.text)
            return
        if session.status is not None and not session.ready and not session.working and session.wanted is None:
            self.notify("No model is loaded; F2 picks one.", severity="warning")
            self.composer.give_back(event.text)
            return
        leaves_out = session.will_leave_out(event.text) if session.settings.overflow == "ask" else 0
        if not leaves_out:
            await self._send(event.text)
            return
        from app.tui.screens.chat_dialogs import OverflowDialog

        def decided(answer: Overflow | None) -> None:
            self.run_worker(self._overflow(answer or "keep", event.text), group="send", exit_on_error=False)

        self.app.push_screen(OverflowDialog(leaves_out), decided)

    async def _overflow(self, answer: Overflow, text: str) -> None:
        """Go on as the person chose for a chat that is full."""
        if answer == "keep":
            self.composer.give_back(text)
            return
        if answer == "new":
            await self.new_chat()
        self._session.summarizes = answer == "summarize"
        await self._send(text)

    @property
    def losable(self) -> bool:
        """Whether what was said here would be lost with the chat."""
        return bool(len(self._session.conversation)) and not self._session.keeps

    async def new_chat(self) -> None:
        """Begin anew. An answer that is being written goes on where chats are kept, and can be looked at there."""
        if not self._session.keeps:
            await self.stop()
        if not len(self._session.conversation):
            return  # what is typed stays
        self.cancel_edit()
        self.save_draft()
        self._leave()
        self._session.end_chat()
        self.run_worker(self._forget(), group="forget", exit_on_error=False)
        await self._enter()

    def _leave(self) -> None:
        """Look away from the answer that is being written."""
        self.workers.cancel_group(self, "answer")

    async def _enter(self) -> None:
        """Show the chat in sight, its draft, and the answer that is being written in it."""
        self.composer.put(self._session.conversation.extras.draft)
        await self.transcript.reopen()
        self.show_session()
        self.app.refresh_bindings()
        self.composer.focus()
        if (writing := self._session.answers.of(self._session.conversation.id)) is not None:
            self._follow(writing)

    async def open_chat(self, chat: Chat) -> None:
        """Go on with a chat that is kept."""
        if chat.id == self._session.conversation.id:
            return
        self.cancel_edit()
        self.save_draft()
        try:
            await self._session.open_chat(chat)
        except HistoryError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self._leave()
        await self._enter()
        bound, status = self._session.conversation.extras.model, self._session.status
        if bound and status is not None and status.model and bound != status.model:
            told = f"{bound} answers here: it is loaded when you send something. F2 gives the chat to another model."
            self.notify(told, markup=False)

    async def _forget(self) -> None:
        try:
            await self._session.forget_ended()
        except (ClientError, OSError) as error:
            self.notify(f"The old chat's cache is not deleted yet: {error}", severity="warning", markup=False)

    async def stop(self) -> bool:
        """Stop the answer that is being written, and wait for its end.

        Returns:
            Whether there was one.
        """
        if not self.busy:
            return False
        await self._session.answers.stop(self._session.conversation.id)
        await self.workers.wait_for_complete([worker for worker in self.workers if worker.group == "answer"])
        return True

    def _write(self, answer: Message, *, resume: bool = False) -> None:
        session = self._session
        self._follow(session.answers.begin(session.conversation, answer.id, resume=resume))

    def _follow(self, writing: Writing) -> None:
        """Bring an answer to the screen while it is written."""
        self._writing = writing
        self.app.refresh_bindings()
        self.run_worker(self._stream(writing), group="answer", exclusive=True, exit_on_error=False)

    async def _stream(self, writing: Writing) -> None:
        if (view := self.transcript.view(writing.answer)) is None:
            await self.transcript.reopen()
            view = self.transcript.view(writing.answer)
        assert view is not None
        assert view.body is not None
        assert writing.task is not None
        conversation = writing.conversation
        shown = view.message.text
        pump = Pump(view.body, written=shown)
        pump.write(conversation[writing.answer].text[len(shown) :])
        writing.on_text = pump.write
        pumping = asyncio.create_task(pump.run())
        if self._ticker is not None:
            self._ticker.resume()
        try:
            view.show(conversation[writing.answer])
            await asyncio.wait([writing.task])
        finally:
            await self._finish(writing, pump, pumping)
            view.show(conversation[writing.answer])
        self.show_session()

    async def _finish(self, writing: Writing, pump: Pump, pumping: asyncio.Task[None]) -> None:
        """Flush what came, however the answer ended; only who looks away, or ends the program, does not wait for it."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            pumping.cancel()
            if writing.on_text == pump.write:
                writing.on_text = None
            if self._writing is writing:
                self._writing = None
            return
        try:
            pump.close()
            await pumping
        finally:
            self._writing = None
            if self._ticker is not None:
                self._ticker.pause()
            self.app.refresh_bindings()

    def _tick(self) -> None:
        """Say how the answer is coming along."""
        view = self.transcript.view(self._writing.answer) if self._writing else None
        if view is None:
            return
        tally = self._session.tally
        if not self._session.ready:
            view.show_live("waiting for the model · Esc stops")
        elif self._session.tuning and not tally.pieces:
            view.show_live("waits until the tuning ends · Esc stops · ^T stops the tuning")
        elif not tally.pieces:
            view.show_live("reading the prompt · Esc stops")
        else:
            speed = f" · {tally.per_s:.1f} tok/s" if tally.per_s else ""
            view.show_live(f"≈ {tally.pieces} tokens{speed} · Esc stops")
