"""Growing Markdown, with a plain-text tail for a block that is too large to render at every token.

A model's reasoning is shown above the answer, folded.
"""

from __future__ import annotations

import asyncio
import contextlib

from markdown_it.token import Token
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.widgets import Collapsible, Label, Markdown  # noqa: TID251  the label gets code that is styled already
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from app.language import _, ngettext
from app.printable import printable
from app.tui.plain import Plain
from app.tui.widgets.flat_blocks import LIST, TABLE, FlatList, FlatTable, Parser
from runtime.text.reasoning import split_reasoning

SETTLE_S = 0.5
"""Maximum wait for a layout, in seconds."""
TAIL_PIECE_LINES = 50
"""Lines per piece of the tail; new text re-lays out only the last piece."""


DIFF = {"+": "$text-success", "-": "$text-error", "@": "$text-accent"}
"""Colours of a diff's lines by their first letter."""
DIFF_ANSI = {"+": "ansi_green", "-": "ansi_red", "@": "ansi_blue"}


def preload() -> None:
    """Import and compute what the first code block needs; called in a thread while the program is idle."""
    from textual.highlight import highlight

    Parser().parse("- a")
    highlight("x = 1", language="python")


class CopyLink(Plain):
    """A link that copies a code block."""

    def on_click(self) -> None:
        """Copy the block."""
        fence = next((one for one in self.ancestors if isinstance(one, CodeFence)), None)
        if fence is not None:
            self.app.copy_to_clipboard(fence.code)
            self.notify(_("Code copied."), timeout=2)


class CodeFence(MarkdownFence):
    """A code block with its language, a copy link, and wrapped lines."""

    def compose(self) -> ComposeResult:
        """The head, then the code."""
        with Horizontal(classes="code-head"):
            yield Plain(self.lexer or _("code"), classes="code-language")
            yield CopyLink(_("copy"), classes="code-copy")
        yield Label(self._highlighted_code, id="code-content", expand=True)

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """The code with colours; of a diff, by what is added and removed."""
        if language not in ("diff", "patch"):
            return super().highlight(code, language, ansi, dark)
        colours = DIFF_ANSI if ansi else DIFF
        return Content("\n").join(Content.styled(line, colours.get(line[:1], "")) for line in code.split("\n"))


class AnswerMarkdown(Markdown):
    """The Markdown of an answer. Only links to web addresses are opened."""

    BLOCKS = {**Markdown.BLOCKS, "fence": CodeFence, "code_block": CodeFence}  # noqa: RUF012  declared so by Textual

    def __init__(self, text: str) -> None:
        super().__init__(text, parser_factory=Parser, open_links=False)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The height without the last block's margin. A rule for `:last-child` restyles all blocks for each new one."""
        height = super().get_content_height(container, viewport, width)
        return height - self.children[-1].styles.margin.bottom if self.children else height

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Open a web address; show any other."""
        event.stop()
        if event.href.startswith(("https://", "http://")):
            self.app.open_url(event.href)
        else:
            self.notify(_("link not opened: {href}", href=event.href))

    def unhandled_token(self, token: Token) -> MarkdownBlock | None:
        """The widget for a list or table."""
        made = {LIST: FlatList, TABLE: FlatTable}.get(token.type)
        return None if made is None else made(self, token)

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        """The widget class for a kind of block."""
        found: type[MarkdownBlock] = self.BLOCKS[block_name]
        return found


class PlainTail(Vertical):
    """Plain text in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[Plain] = []

    async def show(self, text: str) -> None:
        """Show a text, which usually extends the previous one."""
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
                fresh = Plain("\n".join(piece))
                self._pieces.append(fresh)
                await self.mount(fresh)


class Reasoning(Collapsible):
    """A model's reasoning, folded."""

    def __init__(self) -> None:
        self._tail = PlainTail()
        super().__init__(self._tail, title="", collapsed=True, collapsed_symbol="▸", expanded_symbol="▾")
        self._shown = ""

    async def show(self, text: str, *, ended: bool) -> None:
        """Show the reasoning so far; hide if there is none."""
        self.display = bool(text)
        words = len(text.split())
        thought = ngettext("thought · {count:,} word", "thought · {count:,} words", words)
        self.title = thought if ended else _("thinking …")
        if text != self._shown:
            self._shown = text
            await self._tail.show(text)


class MarkdownBody(Vertical):
    """The sink of `app.tui.pump`."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        thought, answer = split_reasoning(text)
        self._given = text
        self._answer = len(answer)
        self._thought = thought
        self._reasoning: Reasoning | None = None
        self._markdown = AnswerMarkdown(printable(answer))
        self._tail = PlainTail()
        self._has_tail = False

    def compose(self) -> ComposeResult:
        """Markdown, then the tail."""
        yield self._markdown
        yield self._tail

    async def on_mount(self) -> None:
        """Show the reasoning that is already there; unfolded if there is nothing else."""
        await self._show_thought(self._thought, ended=True)
        self._unfold_alone()

    @property
    def code_blocks(self) -> list[str]:
        """The code of the blocks, from top to bottom."""
        return [fence.code for fence in self.query(CodeFence)]

    @property
    def links(self) -> list[str]:
        """The web addresses that it links to, in their order."""
        tokens = Parser().parse(self._given)
        inline = [one for token in tokens for one in (token, *token.meta.get("tokens", ()))]
        found = [str(child.attrs.get("href")) for one in inline for child in one.children or ()]
        return [link for link in dict.fromkeys(found) if link.startswith(("https://", "http://"))]

    async def append(self, text: str) -> None:
        """Add Markdown at the end."""
        self._given += text
        thought, answer = split_reasoning(self._given)
        await self._show_thought(thought, ended=bool(answer))
        fresh, self._answer = answer[self._answer :], len(answer)
        if fresh:
            await self._markdown.append(printable(fresh))

    async def show_tail(self, text: str) -> None:
        """Show plain text after the Markdown."""
        if text or self._has_tail:
            self._has_tail = bool(text)
            thought, answer = split_reasoning(self._given + text)
            await self._show_thought(thought, ended=bool(answer))
            await self._tail.show(answer[self._answer :])

    async def settle(self) -> None:
        """Wait until everything is laid out, unless the widget is gone."""
        painted = asyncio.Event()
        self.call_after_refresh(painted.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await painted.wait()

    async def update(self, text: str) -> None:
        """Show exactly this Markdown."""
        thought, answer = split_reasoning(text)
        self._given, self._answer = text, len(answer)
        with self.app.batch_update():
            await self._show_thought(thought, ended=True)
            await self._markdown.update(printable(answer))
            await self.show_tail("")
        self._unfold_alone()

    def _unfold_alone(self) -> None:
        """Unfold a thought that was never answered: it is all that there is to read."""
        if self._reasoning is not None and not self._answer:
            self._reasoning.collapsed = False

    async def _show_thought(self, text: str, *, ended: bool) -> None:
        if text and self._reasoning is None:
            self._reasoning = Reasoning()
            await self.mount(self._reasoning, before=self._markdown)
        if self._reasoning is not None:
            await self._reasoning.show(text, ended=ended)
