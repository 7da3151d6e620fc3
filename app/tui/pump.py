"""A rate limiter between streamed text and the Markdown widget that shows it.

Rendering new text may take longer than the time until the next token, above all inside one long list, table or code
fence, where the whole block is rebuilt. So text is buffered, each append is followed by a rest in proportion to its
cost, including layout, and waits while somebody types, and a block that grew large is shown as plain text until it
closes: `BlockTracker` scans the lines roughly. At the end there is one full update, because an incrementally built tree
differs for split lists, reference links and table cells.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

Kind = Literal["list", "table", "fence", "other"]

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_LIST_ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)")


class BlockTracker:
    """Scans complete lines and tracks the open block."""

    def __init__(self) -> None:
        self.kind: Kind = "other"
        """The block that the next line would continue."""
        self.lines = 0
        """Number of its lines so far."""
        self._fence = ""
        self._blank = False

    def feed(self, line: str) -> None:
        """Scan one line, without its line end."""
        before = self.kind
        if before == "fence":
            self._in_fence(line)
        elif before == "list":
            self._in_list(line)
        elif before == "table" and "|" in line:
            self.lines += 1
        else:
            self._start(line)

    def _in_fence(self, line: str) -> None:
        self.lines += 1
        match = _FENCE.fullmatch(line)
        if match and match[1].startswith(self._fence) and not match[2].strip():
            self.kind, self.lines = "other", 0

    def _in_list(self, line: str) -> None:
        ends = self._blank and line[:1] not in ("", " ", "\t") and not _LIST_ITEM.match(line)
        if ends or _FENCE.match(line):
            self._start(line)
        else:
            self.lines += 1
            self._blank = not line.strip()

    def _start(self, line: str) -> None:
        self._blank = False
        self.lines = 1
        if (match := _FENCE.fullmatch(line)) and not (match[1][0] == "`" and "`" in match[2]):
            self.kind, self._fence = "fence", match[1]
        elif _LIST_ITEM.match(line):
            self.kind = "list"
        elif line.lstrip().startswith("|"):
            self.kind = "table"
        else:
            self.kind, self.lines = "other", 0


SHORTEST_REST_S = 0.03
REST_PER_COST = 4.0
LARGE_BLOCK_LINES = 24
LARGE_BLOCK_CHARACTERS = 2000


class Sink(Protocol):
    """The display of the text: Markdown, followed by a plain tail."""

    async def append(self, text: str) -> None:
        """Add Markdown at the end."""

    async def show_tail(self, text: str) -> None:
        """Replace the plain tail after the Markdown."""

    async def settle(self) -> None:
        """Wait until everything is laid out and painted."""

    async def update(self, text: str) -> None:
        """Show exactly this Markdown, and no tail."""


class Pump:
    """Transfers one answer to the screen.

    `write` may be called at any rate. `run` feeds the sink until `close`, then updates it with the full text.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        written: str = "",
        clock: Callable[[], float] = time.thread_time,
        rest: Callable[[float], Awaitable[None]] | None = None,
        quiet: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Make a pump.

        Args:
            sink: shows the text.
            written: text that the sink shows already, when an answer is continued.
            clock: seconds, for the cost of an append with its layout; by default this thread's CPU time, so that
                waiting costs nothing.
            rest: pauses for a number of seconds; by default until `close` at the latest.
            quiet: waits, not for long, while somebody types: a key that comes during a layout waits for its end.
        """
        self._sink = sink
        self._clock = clock
        self._rest = rest or self._rest_until_closed
        self._quiet = quiet
        self._text = written
        self._shown = len(written)
        self._fed = 0
        self._arrived = asyncio.Event()
        self._closed = asyncio.Event()
        self._blocks = BlockTracker()
        self._block_start = 0

    @property
    def text(self) -> str:
        """All text written so far."""
        return self._text

    def write(self, text: str) -> None:
        """Add the next piece of the answer."""
        self._text += text
        self._arrived.set()

    def close(self) -> None:
        """Mark the end of the text; `run` then finishes."""
        self._closed.set()
        self._arrived.set()

    async def run(self) -> None:
        """Feed the sink until `close`, then update it with the whole text."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._closed.is_set():
                break
            started = self._clock()
            await self._step()
            await self._sink.settle()
            await self._rest(max(SHORTEST_REST_S, REST_PER_COST * (self._clock() - started)))
            if self._quiet is not None:
                await self._quiet()
        await self._sink.update(self._text)

    async def _rest_until_closed(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return

    async def _step(self) -> None:
        self._follow_blocks()
        large = self._blocks.kind != "other" and (
            self._blocks.lines > LARGE_BLOCK_LINES or len(self._text) - self._block_start > LARGE_BLOCK_CHARACTERS
        )
        if large:
            if self._shown < self._block_start:
                await self._append_to(self._block_start)
            await self._sink.show_tail(self._text[self._shown :])
        else:
            await self._append_to(len(self._text))

    async def _append_to(self, end: int) -> None:
        fresh = self._text[self._shown : end]
        self._shown = end
        if fresh:
            await self._sink.append(fresh)
            await self._sink.show_tail("")

    def _follow_blocks(self) -> None:
        """Scan the complete lines that arrived since the last call."""
        while (end := self._text.find("\n", self._fed)) >= 0:
            kind, lines = self._blocks.kind, self._blocks.lines
            self._blocks.feed(self._text[self._fed : end])
            if self._blocks.kind != kind or self._blocks.lines <= lines:
                self._block_start = self._fed
            self._fed = end + 1
