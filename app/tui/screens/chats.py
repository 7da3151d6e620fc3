"""The saved chats (^B) on a narrow terminal, with search as you type."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.screen import Screen
from textual.widgets import Input

from app.errors import HistoryError
from app.language import _
from app.printable import printable, printable_name
from app.tui.messages import ChatAsked
from app.tui.plain import Plain
from app.tui.screens.sidebar import MAX_CHATS, ChatList, list_bindings, matched
from app.tui.session import Session
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.plain_table import PlainTable

if TYPE_CHECKING:
    from app.history.store import Chat


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
