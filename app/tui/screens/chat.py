"""The chat screen: messages, progress and composer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import Paste, ScreenResume
from textual.screen import Screen
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import TextArea
from textual.worker import WorkerCancelled

from app.chat.answers import Continued, Event, Written
from app.chat.commands import parse
from app.chat.tools import MOST_ROUNDS, CallChanged, rounds
from app.conversation import Message
from app.errors import ClientError, CommandError, HistoryError
from app.language import _
from app.printable import printable_name
from app.tui.answers import AnswerTask
from app.tui.attaching import Attaching
from app.tui.commands import Commands
from app.tui.figures import SEPARATOR, rate
from app.tui.files import Files
from app.tui.greeting import Greeting
from app.tui.messages import AttachAsked, MessageAct, SettingChanged, Submitted, TakenBack
from app.tui.plain import plain
from app.tui.pump import Pump
from app.tui.screens.sidebar import MIN_COLUMNS, Sidebar
from app.tui.session import Session
from app.tui.widgets.composer import Composer, remembered
from app.tui.widgets.header import HeaderBar, model_line
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.message_view import MessageView
from app.tui.widgets.progress_panel import ProgressPanel
from app.tui.widgets.queue_list import QueueList
from app.tui.widgets.suggestions import Suggestion, Suggestions
from app.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from app.history.exchange import ImportedChat
    from app.history.store import Chat
    from app.tools.permissions import Answer
    from app.tui.screens.chat_dialogs import Attachment, Overflow

LIVE_INTERVAL_S = 0.5
DRAFT_S = 1.0
"""A draft is saved after a pause of this many seconds."""


class ChatScreen(Screen[None]):
    """The screen on which the program starts."""

    AUTO_FOCUS = "#composer"

    def __init__(self, session: Session) -> None:
        super().__init__(id="chat")
        self._session = session
        self._editing: str | None = None
        self._unsent = ""
        self._typing: Composer | None = None
        self._taken = ("", 0)
        self._draft: Timer | None = None
        self._writing: AnswerTask | None = None
        self._ticker: Timer | None = None
        self._greeting = Greeting(session)
        self._attaching = Attaching(self, session, lambda: self.composer, self.show_session)
        self._files = Files(Path.cwd())
        self._commands = Commands(self, session, changed=self.show_session, statistics=self.show_statistics)

    def compose(self) -> ComposeResult:
        """Header, sidebar, messages, progress, composer, keys."""
        yield HeaderBar()
        with Horizontal(id="chat-body"):
            yield Sidebar(self._session)
            with Vertical(id="chat-main"):
                yield Transcript(lambda: self._session.conversation, lambda: self._session.remote is None)
                yield ProgressPanel()
                yield QueueList()
                yield Suggestions()
                yield Composer(self._suggest)
        yield KeyLine()

    def on_mount(self) -> None:
        """Show the session's state."""
        self._ticker = self.set_interval(LIVE_INTERVAL_S, self._tick, pause=True)
        self._typing = self.composer  # on_unmount can no longer query it
        self.show_session()
        self.run_worker(self._recall_past, group="past", exit_on_error=False)  # type: ignore[arg-type]  # mypy infers Never

    @property
    def busy(self) -> bool:
        """Whether an answer is being generated in this chat."""
        return self._writing is not None or self._session.answers.of(self._session.conversation.id) is not None

    def show_session(self) -> None:
        """Update header, sidebar, progress and context meter."""
        if self.query(Sidebar):
            self.query_one(Sidebar).refill()
            self._lay_out()

    def _lay_out(self) -> None:
        """Show the session as the width allows. A sidebar that this shows fills itself."""
        if not all(self.query(part) for part in (HeaderBar, Sidebar, ProgressPanel, Composer)):
            return  # not yet, or no longer
        session = self._session
        self.query_one(HeaderBar).show(session)
        self.query_one(ProgressPanel).show(session.job)
        self.query_one(Sidebar).fold(self.app.size.width)
        self._show_context()
        self._show_queue()
        self._greeting.keep(self)
        if self._editing is None:
            self.composer.border_title = self._title()

    def on_resize(self) -> None:
        """Lay the lines out for the new width."""
        self.call_after_refresh(self._lay_out)

    async def _send(self, text: str, *, summarize: bool = False) -> None:
        """Add the prompt to the conversation and start the answer. What is left out for it may be summarized."""
        session = self._session
        conversation = session.conversation
        parent = conversation.head
        if self._editing is not None:
            parent = conversation[self._editing].parent
            self._editing = None
            self.composer.border_title = self._title()
            if self._unsent:
                self.composer.give_back(self._unsent)
        self._remember(text)
        user = conversation.add("user", text, parent=parent)
        session.note(conversation, draft="")
        await self._answer(user.id, rebuilt=self._branched(user), summarize=summarize)

    def _branched(self, message: Message) -> bool:
        """Whether a message has siblings, so that another path is shown now."""
        return len(self._session.conversation.siblings(message.id)) > 1

    async def _answer(self, prompt: str, *, rebuilt: bool, summarize: bool = False) -> None:
        """Start an answer to an existing prompt."""
        session = self._session
        # At once, so that no other one begins.
        writing = session.answer(session.conversation, prompt, summarize=summarize)
        await (self.transcript.reopen() if rebuilt else self.transcript.extend())
        if writing.conversation is session.conversation:
            self._follow(writing)

    async def regenerate(self, message_id: str | None = None) -> None:
        """Start another answer to a prompt, by default the last one. The previous answer stays as a branch."""
        conversation = self._session.conversation
        at = message_id or conversation.head
        if self.busy or at is None:
            return
        message = conversation[at]
        await self._answer(message.id if message.role == "user" else message.parent or message.id, rebuilt=True)

    async def resume(self) -> None:
        """Continue an answer that ended early."""
        conversation = self._session.conversation
        if not self.busy and conversation.head is not None:
            last = conversation[conversation.head]
            if last.resumable and last.text:
                self._follow(self._session.answers.begin(conversation, last.id, resume=True))

    @on(Submitted)
    async def send(self, event: Submitted) -> None:
        """Send a prompt, or return it to the composer if that isn't possible."""
        event.stop()
        session = self._session
        try:
            command = None if self.editing else parse(event.text)
            if command is not None and command[0].prompt is not None:
                event.text = command[0].prompt.text(command[1])
            elif command is not None:
                await self._commands.run(*command)
                self._remember(event.text)
                return
        except (CommandError, ClientError, HistoryError, OSError) as error:
            self.notify(str(error), severity="error", timeout=10)
            self.composer.give_back(event.text)
            return
        queued = session.conversation.extras.queued
        if self.busy and event.text:
            self._remember(event.text)
            session.note(session.conversation, queued=[*queued, event.text], draft="")
        elif not event.text and queued and not self.busy:
            event.text = self._unqueue(0)
        self._show_queue()
        if self.busy or not event.text:
            return
        if session.status is not None and not session.ready and not session.working and session.wanted is None:
            self.notify(_("No model is loaded; F2 picks one."), severity="warning")
            self.composer.give_back(event.text)
            return
        leaves_out = session.will_leave_out(event.text) if session.settings.overflow == "ask" else 0
        if not leaves_out:
            await self._send(event.text)
            return
        from app.tui.screens.chat_dialogs import OverflowDialog

        def decided(answer: Overflow | None) -> None:
            if answer is not None and answer != "keep":
                self.run_worker(self._overflow(answer, event.text), group="send", exit_on_error=False)

        self.composer.give_back(event.text)  # nothing is lost if the program ends before the answer
        self.app.push_screen(OverflowDialog(leaves_out), decided)

    def _unqueue(self, at: int) -> str:
        """Take a prompt out of the queue."""
        queued = [*self._session.conversation.extras.queued]
        text = queued.pop(at)
        self._session.note(self._session.conversation, queued=queued)
        return text

    @on(TakenBack)
    def take_back(self, event: TakenBack) -> None:
        """Give a queued prompt back to the composer, unless it was sent meanwhile."""
        if -1 <= event.at < len(queued := self._session.conversation.extras.queued) and queued:
            self.composer.give_back(self._unqueue(event.at))
            self._show_queue()

    def _show_queue(self) -> None:
        self.query_one(QueueList).show(self._session.conversation.extras.queued, sends=self.busy)

    async def _suggest(self, text: str) -> Sequence[Suggestion]:
        """What the text before the cursor may become."""
        return await (self._commands.suggest(text) if text.startswith("/") else self._files.suggest(text[1:]))

    @on(Suggestions.OptionSelected, "#suggestions")
    def take_suggestion(self, event: Suggestions.OptionSelected) -> None:
        """Type the suggestion that was clicked."""
        self.composer.take(self.composer.suggestions.shown[event.option_index])

    def show_statistics(self) -> None:
        """Show or hide the full statistics of the last answer."""
        answers = [view for view in self.query(MessageView) if view.message.role == "assistant"]
        if not answers:
            raise CommandError(_("there is no answer yet"))
        answers[-1].action_toggle_details()

    async def _overflow(self, answer: Overflow, text: str) -> None:
        """Proceed with a full chat as the user chose."""
        self.composer.put(self.composer.value.removeprefix(text).removeprefix("\n"))
        if answer == "new":
            await self.new_chat()
        await self._send(text, summarize=answer == "summarize")

    @property
    def unsaved(self) -> bool:
        """Whether the chat has messages that are not saved."""
        return bool(len(self._session.conversation)) and not self._session.saves

    async def new_chat(self) -> None:
        """Start a new chat. If chats are saved, an answer in the previous one continues in the background."""
        if not self._session.saves:
            await self.stop()
        if not len(self._session.conversation):
            return  # the draft stays
        self.cancel_edit()
        self.save_draft()
        self._leave()
        self._session.end_chat()
        self.run_worker(self._forget(), group="forget", exit_on_error=False)
        await self._enter()

    def _leave(self) -> None:
        """Stop following the answer on the screen."""
        self.workers.cancel_group(self, "answer")

    async def _enter(self) -> None:
        """Show the current chat, its draft, and its answer in progress."""
        self.composer.put(self._session.conversation.extras.draft)
        await self.transcript.reopen()
        self.show_session()
        self.app.refresh_bindings()
        self.composer.focus()
        if (writing := self._session.answers.of(self._session.conversation.id)) is not None:
            self._follow(writing)

    async def open_chat(self, chat: Chat | ImportedChat) -> None:
        """Open a saved chat, or one from a file."""
        if chat.id == self._session.conversation.id:
            return
        self.cancel_edit()
        self.save_draft()
        try:
            await self._session.open_chat(chat)
        except HistoryError as error:
            self.notify(str(error), severity="error")
            return
        self._leave()
        await self._enter()
        bound, status = self._session.conversation.extras.model, self._session.status
        if bound and status is not None and status.model and bound != status.model:
            told = _(
                "This chat uses {name}, which is loaded when you send a message. F2 picks another model.", name=bound
            )
            self.notify(told)

    async def _forget(self) -> None:
        try:
            await self._session.forget_ended()
        except (ClientError, OSError) as error:
            self.notify(_("The old chat's cache has not been deleted yet: {error}", error=error), severity="warning")

    async def stop(self) -> bool:
        """Stop the answer and wait for its end.

        Returns:
            Whether there was one.
        """
        if not self.busy:
            return False
        await self._session.answers.stop(self._session.conversation.id)
        while drawing := next((one for one in self.workers if one.group == "answer" and not one.is_finished), None):
            with contextlib.suppress(WorkerCancelled):  # a screen that comes back draws anew
                await drawing.wait()
        return True

    def _follow(self, writing: AnswerTask) -> None:
        """Stream an answer to the screen."""
        self._writing = writing
        self.query_one(Sidebar).refill()  # a new chat has a title now
        self.app.refresh_bindings()
        self.run_worker(self._stream(writing), group="answer", exclusive=True, exit_on_error=False)

    async def _stream(self, writing: AnswerTask) -> None:
        """Draw the events of an answer, of those that follow when it called tools, and of those to queued prompts."""
        following: AnswerTask | None = writing
        while following is not None:
            self._writing = writing = following
            async with contextlib.aclosing(writing.follow()) as events:
                while await self._stream_one(writing, writing.message, events):
                    self.show_session()
                    await self.transcript.extend()
                    self._writing = writing
            self._session.send_queued(writing)  # what was queued while the end of the answer was drawn
            if not self.query(Transcript):
                return  # the program is ending
            if writing.conversation.head != writing.message:
                await self.transcript.extend()
            self.show_session()
            following = self._session.answers.of(writing.conversation.id)

    async def _stream_one(self, writing: AnswerTask, answer: str, events: AsyncGenerator[Event, None]) -> bool:
        """Draw the events of one message. Returns whether another one follows."""
        if (view := self.transcript.view(answer)) is None:
            await self.transcript.reopen()
            view = self.transcript.view(answer)
        assert view is not None
        assert view.body is not None
        conversation = writing.conversation
        pump = Pump(view.body, written=view.message.text, quiet=self.composer.quiet)
        pumping = asyncio.create_task(pump.run())
        if self._ticker is not None:
            self._ticker.resume()
        self.ask_next()
        try:
            view.show(conversation[answer])
            pump.write(conversation[answer].text[len(pump.text) :])
            async for event in events:
                if isinstance(event, Continued):
                    return True
                # What it brings is in the conversation already, and so may be what comes next.
                if isinstance(event, CallChanged) or (isinstance(event, Written) and event.delta.calls):
                    view.show(conversation[answer])
                pump.write(conversation[answer].text[len(pump.text) :])
            return False
        finally:
            await self._finish(writing, pump, pumping)
            view.show(conversation[answer])

    async def _finish(self, writing: AnswerTask, pump: Pump, pumping: asyncio.Task[None]) -> None:
        """Flush the remaining text, however the answer ended, unless the chat was left or the program is quitting."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            pumping.cancel()
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
        """Show the answer's progress."""
        view = self.transcript.view(self._writing.message) if self._writing else None
        if view is None:
            return
        tally = self._session.tally
        if (line := self._calls_line(view.message)) is not None:
            view.show_live(line)
        elif not self._session.ready:
            view.show_live(_("waiting for the model · Esc stops"))
        elif self._session.tuning and not tally.pieces:
            view.show_live(_("waiting for the tuning to end · Esc stops · ^T stops the tuning"))
        elif self._session.documents.busy:
            view.show_live(_("searching the documents · Esc stops"))
        elif not tally.pieces:
            view.show_live(_("reading the prompt · Esc stops"))
        else:
            tokens = _("≈ {count} tokens", count=tally.pieces)
            parts = [tokens, rate(tally.per_s) if tally.per_s else "", _("Esc stops")]
            view.show_live(SEPARATOR.join(filter(None, parts)))

    # Tools

    def _calls_line(self, message: Message) -> str | None:
        """What a call is doing, and how many rounds of calls there may be; None if nothing is called."""
        call = next((call for call in message.calls if not call.ended), None)
        if call is None or message.state != "streaming":
            return None
        session = self._session
        number = rounds(session.conversation.path(message.id))
        words = session.tools.live.get(session.conversation.id, "")
        if call.state == "asked":
            doing = _("waiting for your permission")
        else:
            doing = _("running: {words}", words=words) if words else _("running")
        return _(
            "{name} {doing} · round {number} of at most {most} · Esc stops",
            name=printable_name(call.name),
            doing=doing,
            number=number,
            most=MOST_ROUNDS,
        )

    def ask_next(self) -> None:
        """Ask whether a call may run, if one waits for that in this chat."""
        from app.tui.screens.chat_dialogs import AskDialog

        ask = self._session.tools.waiting(self._session.conversation.id)
        if ask is None or ask.stopped or ask.answer.done() or self.app.screen is not self:
            return

        def decided(answer: Answer | None) -> None:
            if answer is None:
                ask.stopped = True
                self.run_worker(self.stop(), group="stop", exit_on_error=False)
            elif not ask.answer.done():
                ask.answer.set_result(answer)

        self.show_session()
        self.app.push_screen(AskDialog(ask), decided)

    def on_screen_resume(self, event: ScreenResume) -> None:
        """Ask what could not be asked while another screen was open."""
        if not self.stack_updates:
            event.refresh_styles = False  # the first time: each widget got its styles when it was mounted
        self.call_later(self.ask_next)

    # Messages and composer

    @property
    def transcript(self) -> Transcript:
        """The messages."""
        return self.query_one(Transcript)

    @property
    def composer(self) -> Composer:
        """The composer."""
        return self.query_one(Composer)

    def edit(self, message_id: str | None = None) -> None:
        """Edit a sent prompt, by default the last one, as a new branch. The old branch stays."""
        prompts = [message for message in self._session.conversation.path() if message.role == "user"]
        wanted = [message for message in prompts if message.id == message_id] or prompts[-1:]
        if not wanted or self.busy:
            return
        if self._editing is None:
            self._unsent = self.composer.value
        self._editing = wanted[0].id
        self.composer.put(wanted[0].text)
        self.composer.border_title = _("editing a sent prompt · Esc cancels")
        self.composer.focus()

    @property
    def editing(self) -> bool:
        """Whether a sent prompt is being edited."""
        return self._editing is not None

    def cancel_edit(self) -> bool:
        """Cancel the edit of a sent prompt.

        Returns:
            Whether one was being edited.
        """
        if self._editing is None:
            return False
        self._editing = None
        self.composer.border_title = self._title()
        self.composer.put(self._unsent)
        return True

    def _reset_focus(self, widget: Widget, avoiding: list[Widget] | None = None) -> None:
        """Focus the composer when the focused widget goes, so that there is always somewhere to type."""
        composer = self._typing
        if self.focused is widget and composer is not None and composer.focusable and widget is not composer:
            self.set_focus(composer)
        else:
            super()._reset_focus(widget, avoiding)

    def on_paste(self, event: Paste) -> None:
        """Take what was pasted where nothing can be typed."""
        if event.is_forwarded:
            event.stop()
            self.composer.focus()
            self.composer.post_message(Paste(event.text))

    @on(MessageAct)
    async def act(self, event: MessageAct) -> None:
        """Run an action on one message."""
        event.stop()
        conversation = self._session.conversation
        if event.message not in conversation:
            return
        message = conversation[event.message]
        if event.act == "copy":
            self.app.copy_to_clipboard(message.text)
            self.notify(_("Message copied."), timeout=2)
        elif event.act in ("copy_code", "open"):
            self._take_next(message, event.act)
        elif event.act == "edit":
            self.edit(message.id if message.role == "user" else message.parent)
        elif event.act == "inspect":
            self.inspect(message)
        elif event.act == "regenerate":
            await self.regenerate(message.id)
        elif event.act in ("before", "after") and not self.busy:
            await self._walk(message, -1 if event.act == "before" else 1)

    async def _walk(self, message: Message, step: int) -> None:
        """Show the next or previous branch at a message."""
        conversation = self._session.conversation
        at = [one.id for one in conversation.path()].index(message.id)
        if not conversation.walk(message.id, step):
            return
        self._session.note(conversation)
        await self.transcript.reopen()
        self.show_session()
        if (view := self.transcript.view(conversation.path()[at].id)) is not None:
            view.focus()

    def inspect(self, message: Message | None = None) -> None:
        """Inspect the tokens of an answer, by default the last one."""
        answers = [one for one in self._session.conversation.path() if one.role == "assistant" and one.text]
        wanted = message or (answers[-1] if answers else None)
        if (remote := self._session.remote) is not None:
            self.notify(
                _("Answers come from {remote}, which does not report token probabilities.", remote=remote),
                severity="warning",
            )
        elif wanted is None or wanted.role != "assistant" or not wanted.text:
            self.notify(_("There is no answer to inspect."), severity="warning")
        elif wanted.state == "streaming":
            self.notify(_("The answer is still being written."), severity="warning")
        else:
            from app.tui.screens.inspector import InspectorScreen

            self.app.push_screen(InspectorScreen(self._session, wanted))

    def _take_next(self, message: Message, act: str) -> None:
        """Copy a code block of a message, or open a link; the next one at each call."""
        view = self.transcript.view(message.id)
        copies, body = act == "copy_code", None if view is None else view.body
        found = [] if body is None else body.code_blocks if copies else body.links
        if not found:
            none = _("There is no code in this message.") if copies else _("There is no link in this message.")
            self.notify(none, severity="warning")
            return
        before, at = self._taken
        at = (at + 1) % len(found) if before == f"{act} {message.id}" else 0
        self._taken = (f"{act} {message.id}", at)
        if copies:
            self.app.copy_to_clipboard(found[at])
            self.notify(_("Copied code block {at} of {count}.", at=at + 1, count=len(found)), timeout=2)
        else:
            self.app.open_url(found[at])
            self.notify(
                _("Opened link {at} of {count}: {link}", at=at + 1, count=len(found), link=found[at]), timeout=4
            )

    def toggle_sidebar(self) -> bool:
        """Show and focus the sidebar, or hide it if it has the focus. Returns whether there is room for it."""
        if self.app.size.width < MIN_COLUMNS:
            return False
        sidebar = self.query_one(Sidebar)
        wanted = "off" if sidebar.display and sidebar.has_focus_within else "on"
        self._session.settings = self._session.settings.changed({"sidebar": wanted})
        self.post_message(SettingChanged("sidebar", wanted))  # remembered for the next start
        sidebar.fold(self.app.size.width)
        if sidebar.display:
            sidebar.action_search()
        else:
            self.composer.focus()
        return True

    def action_to_messages(self) -> None:
        """Focus the last message."""
        if views := list(self.query(MessageView)):
            views[-1].focus()

    def action_to_composer(self) -> None:
        """Focus the composer."""
        self.composer.focus()

    def action_step(self, step: int) -> None:
        """Focus the message above or below; below the last one is the composer."""
        views = list(self.query(MessageView))
        if not isinstance(self.focused, MessageView) or self.focused not in views:
            return
        at = views.index(self.focused) + step
        if at >= len(views):
            self.composer.focus()
        elif at >= 0:
            views[at].focus()

    def attach(self) -> None:
        """Ask for a file or folder to attach, or a source to search no longer."""

        def take(found: Attachment | None) -> None:
            self.composer.focus()
            if found is not None and found.remove:
                self._run_attaching(self._attaching.remove(found.path))
            elif found is not None:
                self._run_attaching(self._attaching.attach(found.path))

        from app.tui.screens.chat_dialogs import AttachDialog

        self.app.push_screen(AttachDialog(self._session.conversation.extras.sources, Path.cwd()), take)

    @on(AttachAsked)
    def attach_dropped(self, event: AttachAsked) -> None:
        """Attach a file whose path was dropped on the terminal."""
        event.stop()
        self._run_attaching(self._attaching.attach(event.path, typed=event.typed))

    @property
    def attaching(self) -> bool:
        """Whether a document is being read."""
        return self._attaching.reading

    def stop_attaching(self) -> bool:
        """Stop reading a document. Returns whether one was being read."""
        reading = self.attaching
        self.workers.cancel_group(self, "attach")
        return reading

    def _run_attaching(self, work: Coroutine[None, None, None]) -> None:
        self.run_worker(work, group="attach", exit_on_error=False)

    def settings_of_chat(self) -> None:
        """Ask for this chat's own system prompt and sampling."""
        from app.tui.screens.chat_dialogs import ask_for_chat_settings

        ask_for_chat_settings(self.app, self._session, self.show_session)

    def _title(self) -> Content:
        """The composer's title: the model, where there is no header, the chat's own system prompt, its documents."""
        own = self._session.conversation.extras.settings
        parts = [model_line(self._session)] if self.has_class("-slim") else []
        if own.get("system_prompt"):
            parts.append(str(own.get("preset") or _("custom system prompt")))
        if documents := self._attaching.status:
            parts.append(documents)
        if made := self._session.made:
            parts.append(_("{name} is ready: ^N", name=made))
        return plain(SEPARATOR.join(parts))

    def choose_preset(self) -> None:
        """Ask for a system prompt preset for this chat."""
        from app.tui.screens.presets import ask_for_chat_preset

        ask_for_chat_preset(self.app, self._session, self.show_session)

    # Drafts

    @on(TextArea.Changed, "#composer")
    def keep_draft(self) -> None:
        """Keep the draft: at once in its chat, soon on disk."""
        if self._editing is None:
            extras = self._session.conversation.extras
            self._session.conversation.extras = replace(extras, draft=self.composer.value)
        if self._draft is not None:
            self._draft.stop()
        self._draft = self.set_timer(DRAFT_S, self.save_draft)

    def save_draft(self) -> None:
        """Save the draft with its chat, so that it is restored when the chat is opened."""
        typed = self._unsent if self._editing is not None else self.composer.value
        self._session.note(self._session.conversation, draft=typed)
        self._show_context()

    def on_unmount(self) -> None:
        """Save the draft however the program ends; the message of its last change may not have arrived."""
        conversation = self._session.conversation
        if self._typing is not None and self._editing is None and self._typing.value != conversation.extras.draft:
            self._session.note(conversation, draft=self._typing.value)

    def _remember(self, text: str) -> None:
        self.composer.past = remembered(self.composer.past, text)

    async def _recall_past(self) -> None:
        history = self._session.history
        if history is not None and self._session.saves:
            with contextlib.suppress(HistoryError):
                self.composer.past = [*await history.prompts(), *self.composer.past]

    def _show_context(self) -> None:
        session = self._session
        context = session.status.context if session.status else None
        self.composer.show_context(session.context_used, context, session.will_leave_out(self.composer.value))
