"""What a person does with what is written: messages that were said, and what is typed for the next one."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from textual import on
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import TextArea

from app.conversation import Message
from app.errors import HistoryError
from app.tui.figures import SEPARATOR
from app.tui.messages import MessageAct, SettingChanged
from app.tui.printable import printable
from app.tui.screens.sidebar import LEAST_COLUMNS, Sidebar
from app.tui.session import Session
from app.tui.widgets.composer import Composer, remembered
from app.tui.widgets.header import model_line
from app.tui.widgets.message_view import MessageView
from app.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from app.settings import Value

DRAFT_S = 1.0
"""What is typed is kept after so long a pause."""
PROMPT_KEYS = ("preset", "system_prompt")
"""Name and text of a chat's own system prompt, among its settings."""


class WrittenScreen(Screen[None]):
    """The part of the chat screen that edits, copies, walks branches, attaches and keeps drafts; it sends nothing."""

    def __init__(self, session: Session) -> None:
        super().__init__(id="chat")
        self._session = session
        self._editing: str | None = None
        self._unsent = ""
        self._typing: Composer | None = None
        self._copied = ("", 0)
        self._draft: Timer | None = None

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether an answer is on its way to the screen."""

    @abstractmethod
    def show_session(self) -> None:
        """Bring header, progress and context meter up to date."""

    @abstractmethod
    async def regenerate(self, message_id: str | None = None) -> None:
        """Ask for another answer to a prompt."""

    @property
    def transcript(self) -> Transcript:
        """The messages."""
        return self.query_one(Transcript)

    @property
    def composer(self) -> Composer:
        """Where the person writes."""
        return self.query_one(Composer)

    def edit(self, message_id: str | None = None) -> None:
        """Write another prompt beside one that was sent, by default the last one. What was said stays."""
        prompts = [message for message in self._session.conversation.path() if message.role == "user"]
        wanted = [message for message in prompts if message.id == message_id] or prompts[-1:]
        if not wanted or self.busy:
            return
        if self._editing is None:
            self._unsent = self.composer.value
        self._editing = wanted[0].id
        self.composer.put(wanted[0].text)
        self.composer.border_title = "another prompt beside the one sent · Esc gives up"
        self.composer.focus()

    @property
    def editing(self) -> bool:
        """Whether another prompt is written beside one that was sent."""
        return self._editing is not None

    def cancel_edit(self) -> bool:
        """Give up writing another prompt.

        Returns:
            Whether one was written.
        """
        if self._editing is None:
            return False
        self._editing = None
        self.composer.border_title = self._title()
        self.composer.put(self._unsent)
        return True

    @on(MessageAct)
    async def act(self, event: MessageAct) -> None:
        """Do something with one message."""
        event.stop()
        conversation = self._session.conversation
        if event.message not in conversation:
            return
        message = conversation[event.message]
        if event.act == "copy":
            self.app.copy_to_clipboard(message.text)
            self.notify("The message is copied.", timeout=2)
        elif event.act == "copy_code":
            self._copy_code(message)
        elif event.act == "edit":
            self.edit(message.id if message.role == "user" else message.parent)
        elif event.act == "inspect":
            self.inspect(message)
        elif event.act == "regenerate":
            await self.regenerate(message.id)
        elif event.act in ("before", "after") and not self.busy:
            await self._walk(message, -1 if event.act == "before" else 1)

    async def _walk(self, message: Message, step: int) -> None:
        """Look at the branch beside a message."""
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
        """Look at the tokens of an answer, by default the last one."""
        answers = [one for one in self._session.conversation.path() if one.role == "assistant" and one.text]
        wanted = message or (answers[-1] if answers else None)
        if (remote := self._session.remote) is not None:
            self.notify(f"{remote} answers: what it thought at each token is not known here.", severity="warning")
        elif wanted is None or wanted.role != "assistant" or not wanted.text:
            self.notify("There is no answer to look at.", severity="warning")
        elif wanted.state == "streaming":
            self.notify("The answer is still being written.", severity="warning")
        else:
            from app.tui.screens.inspector import InspectorScreen

            self.app.push_screen(InspectorScreen(self._session, wanted))

    def _copy_code(self, message: Message) -> None:
        """Copy a code block of a message, another one each time."""
        view = self.transcript.view(message.id)
        blocks = [] if view is None or view.body is None else view.body.code_blocks
        if not blocks:
            self.notify("There is no code in this message.", severity="warning")
            return
        before, at = self._copied
        at = (at + 1) % len(blocks) if before == message.id else 0
        self._copied = (message.id, at)
        self.app.copy_to_clipboard(blocks[at])
        self.notify(f"Code block {at + 1} of {len(blocks)} is copied.", timeout=2)

    def toggle_sidebar(self) -> bool:
        """Show the sidebar and put the keys on it; where they are on it, hide it. Returns whether there is room."""
        if self.app.size.width < LEAST_COLUMNS:
            return False
        sidebar = self.query_one(Sidebar)
        wanted = "off" if sidebar.display and sidebar.has_focus_within else "on"
        self._session.settings = self._session.settings.changed({"sidebar": wanted})
        self.post_message(SettingChanged("sidebar", wanted))  # so that it is so next time, too
        sidebar.fold(self.app.size.width)
        if sidebar.display:
            sidebar.action_search()
        else:
            self.composer.focus()
        return True

    def action_to_messages(self) -> None:
        """Put the keys on the last message."""
        if views := list(self.query(MessageView)):
            views[-1].focus()

    def action_to_composer(self) -> None:
        """Put the keys back to where one writes."""
        self.composer.focus()

    def action_step(self, step: int) -> None:
        """Go to the message above or below; below the last one is the composer."""
        views = list(self.query(MessageView))
        if not isinstance(self.focused, MessageView) or self.focused not in views:
            return
        at = views.index(self.focused) + step
        if at >= len(views):
            self.composer.focus()
        elif at >= 0:
            views[at].focus()

    def attach(self) -> None:
        """Ask for a text file to send with the message."""

        def take(path: Path | None) -> None:
            if path is not None:
                try:
                    self.composer.attach_file(path)
                except (OSError, ValueError) as error:
                    self.notify(str(error), severity="error", markup=False)
            self.composer.focus()

        from app.tui.screens.chat_dialogs import AttachDialog

        self.app.push_screen(AttachDialog(), take)

    def settings_of_chat(self) -> None:
        """Ask for system prompt and sampling of this chat alone."""
        from app.tui.screens.chat_dialogs import CHAT_KEYS, ChatSettingsDialog

        session = self._session
        conversation = session.conversation

        def take(found: Mapping[str, Value] | None) -> None:
            if found is not None:
                before, own = conversation.extras.settings, dict(found)
                if "preset" in before and before.get("system_prompt") == own.get("system_prompt"):
                    own["preset"] = before["preset"]
                session.note(conversation, settings=own)
                self.show_session()

        general = {key: session.settings.get(key) for key in ("system_prompt", *CHAT_KEYS)}
        self.app.push_screen(ChatSettingsDialog(conversation.extras.settings, general), take)

    def _title(self) -> str:
        """What is told above the composer: what runs, where there is no header, and the chat's own system prompt."""
        own = self._session.conversation.extras.settings
        parts = [model_line(self._session)] if self.has_class("-slim") else []
        if own.get("system_prompt"):
            parts.append(printable(str(own.get("preset") or "own system prompt")))
        return escape(SEPARATOR.join(parts))

    def choose_preset(self) -> None:
        """Ask for a system prompt that has a name, for this chat alone."""
        from app.tui.screens.presets import Preset, PresetsDialog

        session = self._session
        conversation = session.conversation

        def take(found: Preset | None) -> None:
            if found is not None:
                others = {key: value for key, value in conversation.extras.settings.items() if key not in PROMPT_KEYS}
                own = dict(zip(PROMPT_KEYS, found, strict=True)) if found[0] else {}
                session.note(conversation, settings={**others, **own})
                self.show_session()

        current = conversation.extras.settings.get("system_prompt")
        self.app.push_screen(PresetsDialog(str(current or "")), take)

    # What is typed

    @on(TextArea.Changed, "#composer")
    def keep_draft(self) -> None:
        """Keep what is typed: at once with its chat, soon on disk."""
        if self._editing is None:
            extras = self._session.conversation.extras
            self._session.conversation.extras = replace(extras, draft=self.composer.value)
        if self._draft is not None:
            self._draft.stop()
        self._draft = self.set_timer(DRAFT_S, self.save_draft)

    def save_draft(self) -> None:
        """Write what is typed with its chat, so that it is there again when the chat is opened."""
        typed = self._unsent if self._editing is not None else self.composer.value
        self._session.note(self._session.conversation, draft=typed)
        self._show_context()

    def on_mount(self) -> None:
        """Remember what is typed in: at the end it can't be found on the screen any more."""
        self._typing = self.composer

    def on_unmount(self) -> None:
        """Keep what is typed, however the program ends; what its last change tells may not have come yet."""
        conversation = self._session.conversation
        if self._typing is not None and self._editing is None and self._typing.value != conversation.extras.draft:
            self._session.note(conversation, draft=self._typing.value)

    def _remember(self, text: str) -> None:
        self.composer.past = remembered(self.composer.past, text)

    async def _recall_past(self) -> None:
        kept = self._session.kept
        if kept is not None and self._session.keeps:
            with contextlib.suppress(HistoryError):
                self.composer.past = [*await kept.prompts(), *self.composer.past]

    def _show_context(self) -> None:
        session = self._session
        context = session.status.context if session.status else None
        self.composer.show_context(session.context_used, context, session.will_leave_out(self.composer.value))
