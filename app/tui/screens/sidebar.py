"""The sidebar: saved chats by day, pinned ones first, with search as you type. The actions on any list of chats."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.widget import Widget
from textual.widgets import Input
from textual.widgets.option_list import Option
from textual.worker import Worker, WorkerCancelled, WorkerFailed

from app.errors import HistoryError
from app.language import _
from app.printable import printable
from app.tui.messages import ChatAsked
from app.tui.plain import PlainList, plain
from app.tui.session import Session

if TYPE_CHECKING:
    from app.history.store import Chat, Found

MAX_CHATS = 200
"""Number of chats listed; a search finds the others."""
MIN_COLUMNS = 100
"""Minimum width of the terminal for the sidebar."""
LEAST = 28
"""Minimum width of the sidebar, which is otherwise as wide as its titles, up to a third of the terminal."""
DAYS = ((0, _("Today")), (1, _("Yesterday")), (7, _("Last 7 days")), (31, _("Last month")))


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


def matched(found: Found, width: int | None = None) -> Text:
    """The text around a match, with what matches emphasized; as much of it around the first match as fits."""
    pieces = [printable(piece) for piece in found.pieces]
    text = Text.assemble(
        *((piece, "bold underline" if at % 2 else "") for at, piece in enumerate(pieces)), no_wrap=True
    )
    if width is None or text.cell_len <= width:
        return text
    before = max(0, len(pieces[0]) - width // 3)
    text = Text("…").append_text(text[before:]) if before else text
    text.truncate(width, overflow="ellipsis")
    return text
