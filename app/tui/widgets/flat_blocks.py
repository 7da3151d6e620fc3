"""Markdown lists and tables as one widget each.

Textual makes four widgets for every list item and one for every table cell. At the end of an answer, or when a chat is
opened, a long list then blocks the program for seconds. These widgets lay out their text themselves: the parser passes
each list or table as one token, for which Textual calls `Markdown.unhandled_token`. A list that contains more than
paragraphs and lists, such as a code block, is left to Textual.

Formulas are shown as Unicode, or as they are written: Markdown would take backslashes, underscores and asterisks from
their LaTeX. Footnotes keep their numbers, tasks get boxes.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from textual.content import Content
from textual.css.styles import RulesMap
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock

from app.tui.widgets.formulas import unicode_of

LIST, TABLE = "flat_list", "flat_table"
"""Types of the tokens that represent a whole list or table."""
_OPENINGS = {"bullet_list_open": LIST, "ordered_list_open": LIST, "table_open": TABLE}
_IN_LISTS = ("bullet_list_", "ordered_list_", "list_item_", "paragraph_", "inline")
GAP = "  "
"""Between two columns."""
MIN_COLUMN = 4
"""Minimum width of a column in cells."""
NARROW_COLUMN = 8
"""Width in cells below which a longer text is hard to read in a column."""
MIN_TEXT = 8
"""Minimum width of a list item in cells, at any depth."""


FORMULA = "formula"
"""Type of the tokens of LaTeX."""
_FORMULA_START = re.compile(r"\\\(|\\\[|\$\$|\\begin\{\w+\*?\}")
_FORMULA_ENDS = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"}
_BRACKETS = {"\\(": "()", "\\[": "[]"}
_KEPT = ("\\\\", "\\,", "\\;", "\\:")
"""What LaTeX means by these is more likely than an escape that Markdown doesn't need."""
_FOOTNOTE = re.compile(r"\[\^[^\]\s]+\]:")
_NOTE = re.compile(r"\[\^(\d{1,3})\](:?)")
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_TASK = re.compile(r"\[([ xX])\] ")
TASKS = ("☐", "☑")
"""A task to do, and one that is done."""
_DOLLARS = re.compile(r"\$((?:[^$`\\]|\\.)+)\$(?!\d)", re.DOTALL)


class Parser(MarkdownIt):
    """A parser that merges lists and tables into one token each, and shows raw HTML and formulas as text.

    Textual would drop HTML, which is part of the model's answer.
    """

    def __init__(self) -> None:
        super().__init__("gfm-like", {"html": False})
        self.block.ruler.before(
            "fence", FORMULA, _formula_block, {"alt": ["paragraph", "reference", "blockquote", "list"]}
        )
        self.inline.ruler.before("escape", FORMULA, _formula)
        self.core.ruler.push(FORMULA, _formulas_as_text)
        self.block.ruler.before("reference", "footnote", _footnote, {"alt": ["paragraph", "reference"]})
        self.core.ruler.push("marks", _marks)

    def parse(self, src: str, env: Any = None) -> list[Token]:
        """The blocks of a text as tokens."""
        return gathered(super().parse(src, env))


def _formula_end(text: str, at: int, end: int) -> int | None:
    """Where the formula ends that begins at a position; None if none does. An open one may still be being written."""
    start = _FORMULA_START.match(text, at, end)
    if start is None:
        return _dollars_end(text, at, end)
    opening = start[0]
    closing = _FORMULA_ENDS.get(opening, opening.replace("begin", "end", 1))
    found = text.find(closing, start.end(), end)
    while found > 0 and closing[0] == "\\" and (found - len(text[:found].rstrip("\\"))) % 2:
        found = text.find(closing, found + 1, end)
    inside = text[start.end() : end if found < 0 else found]
    if opening == "$$" and ("`" in inside or "**" in inside or (found < 0 and inside[:1] != "\n")):
        return None
    if found < 0 and opening in _BRACKETS and inside[:1] != "\n" and not _balanced(inside, *_BRACKETS[opening]):
        return None  # an escaped bracket
    return end if found < 0 else found + len(closing)


def _dollars_end(text: str, at: int, end: int) -> int | None:
    """Where a formula between single dollars ends. Those of prices and variables enclose nothing like one."""
    match = _DOLLARS.match(text, at, end)
    if match is None or "**" in match[1] or not match[1].strip():
        return None
    spaces = match[1][0].isspace() + match[1][-1].isspace()
    return match.end() if spaces == 0 or (spaces == 2 and set(match[1]) & set("\\^_{=")) else None


def _balanced(text: str, left: str, right: str) -> bool:
    """Whether no bracket closes that was not opened."""
    depth = 0
    for found in re.finditer(r"\\.|.", text, re.DOTALL):
        depth += (found[0] == left) - (found[0] == right)
        if depth < 0:
            return False
    return True


def _formula(state: StateInline, silent: bool) -> bool:
    """Read a formula, or a LaTeX command that looks like an escape."""
    at = state.pos
    if state.src[at] not in "\\$":
        return False
    end = _formula_end(state.src, at, state.posMax)
    if end is None and state.src.startswith(_KEPT, at, state.posMax):
        end = at + 2
    if end is None:
        return False
    if not silent:
        state.push(FORMULA, "", 0).content = state.src[at:end]
    state.pos = end
    return True


def _formula_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Read a formula of several lines as a paragraph, whatever its lines look like."""
    first = state.src[state.bMarks[start] + state.tShift[start] : state.eMarks[start]].strip()
    opening = _FORMULA_START.match(first)
    if opening is None or opening[0] == "\\(" or state.is_code_block(start):
        return False
    closing = _FORMULA_ENDS.get(opening[0], opening[0].replace("begin", "end", 1))
    if closing in first[opening.end() :]:
        return False
    alone, line, closed = opening.end() == len(first), start + 1, False
    while line < end and not closed:
        blank = state.isEmpty(line)
        if (blank and not alone) or (not blank and state.sCount[line] < state.blkIndent):
            break
        closed = closing in state.src[state.bMarks[line] : state.eMarks[line]]
        line += 1
    if not closed and not alone:
        return False
    if silent:
        return True
    _push_paragraph(state, start, line)
    return True


def _formulas_as_text(state: StateCore) -> None:
    """Turn formulas into text. Textual merges the white space of a token, so each piece of it gets its own."""
    for token in state.tokens:
        if token.children is None:
            continue
        children = []
        for child in token.children:
            if child.type != FORMULA:
                children.append(child)
                continue
            pieces = re.findall(r"\n|\s|\S+", unicode_of(child.content))
            children += [Token("hardbreak" if piece == "\n" else "text", "", 0, content=piece) for piece in pieces]
        token.children = children


def _footnote(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Read the text of a footnote, up to an empty line or the next one, as a paragraph."""
    if not _FOOTNOTE.match(state.src, state.bMarks[start] + state.tShift[start], state.eMarks[start]):
        return False
    if silent:
        return True
    line = start + 1
    while line < end and not state.isEmpty(line):
        if _FOOTNOTE.match(state.src, state.bMarks[line] + state.tShift[line], state.eMarks[line]):
            break
        line += 1
    _push_paragraph(state, start, line)
    return True


def _push_paragraph(state: StateBlock, start: int, line: int) -> None:
    """Take the lines [start, line) as a paragraph."""
    state.push("paragraph_open", "p", 1).map = [start, line]
    inline = state.push("inline", "", 0)
    inline.content, inline.children = state.getLines(start, line, state.blkIndent, False).strip(), []
    inline.map = [start, line]
    state.push("paragraph_close", "p", -1)
    state.line = line


def _marks(state: StateCore) -> None:
    """Raise the numbers of footnotes, and draw boxes before tasks."""
    for at, token in enumerate(state.tokens):
        for child in token.children or ():
            if child.type == "text":
                child.content = _NOTE.sub(lambda found: found[1].translate(_RAISED), child.content)
        if token.children and state.tokens[at - 2].type == "list_item_open":
            first = token.children[0]
            if task := _TASK.match(first.content):
                first.content = f"{TASKS[task[1] != ' ']} {first.content[task.end() :]}"


def gathered(tokens: Sequence[Token]) -> list[Token]:
    """The tokens, with those of each list or table replaced by one whose `meta` holds them."""
    found, at = [], 0
    while at < len(tokens):
        token = tokens[at]
        kind = _OPENINGS.get(token.type)
        if kind is not None:
            close = token.type.replace("_open", "_close")
            end = next(i for i in range(at, len(tokens)) if tokens[i].type == close and tokens[i].level == token.level)
            inside = tokens[at : end + 1]
            if kind == TABLE or all(one.type.startswith(_IN_LISTS) for one in inside):
                found.append(Token(kind, "", 0, map=token.map, level=token.level, meta={"tokens": inside}))
                at = end + 1
                continue
        found.append(token)
        at += 1
    return found


class Flow(Visual):
    """The lines of a block at a given width."""

    def __init__(self, block: FlatBlock) -> None:
        self._block = block

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        """Draw the lines."""
        return self._block.flow(width).render_strips(width, height, style, options) if width else []

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:  # noqa: ARG002  the protocol has it
        """The whole container's width."""
        return container_width

    def get_height(self, rules: RulesMap, width: int) -> int:  # noqa: ARG002  the protocol has it
        """The number of lines."""
        return self._block.flow(width).plain.count("\n") + 1


class FlatBlock(MarkdownBlock):
    """A block that lays out its text itself."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"list-symbol", "table-head", "table-rule"}

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self._inline = Content("")
        self._flowed: tuple[int, Content] | None = None
        self._take(token.meta["tokens"])

    @abstractmethod
    def _take(self, tokens: Sequence[Token]) -> None:
        """Parse the tokens."""

    @abstractmethod
    def _lines(self, width: int) -> Iterator[Content]:
        """The lines for a width in cells; longer ones are cut."""

    def set_content(self, content: Content) -> None:
        """Store the content that Textual made of an inline token."""
        self._inline = content

    def _content_of(self, token: Token) -> Content:
        """The text of an inline token, with its styles and links."""
        self.build_from_token(token)
        return self._inline

    def flow(self, width: int) -> Content:
        """All lines as one text, cut where even the minimum is too wide."""
        if self._flowed is None or self._flowed[0] != width:
            lines = (
                line.truncate(width, ellipsis=True) if line.cell_length > width else line for line in self._lines(width)
            )
            self._flowed = (width, Content("\n").join(lines))
        return self._flowed[1]

    def render(self) -> Visual:
        """The lines."""
        return Flow(self)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text under a selection."""
        return selection.extract(self.flow(self.content_size.width).plain), "\n"


@dataclass(slots=True)
class Items:
    """A list."""

    start: int | None
    """Number of its first item; None for a bullet list."""
    items: list[list[Content | Items]] = field(default_factory=list)
    """What each item holds, paragraphs and lists."""

    def symbols(self, depth: int) -> list[str]:
        """The bullet or number of each item."""
        if self.start is None:
            return [Markdown.BULLETS[depth % len(Markdown.BULLETS)]] * len(self.items)
        numbers = [f"{number}. " for number in range(self.start, self.start + len(self.items))]
        longest = max(map(len, numbers), default=0)
        return [number.rjust(longest + 1) for number in numbers]

    def lines(self, width: int, depth: int = 0) -> Iterator[Content]:
        """Its lines, with a hanging indent."""
        for symbol, parts in zip(self.symbols(depth), self.items, strict=True):
            indent = Content(" " * len(symbol))
            lead = Content.styled(symbol, ".list-symbol")
            room = max(MIN_TEXT, width - len(symbol))
            if parts and isinstance(parts[0], Content) and parts[0].plain.startswith(TASKS):  # its box is its bullet
                lead, parts = lead[:0] + parts[0][:2], [parts[0][2:], *parts[1:]]
            for part in parts or [Content("")]:
                inner = depth + (self.start is None)
                for line in part.lines(room, inner) if isinstance(part, Items) else part.wrap(room):
                    yield lead + line
                    lead = indent


class FlatList(FlatBlock):
    """A bullet or numbered list, which may contain such lists."""

    def _take(self, tokens: Sequence[Token]) -> None:
        open_lists: list[Items] = []
        for token in tokens:
            if token.type in ("bullet_list_open", "ordered_list_open"):
                number = int(token.attrs.get("start", 1)) if token.type == "ordered_list_open" else None
                fresh = Items(number)
                if open_lists:
                    open_lists[-1].items[-1].append(fresh)
                open_lists.append(fresh)
            elif token.type == "list_item_open":
                open_lists[-1].items.append([])
            elif token.type == "inline":
                open_lists[-1].items[-1].append(self._content_of(token))
            elif token.type in ("bullet_list_close", "ordered_list_close"):
                self._items = open_lists.pop()

    def _lines(self, width: int) -> Iterator[Content]:
        return self._items.lines(width)


class FlatTable(FlatBlock):
    """A table whose columns share the width; rows are separated if any of them wraps.

    If that leaves too little for some column, each row is a list of its cells.
    """

    def _take(self, tokens: Sequence[Token]) -> None:
        self._rows: list[list[Content]] = []
        self._sides: list[str] = []
        for token in tokens:
            if token.type == "tr_open":
                self._rows.append([])
            elif token.type == "th_open":
                self._sides.append(str(token.attrs.get("style", "")).removeprefix("text-align:"))
            elif token.type == "inline":
                self._rows[-1].append(self._content_of(token))

    def _lines(self, width: int) -> Iterator[Content]:
        columns = len(self._sides)
        natural = [max(row[at].cell_length for row in self._rows if at < len(row)) for at in range(columns)]
        room = width - len(GAP) * (columns - 1)
        if sum(min(one, NARROW_COLUMN) for one in natural) > room:
            yield from self._records(width)
            return
        widths = shared(natural, room)
        rule = Content.styled("─" * (sum(widths) + len(GAP) * (columns - 1)), ".table-rule")
        head, *rows = [list(self._laid(row, widths)) for row in self._rows]
        yield from (line.stylize(".table-head") for line in head)
        wrapped = any(len(lines) > 1 for lines in rows)
        for at, lines in enumerate(rows):
            if wrapped or not at:
                yield rule
            yield from lines

    def _records(self, width: int) -> Iterator[Content]:
        """The rows one below the other, each cell behind its column's heading."""
        head, *rows = self._rows
        for row in rows:
            for name, cell in zip(head, row, strict=False):
                lines = (name.stylize(".table-head") + Content(GAP) + cell).wrap(width - len(GAP))
                yield from (line if not at else Content(GAP) + line for at, line in enumerate(lines))
            if row is not rows[-1]:
                yield Content.styled("─" * width, ".table-rule")

    def _laid(self, row: Sequence[Content], widths: Sequence[int]) -> Iterator[Content]:
        """The lines of a row."""
        cells = [cell.wrap(width) for cell, width in zip(row, widths, strict=False)]
        for at in range(max(map(len, cells), default=0)):
            parts = [lines[at] if at < len(lines) else Content("") for lines in cells]
            yield Content(GAP).join(
                placed(part, width, side) for part, width, side in zip(parts, widths, self._sides, strict=False)
            )


def placed(line: Content, width: int, side: str) -> Content:
    """A line of a cell, aligned left or as the table says (`right`, `center`)."""
    room = max(0, width - line.cell_length)
    left = {"right": room, "center": room // 2}.get(side, 0)
    return line.pad(left, room - left)


def shared(natural: Sequence[int], room: int) -> list[int]:
    """Column widths: the natural ones if there is room, otherwise the widest shrink first.

    Args:
        natural: width of each column's content in cells.
        room: available cells.
    """
    low, high = MIN_COLUMN, max(MIN_COLUMN, *natural)
    while low < high:  # the largest maximum width at which all columns fit
        middle = (low + high + 1) // 2
        fits = sum(min(one, middle) for one in natural) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    widths = [min(one, low) for one in natural]
    for at, one in enumerate(natural):
        if one > widths[at] and sum(widths) < room:
            widths[at] += 1
    return widths
