"""The chats that are kept (^B): found as one types, opened, renamed, pinned, deleted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len, set_cell_size
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from app.errors import HistoryError
from app.tui.messages import ChatAsked
from app.tui.printable import printable
from app.tui.screens.chat_deeds import MOST_CHATS, ChatDeeds
from app.tui.session import Session
from app.tui.widgets.header import HeaderBar

if TYPE_CHECKING:
    from app.history.store import Chat

EMPTY = "No chat is kept yet."
NOTHING = "No message has all of these words."
OFF = "Chats are not kept at present; F3 says whether they are."


class ChatTable(DataTable[str]):
    """The list, whose keys say what they do."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "open", tooltip="Go on with the chat", id="chats.open"),
        Binding("slash", "screen.search", "search", tooltip="Search what was said", id="chats.search"),
        Binding("r", "screen.rename", "rename", tooltip="Give the chat another title", id="chats.rename"),
        Binding("p", "screen.pin", "pin", tooltip="Put the chat above the others, or back", id="chats.pin"),
        Binding("d,delete", "screen.delete", "delete", tooltip="Delete the chat; U brings it back", id="chats.delete"),
        Binding("u", "screen.undo", "undo", tooltip="Bring back what was deleted last", id="chats.undo"),
    ]


class ChatsScreen(Screen[None], ChatDeeds):
    """A search line, and the chats below it, newest first."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back", tooltip="Back to the chat", id="chats.back"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._begin(session)
        self._said = ""

    def compose(self) -> ComposeResult:
        """Header, search, table, what is said about the chosen one, keys."""
        yield HeaderBar()
        yield Input(placeholder="Search what was said …", compact=True, id="chats-search")
        yield ChatTable(cursor_type="row", show_header=False)
        yield Static("", markup=False, id="chats-note")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Fill the list."""
        self.show_session()
        self.refill()

    def show_session(self) -> None:
        """Bring the header up to date."""
        if self.query(HeaderBar):
            self.query_one(HeaderBar).show(self._session)

    @on(Input.Changed, "#chats-search")
    def refill(self) -> None:
        """List the chats, or those in which the words were found."""
        self.run_worker(self._refill(), group="chats", exclusive=True, exit_on_error=False)

    async def _refill(self) -> None:
        text, note = self.query_one(Input).value.strip(), ""
        try:
            await self._find(text)
            if not self._chats:
                note = NOTHING if text else EMPTY if self._session.keeps else OFF
            elif not text and len(self._chats) == MOST_CHATS:
                note = f"The last {MOST_CHATS} chats; a search finds all."
        except HistoryError as error:
            note = str(error)
        table = self.query_one(ChatTable)
        row = table.cursor_row
        table.clear(columns=True)
        rows = [self._cells(chat) for chat in self._chats]
        for column in zip(*rows, strict=True):  # the table would measure them when it is idle, which it may not be
            table.add_column("", width=max(map(cell_len, column)))
        for chat, cells in zip(self._chats, rows, strict=True):
            table.add_row(*cells, key=chat.id)
        table.move_cursor(row=min(row, max(0, table.row_count - 1)))
        self._said = note
        self.tell_about()

    def _cells(self, chat: Chat) -> list[str]:
        mark = "●" if chat.id == self._session.conversation.id else "▴" if chat.pinned else " "
        room = max(12, self.size.width - (22 if self.has_class("-slim") else 44))
        title = printable(chat.title)
        if cell_len(title) > room:
            title = f"{set_cell_size(title, room - 1).rstrip()}…"
        cells = [mark, title, when(chat.updated)]
        return cells if self.has_class("-slim") else [*cells, printable(chat.model or "")]

    def _chosen(self) -> Chat | None:
        row = self.query_one(ChatTable).cursor_row
        return self._chats[row] if 0 <= row < len(self._chats) else None

    def _note(self, text: str) -> None:
        note = self.query_one("#chats-note", Static)
        note.update(printable(text))
        note.display = bool(text)

    def on_resize(self) -> None:
        """Show the columns that fit."""
        self.call_after_refresh(self.refill)

    @on(DataTable.RowHighlighted)
    def tell_about(self) -> None:
        """Show where the words were found in the chat under the cursor."""
        chat = self._chosen()
        self._note(self._said if chat is None else self._snippets.get(chat.id, self._said))

    @on(Input.Submitted, "#chats-search")
    @on(DataTable.RowSelected)
    def open(self) -> None:
        """Go on with the chat under the cursor."""
        if (chat := self._chosen()) is not None:
            self.app.post_message(ChatAsked(chat))
            self.dismiss()

    def on_key(self, event: Key) -> None:
        """From the search line, down leads into the list; from its top, up leads back."""
        table = self.query_one(ChatTable)
        if event.key == "down" and isinstance(self.focused, Input):
            event.prevent_default().stop()
            table.focus()
        elif event.key == "up" and self.focused is table and table.cursor_row == 0:
            event.prevent_default().stop()
            self.action_search()

    def action_search(self) -> None:
        """Go to the search line."""
        self.query_one(Input).focus()

    def action_back(self) -> None:
        """Empty the search; where it is empty, back to the chat."""
        search = self.query_one(Input)
        if search.value:
            search.value = ""
        else:
            self.dismiss()


def when(moment: datetime, now: datetime | None = None) -> str:
    """A time as people say it: `10:42`, `Mon 10:42`, `3 Nov`, `3 Nov 2025`."""
    own, today = moment.astimezone(), (now or datetime.now(UTC)).astimezone()
    days = (today.date() - own.date()).days
    if days == 0:
        return f"{own:%H:%M}"
    if 0 < days < 7:
        return f"{own:%a %H:%M}"
    return f"{own.day} {own:%b}" if own.year == today.year else f"{own.day} {own:%b %Y}"
