"""The actions on a list of saved chats: search, rename, pin, delete, undo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from typing import TYPE_CHECKING

from textual import on, work
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input
from textual.worker import Worker, WorkerCancelled, WorkerFailed

from app.errors import HistoryError
from app.tui.session import Session

if TYPE_CHECKING:
    from app.history.store import Chat


MAX_CHATS = 200
"""Number of chats listed; a search finds the others."""


def list_bindings(place: str, scope: str = "") -> list[BindingType]:
    """The keys of a list of chats.

    Args:
        place: prefix of their ids.
        scope: namespace of their actions, such as `screen.`.
    """
    return [
        Binding("slash", f"{scope}search", "search", tooltip="Search all messages", id=f"{place}.search"),
        Binding("r", f"{scope}rename", "rename", tooltip="Rename the chat", id=f"{place}.rename"),
        Binding("p", f"{scope}pin", "pin", tooltip="Pin or unpin the chat", id=f"{place}.pin"),
        Binding("d,delete", f"{scope}delete", "delete", tooltip="Delete the chat; U restores it", id=f"{place}.delete"),
        Binding("u", f"{scope}undo", "undo", tooltip="Restore the last deleted chat", id=f"{place}.undo"),
    ]


class ChatList(Widget):
    """A list of kept chats, a screen's or a part of one. Whoever extends it shows `_chats` and says which is meant."""

    def _begin(self, session: Session) -> None:
        """Initialize the list; called by the constructor."""
        self._session = session
        self._chats: list[Chat] = []
        self._snippets: dict[str, str] = {}
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
        history, chats, snippets = self._session.history, [], {}
        try:
            if history is not None and text:
                found = await history.search(text)
                snippets = {one.chat.id: one.snippet for one in reversed(found)}
                chats = list({one.chat.id: one.chat for one in found}.values())
            elif history is not None:
                chats = list(await history.chats(MAX_CHATS))
        except HistoryError:
            self._chats, self._snippets = [], {}
            raise
        # Only now: meanwhile a key means a row that is still shown.
        self._chats, self._snippets = chats, snippets

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
            self._change(self._session.delete_chat(chat.id), f"{chat.title} was deleted; U restores it.")

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
