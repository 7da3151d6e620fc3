"""The sidebar: saved chats by day, pinned ones first, with search as you type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.widgets import Input
from textual.widgets.option_list import Option

from app.errors import HistoryError
from app.language import _
from app.printable import printable
from app.tui.messages import ChatAsked
from app.tui.plain import plain
from app.tui.screens.chats import ChatList, list_bindings, matched
from app.tui.session import Session
from app.tui.widgets.plain_table import PlainList

if TYPE_CHECKING:
    from app.history.store import Chat

MIN_COLUMNS = 100
"""Minimum width of the terminal for the sidebar."""
LEAST = 28
"""Minimum width of the sidebar, which is otherwise as wide as its titles, up to a third of the terminal."""
DAYS = ((0, _("Today")), (1, _("Yesterday")), (7, _("Last 7 days")), (31, _("Last month")))


class Sidebar(Vertical, ChatList):
    """A search line above the chats. `refill` updates it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *list_bindings("sidebar"),
        Binding("escape", "leave", _("back"), tooltip=_("Back to the composer"), id="sidebar.back"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__(id="sidebar")
        self._begin(session)
        self._seen: object = None
        self._whole = LEAST
        """Its width in cells, which a search only widens."""

    def compose(self) -> ComposeResult:
        """Search line and list."""
        yield Input(placeholder=_("/ search"), compact=True, id="sidebar-search")
        yield PlainList(compact=True, markup=False, id="sidebar-chats")

    def fold(self, columns: int) -> None:
        """Show or hide the sidebar, depending on setting and room."""
        wanted = self._session.settings.sidebar == "on"
        self.display = wanted and self._session.history is not None and columns >= MIN_COLUMNS

    async def _refill(self) -> None:
        text, note = self.query_one(Input).value.strip(), ""
        try:
            await self._find(text)
            if not self._chats:
                note = _("no matches") if text else _("no saved chats yet")
        except HistoryError as error:
            note = str(error)
        self._list(note, grouped=not text)

    def _list(self, note: str, *, grouped: bool) -> None:
        """Fill the list if it changed; the chat under the cursor stays under it."""
        session, listed = self._session, self.query_one(PlainList)
        writing = [chat.id for chat in self._chats if session.answers.of(chat.id) is not None]
        seen = (self._chats, note, grouped, session.conversation.id, writing, self.size.width)
        if seen == self._seen:
            return
        self._seen = seen
        texts = [chat.title for chat in self._chats] + [found.snippet for found in self._found.values()]
        wanted = max(LEAST if grouped else self._whole, max(map(cell_len, texts), default=0) + 5)
        self.styles.width = self._whole = max(LEAST, min(wanted, self.app.size.width // 3))
        width = self._whole - 4
        options: list[Option] = []
        groups = grouped_by_day(self._chats) if grouped else iter([(_("found"), self._chats)])
        for name, chats in groups:
            if chats:
                options.append(Option(Text(name), disabled=True))
            options += [Option(self._line(chat, width, writing=chat.id in writing), id=chat.id) for chat in chats]
        if note:
            options.append(Option(plain(note), disabled=True))
        listed.fill(options, None if listed.has_focus else session.conversation.id)

    def _line(self, chat: Chat, width: int, *, writing: bool) -> Text:
        current = chat.id == self._session.conversation.id
        mark = "▸ " if current else "… " if writing else "  "
        title = printable(chat.title)
        text = title if cell_len(title) <= width - 2 else set_cell_size(title, width - 3) + "…"
        line = Text(mark + text, style="bold" if current else "", no_wrap=True)
        found = self._found.get(chat.id)
        return line if found is None else Text("\n    ").join([line, matched(found, width - 4)])

    def _chosen(self) -> Chat | None:
        under = self.query_one(PlainList).under
        return next((chat for chat in self._chats if chat.id == under), None)

    @on(PlainList.OptionSelected)
    def open(self) -> None:
        """Open the chat under the cursor; from a search, the first match."""
        chat = self._chosen() or (self._chats[0] if self._chats else None)
        if chat is not None:
            self.query_one(Input).value = ""
            self.app.post_message(ChatAsked(chat))

    def on_key(self, event: Key) -> None:
        """Move from the search line down into the list."""
        if event.key == "down" and isinstance(self.screen.focused, Input):
            event.prevent_default().stop()
            self.query_one(PlainList).focus()

    def _back(self) -> None:
        self.call_later(self.run_action, "screen.to_composer")


def grouped_by_day(chats: Sequence[Chat], now: datetime | None = None) -> Iterator[tuple[str, list[Chat]]]:
    """Chats grouped under day names. The input has pinned ones first, then newest first."""
    today = (now or datetime.now(UTC)).astimezone().date()

    def name(chat: Chat) -> str:
        if chat.pinned:
            return _("Pinned")
        ago = (today - chat.updated.astimezone().date()).days
        return next((words for most, words in DAYS if ago <= most), _("Older"))

    for words, group in groupby(chats, key=name):
        yield words, list(group)
