"""Attaching: what happens between the choice of a file or folder and its place in the chat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from app.chat.documents import Whole
from app.chat.prompts import USUAL_CONTEXT
from app.conversation import Conversation
from app.errors import DocumentError, HistoryError
from app.language import _, ngettext
from app.network import host_of
from app.printable import printable_name
from app.tui.figures import token_count
from app.tui.session import Session

if TYPE_CHECKING:
    from textual.screen import Screen

    from app.documents.index import State
    from app.tui.widgets.composer import Composer


class Attaching:
    """Attaches documents to the chat on screen: a short one to the message, others to what is searched."""

    def __init__(
        self, screen: Screen[None], session: Session, composer: Callable[[], Composer], changed: Callable[[], object]
    ) -> None:
        """Begin without any.

        Args:
            screen: Shows notices, and runs the work.
            session: Has the chat and its documents.
            composer: The composer.
            changed: Called when what is searched, or how far it was read, has changed.
        """
        self._screen, self._session, self._composer, self._changed = screen, session, composer, changed
        self._reading = ""

    @property
    def reading(self) -> bool:
        """Whether something is being read."""
        return bool(self._reading)

    @property
    def status(self) -> str:
        """What is being read or searched, for the composer's title; empty if nothing is."""
        sources = self._session.conversation.extras.sources
        names = ", ".join(source.name for source in sources)
        searched = _("searches {names}", names=names) if sources else ""
        if sources and (remote := self._session.remote) is not None:
            searched = _("searches {names}; only passages go to {remote}", names=names, remote=host_of(remote))
        return _("{reading} · Esc stops", reading=self._reading) if self._reading else searched

    async def attach(self, path: Path, *, typed: str = "") -> None:
        """Attach a file or folder.

        Args:
            path: Its absolute path.
            typed: What to type instead if it can't be read: a path that was dropped on the terminal.
        """
        conversation = self._session.conversation
        self._show(_("reading {name}", name=printable_name(path.name)))
        try:
            status = self._session.status
            context = (status.context if status is not None else None) or USUAL_CONTEXT
            whole = await self._session.documents.whole(path, context)
            if whole is not None and conversation is self._session.conversation:
                self._send(path, whole)
            else:
                await self._search(conversation, path)
        except (DocumentError, HistoryError) as error:
            self._screen.notify(f"{error}.", severity="error", timeout=10)
            if typed:
                self._composer().insert(typed)
        finally:
            self._show("")

    def _send(self, path: Path, whole: Whole) -> None:
        """Put a document into the message."""
        name = printable_name(path.name)
        self._composer().attach(
            ngettext(
                "{name}: {count:,} line, ≈ {tokens} tokens",
                "{name}: {count:,} lines, ≈ {tokens} tokens",
                whole.lines,
                name=name,
                tokens=token_count(whole.tokens),
            ),
            f"\n\n{whole.content}\n\n",
        )
        for problem in whole.problems[:3]:
            self._screen.notify(f"{problem}.", severity="warning", timeout=10)
        if (remote := self._session.remote) is not None:
            self._screen.notify(
                _("All of {name} goes to {remote} with your message.", name=name, remote=host_of(remote)), timeout=10
            )

    async def _search(self, conversation: Conversation, path: Path) -> None:
        """Have a file or folder searched from now on."""
        name = printable_name(path.name)

        def report(done: int, of: int) -> None:
            self._show(
                _("reading {name}: {done:,} of {of:,} files", name=name, done=done, of=of)
                if of > 1
                else _("reading {name}", name=name)
            )

        state = await self._session.documents.search(conversation, path, self._session.note, report)
        self._screen.notify(told(state), timeout=10, severity="warning" if state.problems else "information")

    async def remove(self, path: Path) -> None:
        """Search a file or folder no longer."""
        conversation = self._session.conversation
        kept = [source for source in conversation.extras.sources if source.path != str(path)]
        self._session.note(conversation, sources=kept)
        self._changed()
        try:
            await self._session.documents.detach(conversation.id, path)
        except HistoryError as error:
            self._screen.notify(f"{error}.", severity="error")

    def _show(self, reading: str) -> None:
        self._reading = reading
        self._changed()


def told(state: State) -> str:
    """What is said about a source when it was read: its size, that it is searched, and what is missing."""
    size = ngettext("≈ {tokens} tokens", "{count:,} files, ≈ {tokens} tokens", state.files,
                    tokens=token_count(state.tokens))  # fmt: skip
    parts = [
        _(
            "{name} ({size}) is too long to be sent: each question is answered from passages found in it.",
            name=state.name,
            size=size,
        )
    ]
    if state.problems:
        more = len(state.problems) - 1
        first = state.problems[0]
        parts.append(
            ngettext("{first}, and {count:,} more problem.", "{first}, and {count:,} more problems.", more, first=first)
            if more
            else f"{first}."
        )
    return " ".join(parts)
