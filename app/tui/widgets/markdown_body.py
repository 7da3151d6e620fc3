"""Markdown that grows, with a plain tail for the block that is too large to render at every token."""

from __future__ import annotations

import asyncio
import contextlib

from markdown_it import MarkdownIt
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Markdown, Static

from app.tui.printable import printable

SETTLE_S = 0.5
"""Longest wait for a layout."""
TAIL_PIECE_LINES = 50
"""Lines of one piece of the tail; only the last piece is laid out again when text comes."""


def parser() -> MarkdownIt:
    """A parser that shows raw HTML as it stands; Textual would leave it out, and with it what the model said."""
    return MarkdownIt("gfm-like", {"html": False})


class AnswerMarkdown(Markdown):
    """Markdown of an answer. A link is opened only if it is a web address."""

    def __init__(self, text: str) -> None:
        super().__init__(text, parser_factory=parser, open_links=False)

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Open a web address; show any other."""
        event.stop()
        if event.href.startswith(("https://", "http://")):
            self.app.open_url(event.href)
        else:
            self.notify(f"not opened: {event.href}", markup=False)


class PlainTail(Vertical):
    """Plain text in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[Static] = []

    async def show(self, text: str) -> None:
        """Show this text, which mostly continues the last one."""
        if not text:
            self._pieces.clear()
            await self.remove_children()
            return
        lines = text.split("\n")
        pieces = [lines[at : at + TAIL_PIECE_LINES] for at in range(0, len(lines), TAIL_PIECE_LINES)]
        for at, piece in enumerate(pieces):
            if at < len(self._pieces) - 1:
                continue
            if at < len(self._pieces):
                self._pieces[at].update("\n".join(piece))
            else:
                fresh = Static("\n".join(piece), markup=False)
                self._pieces.append(fresh)
                await self.mount(fresh)


class MarkdownBody(Vertical):
    """The sink of `app.tui.pump`."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._markdown = AnswerMarkdown(printable(text))
        self._tail = PlainTail()
        self._has_tail = False

    def compose(self) -> ComposeResult:
        """Markdown, then the tail."""
        yield self._markdown
        yield self._tail

    async def append(self, text: str) -> None:
        """Add Markdown at the end."""
        await self._markdown.append(printable(text))

    async def show_tail(self, text: str) -> None:
        """Show plain text after the Markdown."""
        if text or self._has_tail:
            self._has_tail = bool(text)
            await self._tail.show(printable(text))

    async def settle(self) -> None:
        """Wait until what was given is laid out; a widget that is gone is never laid out."""
        painted = asyncio.Event()
        self.call_after_refresh(painted.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await painted.wait()

    async def update(self, text: str) -> None:
        """Show exactly this Markdown."""
        with self.app.batch_update():
            await self._markdown.update(printable(text))
            await self.show_tail("")
