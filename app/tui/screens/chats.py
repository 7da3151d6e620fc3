"""The saved chats (^B), with search as you type, and the actions on such a list: rename, pin, delete, undo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input
from textual.worker import Worker, WorkerCancelled, WorkerFailed

from app.errors import HistoryError
from app.language import _
from app.printable import printable, printable_name
from app.tui.messages import ChatAsked
from app.tui.plain import Plain
from app.tui.session import Session
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.plain_table import PlainTable

if TYPE_CHECKING:
    from app.history.store import Chat, Found


MAX_CHATS = 200
"""Number of chats listed; a search finds the others."""


def list_bindings(place: str, scope: str = "") -> list[BindingType]:
    """The keys of a list of chats.

    Args:
        place: prefix of their ids.
        scope: namespace of their actions, such as `screen.`.
    """
    return [
        Binding("slash", f"{scope}search", _("search"), tooltip=_("Search all messages"), id=f"{place}.search"),
        Binding("r", f"{scope}rename", _("rename"), tooltip=_("Rename the chat"), id=f"{place}.rename"),
        Binding("p", f"{scope}pin", _("pin"), tooltip=_("Pin or unpin the chat"), id=f"{place}.pin"),
        Binding(
            "d,delete", f"{scope}delete", _("delete"), tooltip=_("Delete the chat; U restores it"), id=f"{place}.delete"
        ),
        Binding("u", f"{scope}undo", _("undo"), tooltip=_("Restore the last deleted chat"), id=f"{place}.undo"),
    ]


class ChatList(Widget):
    """A list of kept chats, a screen's or a part of one. Whoever extends it shows `_chats` and says which is meant."""

    def _begin(self, session: Session) -> None:
        """Initialize the list; called by the constructor."""
        self._session = session
        self._chats: list[Chat] = []
        self._found: dict[str, Found] = {}
        self._deleted: list[str] = []
        self._search: Worker[None] | None = None

    @abstractmethod
    def _chosen(self) -> Chat | None:
        """The chat under the cursor."""

    @abstractmethod
    def _back(self) -> None:
        """Leave the list."""

    @abstractmethod
    def open(self) -> None:
        """Open the chat under the cursor; from a search, the first match."""

    @abstractmethod
    async def _refill(self) -> None:
        """Find the chats and list them."""

    @on(Input.Changed)
    def refill(self) -> None:
        """Update the list if it is shown."""
        if self.display:
            self._search = self.run_worker(self._refill, group="chats", exclusive=True, exit_on_error=False)

    def on_resize(self) -> None:
        """Show what fits the width; also the first time, when the list comes onto the screen."""
        self.call_after_refresh(self.refill)

    async def _find(self, text: str) -> None:
        """Fill `_chats` with the latest chats, or with those that contain the words of a text.

        Raises:
            HistoryError: they can't be read; `_chats` is then empty.
        """
        history, chats, matches = self._session.history, [], {}
        try:
            if history is not None and text:
                found = await history.search(text)
                matches = {one.chat.id: one for one in reversed(found)}
                chats = list({one.chat.id: one.chat for one in found}.values())
            elif history is not None:
                chats = list(await history.chats(MAX_CHATS))
        except HistoryError:
            self._chats, self._found = [], {}
            raise
        # Only now: meanwhile a key means a row that is still shown.
        self._chats, self._found = chats, matches

    @on(Input.Submitted)
    @work(group="found", exclusive=True)
    async def open_found(self) -> None:
        """Open the first match, once the search has ended."""
        while self._search is not None and not self._search.is_finished:
            with suppress(WorkerCancelled, WorkerFailed):
                await self._search.wait()
        self.open()

    def action_search(self) -> None:
        """Go to the search line."""
        self.query_one(Input).focus()

    def action_leave(self) -> None:
        """Clear the search; if it is empty, leave the list."""
        search = self.query_one(Input)
        if search.value:
            search.value = ""
        else:
            self._back()

    def action_rename(self) -> None:
        """Ask for a new title."""
        from app.tui.screens.dialogs import TitleDialog

        chat, history = self._chosen(), self._session.history
        if chat is None or history is None:
            return

        def rename(title: str | None) -> None:
            if title is not None:
                self._change(history.rename(chat.id, title))

        self.app.push_screen(TitleDialog(chat.title), rename)

    def action_pin(self) -> None:
        """Pin or unpin the chat."""
        if (chat := self._chosen()) is not None and self._session.history is not None:
            self._change(self._session.history.pin(chat.id, pinned=not chat.pinned))

    def action_delete(self) -> None:
        """Delete the chat; this can be undone."""
        if (chat := self._chosen()) is not None:
            self._deleted.append(chat.id)
            self._change(self._session.delete_chat(chat.id), _("{title} was deleted; U restores it.", title=chat.title))

    def action_undo(self) -> None:
        """Restore the chat that was deleted last."""
        if self._deleted and self._session.history is not None:
            self._change(self._session.history.restore(self._deleted.pop()))

    def _change(self, change: Awaitable[None], told: str = "") -> None:
        self.run_worker(self._changed(change, told), group="change", exit_on_error=False)

    async def _changed(self, change: Awaitable[None], told: str) -> None:
        try:
            await change
        except HistoryError as error:
            self.notify(str(error), severity="error")
        else:
            if told:
                self.notify(told)
        self.refill()


EMPTY = _("No saved chats yet.")
WEEKDAYS = (_("Mon"), _("Tue"), _("Wed"), _("Thu"), _("Fri"), _("Sat"), _("Sun"))
MONTHS = (_("Jan"), _("Feb"), _("Mar"), _("Apr"), _("May"), _("Jun"),
          _("Jul"), _("Aug"), _("Sep"), _("Oct"), _("Nov"), _("Dec"))  # fmt: skip
NOTHING = _("No message contains all these words.")
OFF = _("Chats are not being saved; turn history on in the settings (F3).")


class ChatTable(PlainTable):
    """The table of chats with its keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", _("open"), tooltip=_("Open the chat"), id="chats.open"),
        *list_bindings("chats", "screen."),
    ]


class ChatsScreen(Screen[None], ChatList):
    """A search line above the chats, newest first."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", _("back"), tooltip=_("Back to the chat"), id="chats.back"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._begin(session)
        self._said = self._asked = ""

    def compose(self) -> ComposeResult:
        """Header, search, table, note on the selected chat, keys."""
        yield HeaderBar()
        yield Input(placeholder=_("Search all messages …"), compact=True, id="chats-search")
        yield ChatTable(cursor_type="row", show_header=False)
        yield Plain("", id="chats-note")
        yield KeyLine()

    def on_mount(self) -> None:
        """Show the session's state; the list fills itself."""
        self.show_session()

    def show_session(self) -> None:
        """Update the header."""
        if self.query(HeaderBar):
            self.query_one(HeaderBar).show(self._session)

    async def _refill(self) -> None:
        text, note = self.query_one(Input).value.strip(), ""
        try:
            await self._find(text)
            if not self._chats:
                note = NOTHING if text else EMPTY if self._session.saves else OFF
            elif not text and len(self._chats) == MAX_CHATS:
                note = _("The last {most} chats; search to find older ones.", most=MAX_CHATS)
        except HistoryError as error:
            note = str(error)
        other, self._asked = text != self._asked, text
        self.query_one(ChatTable).fill({chat.id: self._cells(chat) for chat in self._chats}, top=other)
        self._said = note
        self.tell_about()

    def _cells(self, chat: Chat) -> list[str | Text]:
        mark = "●" if chat.id == self._session.conversation.id else "▴" if chat.pinned else " "
        found = None if self.has_class("-slim") else self._found.get(chat.id)
        room = max(12, self.size.width - (22 if self.has_class("-slim") else 44))
        title = printable(chat.title)
        if cell_len(title) > (width := room if found is None else room // 2):
            title = f"{set_cell_size(title, width - 1).rstrip()}…"
        if found is not None:
            return [mark, title, matched(found, self.size.width - width - 30), when(chat.updated)]
        cells: list[str | Text] = [mark, title, when(chat.updated)]
        return cells if self.has_class("-slim") else [*cells, printable_name(chat.model or "")]

    def _chosen(self) -> Chat | None:
        under = self.query_one(ChatTable).under
        return next((chat for chat in self._chats if chat.id == under), None)

    def _note(self, text: str | Text) -> None:
        note = self.query_one("#chats-note", Plain)
        note.update(text)
        note.display = bool(text)

    @on(PlainTable.RowHighlighted)
    def tell_about(self) -> None:
        """Show the match in the chat under the cursor."""
        chat = self._chosen()
        found = None if chat is None else self._found.get(chat.id)
        self._note(self._said if found is None else matched(found))

    @on(PlainTable.RowSelected)
    def open(self) -> None:
        """Open the chat under the cursor."""
        if (chat := self._chosen()) is not None:
            self.app.post_message(ChatAsked(chat))
            self.dismiss()

    def on_key(self, event: Key) -> None:
        """Move from the search line down into the list, and from its top up again."""
        table = self.query_one(ChatTable)
        if event.key == "down" and isinstance(self.focused, Input):
            event.prevent_default().stop()
            table.focus()
        elif event.key == "up" and self.focused is table and table.cursor_row == 0:
            event.prevent_default().stop()
            self.action_search()

    def _back(self) -> None:
        self.dismiss()


def matched(found: Found, width: int | None = None, style: str = "bold underline") -> Text:
    """The text around a match, with what matches emphasized; as much of it around the first match as fits."""
    pieces = [printable(piece) for piece in found.pieces]
    text = Text.assemble(*((piece, style if at % 2 else "") for at, piece in enumerate(pieces)), no_wrap=True)
    if width is None or text.cell_len <= width:
        return text
    before = max(0, len(pieces[0]) - width // 3)
    text = Text("…").append_text(text[before:]) if before else text
    text.truncate(width, overflow="ellipsis")
    return text


def when(moment: datetime, now: datetime | None = None) -> str:
    """A short time: `10:42`, `Mon 10:42`, `3 Nov`, `3 Nov 2025`."""
    own, today = moment.astimezone(), (now or datetime.now(UTC)).astimezone()
    days = (today.date() - own.date()).days
    if days == 0:
        return f"{own:%H:%M}"
    if 0 < days < 7:
        return f"{WEEKDAYS[own.weekday()]} {own:%H:%M}"
    month = MONTHS[own.month - 1]
    if own.year == today.year:
        return _("{day} {month}", day=own.day, month=month)
    return _("{day} {month} {year}", day=own.day, month=month, year=own.year)
