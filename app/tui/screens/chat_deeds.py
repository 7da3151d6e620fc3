"""What can be done with a chat of a list: rename, pin, delete, and have back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from textual.widget import Widget

from app.errors import HistoryError
from app.tui.session import Session

if TYPE_CHECKING:
    from app.history.store import Chat


class ChatDeeds:
    """Deeds of one list.

    Args:
        owner: the list, which runs the work and tells of it.
        session: the chats.
        chosen: the chat that is meant.
        refill: brings the list up to date.
    """

    def __init__(
        self, owner: Widget, session: Session, chosen: Callable[[], Chat | None], refill: Callable[[], object]
    ) -> None:
        self._owner, self._session, self._chosen, self._refill = owner, session, chosen, refill
        self._deleted: list[str] = []

    def rename(self) -> None:
        """Ask for another title."""
        from app.tui.screens.dialogs import TitleDialog

        chat, kept = self._chosen(), self._session.kept
        if chat is None or kept is None:
            return

        def rename(title: str | None) -> None:
            if title is not None:
                self._change(kept.rename(chat.id, title))

        self._owner.app.push_screen(TitleDialog(chat.title), rename)

    def pin(self) -> None:
        """Put the chat above the others, or back among them."""
        if (chat := self._chosen()) is not None and self._session.kept is not None:
            self._change(self._session.kept.pin(chat.id, pinned=not chat.pinned))

    def delete(self) -> None:
        """Delete the chat; it can be brought back."""
        if (chat := self._chosen()) is not None:
            self._deleted.append(chat.id)
            self._change(self._session.delete_chat(chat.id), f"{chat.title} is deleted; U brings it back.")

    def undo(self) -> None:
        """Bring back the chat that was deleted last."""
        if self._deleted and self._session.kept is not None:
            self._change(self._session.kept.restore(self._deleted.pop()))

    def _change(self, change: Awaitable[None], told: str = "") -> None:
        self._owner.run_worker(self._changed(change, told), group="change", exit_on_error=False)

    async def _changed(self, change: Awaitable[None], told: str) -> None:
        try:
            await change
        except HistoryError as error:
            self._owner.notify(str(error), severity="error", markup=False)
        else:
            if told:
                self._owner.notify(told, markup=False)
        self._refill()
