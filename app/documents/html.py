"""HTML: the visible text, by lines of the source. Nothing is fetched, and nesting costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

from app.documents.sections import Section

_HIDDEN = frozenset({"script", "style", "template", "noscript", "svg", "math", "select", "datalist"})
_INLINE_TAGS = """
a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark q s samp small span strike strong sub
sup time tt u var wbr
"""
_INLINE = frozenset(_INLINE_TAGS.split())


class _Text(HTMLParser):
    """Collects the visible text of a page in blocks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Section] = []
        self._said: list[str] = []
        self._line = 1
        self._hidden = ""
        self._depth = 0
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002  the base has it
        if tag in _HIDDEN and self._hidden in ("", tag):
            self._hidden, self._depth = tag, self._depth + 1
        elif tag not in _INLINE:
            self.end_block()
        self._verbatim += tag == "pre"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag not in _INLINE:
            self.end_block()

    def handle_endtag(self, tag: str) -> None:
        if tag == self._hidden:
            self._depth -= 1
            self._hidden = tag if self._depth else ""
        elif tag not in _INLINE:
            self.end_block()
        self._verbatim -= tag == "pre" and self._verbatim > 0

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._said:
            if not data.strip():
                return
            self._line = self.getpos()[0] + data[: len(data) - len(data.lstrip())].count("\n")
        self._said.append(data)

    def end_block(self) -> None:
        """End the block of text that was begun."""
        said, self._said = "".join(self._said), []
        text = said.strip("\n") if self._verbatim else " ".join(said.split())
        if text:
            self.blocks.append(Section("line", self._line, text))


def blocks(text: str) -> Iterator[Section]:
    """The blocks of visible text of a page, each with its line in the source."""
    page = _Text()
    page.feed(text)
    page.close()
    page.end_block()
    return iter(page.blocks)
