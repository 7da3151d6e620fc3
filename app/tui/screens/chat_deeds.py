"""What can be done with the chats of a list: found, renamed, pinned, deleted, and had back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from textual.widget import Widget

from app.errors import HistoryError
from app.tui.session import Session

if TYPE_CHECKING:
    from app.history.store import Chat


MOST_CHATS = 200
"""Chats that are listed; a search finds the others."""


class ChatDeeds(Widget):
    """A list of kept chats, a screen's or a part of one. Whoever extends it shows `_chats` and says which is meant."""

    def _begin(self, session: Session) -> None:
        """Take the chats; called when it is made."""
        self._session = session
        self._chats: list[Chat] = []
        self._snippets: dict[str, str] = {}
        self._deleted: list[str] = []

    @abstractmethod
    def _chosen(self) -> Chat | None:
        """The chat that is meant."""

    @abstractmethod
    def refill(self) -> None:
        """Bring the list up to date."""

    async def _find(self, text: str) -> None:
        """Take the last chats, or those in which the words of a text are found.

        Raises:
            HistoryError: they can't be read; there are none then.
        """
        self._chats, self._snippets = [], {}
        kept = self._session.kept
        if kept is None:
            return
        if not text:
            self._chats = list(await kept.chats(MOST_CHATS))
            return
        found = await kept.search(text)
        self._snippets = {one.chat.id: one.snippet for one in reversed(found)}
        self._chats = list({one.chat.id: one.chat for one in found}.values())

    def action_rename(self) -> None:
        """Ask for another title."""
        from app.tui.screens.dialogs import TitleDialog

        chat, kept = self._chosen(), self._session.kept
        if chat is None or kept is None:
            return

        def rename(title: str | None) -> None:
            if title is not None:
                self._change(kept.rename(chat.id, title))

        self.app.push_screen(TitleDialog(chat.title), rename)

    def action_pin(self) -> None:
        """Put the chat above the others, or back among them."""
        if (chat := self._chosen()) is not None and self._session.kept is not None:
            self._change(self._session.kept.pin(chat.id, pinned=not chat.pinned))

    def action_delete(self) -> None:
        """Delete the chat; it can be brought back."""
        if (chat := self._chosen()) is not None:
            self._deleted.append(chat.id)
            self._change(self._session.delete_chat(chat.id), f"{chat.title} is deleted; U brings it back.")

    def action_undo(self) -> None:
        """Bring back the chat that was deleted last."""
        if self._deleted and self._session.kept is not None:
            self._change(self._session.kept.restore(self._deleted.pop()))

    def _change(self, change: Awaitable[None], told: str = "") -> None:
        self.run_worker(self._changed(change, told), group="change", exit_on_error=False)

    async def _changed(self, change: Awaitable[None], told: str) -> None:
        try:
            await change
        except HistoryError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            if told:
                self.notify(told, markup=False)
        self.refill()
