"""Lists and tables in one widget each: complete and correctly laid out at any width, streamed or at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.widgets import Markdown

from app.tui.pump import Pump
from app.tui.widgets.flat_blocks import MIN_COLUMN, FlatBlock, FlatList, FlatTable, Parser, shared
from app.tui.widgets.markdown_body import AnswerMarkdown, CodeFence, MarkdownBody
from tests.grid import grid

Stage = Callable[..., Any]
NESTED = """\
- one with *some* `code` and words enough to be wrapped somewhere
- two
  1. inner 日本語
  2. inner [link](https://a.b)
     - deepest
- three

  a second paragraph
"""
MIXED = "1. before\n2. with code\n\n   ```python\n   x = 1\n   ```\n\n   - flat again\n"
TABLE = """\
| name | count | words |
|:-----|------:|:-----:|
| a | 1 | **x** |
| bcd | 12 | a long cell that is wrapped |
| e |
"""


def flat(text: str) -> FlatBlock:
    """The block that a text is."""
    [token] = Parser().parse(text)
    block = AnswerMarkdown("").unhandled_token(token)
    assert isinstance(block, FlatBlock)
    return block


def test_a_list_hangs_and_nests() -> None:
    assert flat(NESTED).flow(30).plain.split("\n") == [
        "• one with some code and words",
        "  enough to be wrapped",
        "  somewhere",
        "• two",
        "   1. inner 日本語",
        "   2. inner link",
        "      ▪ deepest",
        "• three",
        "  a second paragraph",
    ]


def test_numbers_begin_where_they_say_and_stand_below_each_other() -> None:
    assert flat("9. a\n9. b\n").flow(20).plain == "  9. a\n 10. b"


def test_an_empty_item_has_a_line() -> None:
    assert flat("- a\n-\n- c\n").flow(20).plain == "• a\n• \n• c"


def test_a_table_shares_the_width() -> None:
    assert [line.rstrip() for line in flat(TABLE).flow(60).plain.split("\n")] == [
        "name  count             words",
        "────────────────────────────────────────",
        "a         1               x",
        "bcd      12  a long cell that is wrapped",
        "e",
    ]
    narrow = flat(TABLE).flow(28).plain.split("\n")
    assert all(cell_len(line) <= 28 for line in narrow)
    assert sum(set(line) == {"─"} for line in narrow) == 3, "rows are parted where one is wrapped"
    assert "wrapped" in " ".join(narrow)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(10, 120))
@settings(max_examples=200)
def test_columns_fill_the_room_and_no_more(natural: list[int], room: int) -> None:
    widths = shared(natural, room)
    if sum(natural) <= room:
        assert widths == natural
    elif len(natural) * MIN_COLUMN <= room:
        assert sum(widths) == room
        assert all(width >= min(one, MIN_COLUMN) for width, one in zip(widths, natural, strict=True))


@given(st.text("ab -*1.|\n`", max_size=60), st.integers(5, 40))
@settings(max_examples=200)
def test_no_line_is_wider_than_the_terminal(text: str, width: int) -> None:
    for token in Parser().parse(f"| a | b | c |\n|---|---|---|\n| {text.replace(chr(10), ' ')} |\n\n{text}"):
        block = AnswerMarkdown("").unhandled_token(token)
        if isinstance(block, FlatBlock):
            assert all(cell_len(line) <= width for line in block.flow(width).plain.split("\n"))


def test_the_rows_of_a_table_of_too_many_columns_are_lists() -> None:
    columns = 20
    row = "|" + " word |" * columns
    lines = flat(f"{row}\n|{'---|' * columns}\n{row}\n{row}\n").flow(40).plain.split("\n")
    assert lines == [*["word  word"] * columns, "─" * 40, *["word  word"] * columns]


def read(text: str) -> str:
    """The words of a text, without those of code blocks."""
    breaks = {"hardbreak": "\n", "softbreak": " "}
    tokens = [one for token in Parser().parse(text) for one in token.meta.get("tokens", [token])]
    inline = [one.children for one in tokens if one.children is not None]
    return "\n".join("".join(breaks.get(one.type, one.content) for one in children) for children in inline)


ALIGNED = "\\begin{aligned}\na &= b \\\\\n  c_1 &= *d* \\,\n- e\n\\end{aligned}"


@pytest.mark.parametrize(
    "text",
    [
        r"Let \(\uint_0^1 x \, dx\) and \( a\_b \{c\} & \) be, \[ a_1 * b_1 \\ *c* \].",
        r"$x\_1 \, *y* &$, $ x \% y_1 & $, $$a\;b * c * d &$$",
        r"alone \, \; \: and \\ and \\[2pt] and \\( x \\)",
        r"still open \( x \{ y *z* \,",
        r"a price of $5 or $6, $HOME and $PATH, $$ and $$$",
        f"\\[\n{ALIGNED}\n\\]",
        f"$$\n{ALIGNED}\n= 3\n\n> f\n$$",
        ALIGNED,
        "\\[\nstill open \\{ *x*\n\n- y",
    ],
)
def test_formulas_that_have_no_form_in_unicode_are_shown_as_written(text: str) -> None:
    assert read(text) == text
    indented = text.replace("\n", "\n  ")
    assert read(f"- {indented}") == text
    assert read(f"> {text}".replace("\n", "\n> ")) == text
    if "\n" not in text:
        assert read(f"| a | b |\n|---|---|\n| {text} | {text} |") == f"a\nb\n{text}\n{text}"
        assert read(f"# {text}") == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"\*a\* \_b\_ \`c\` \# 1\. \{x\} \$5 \!\[d](e) \~ \|", "*a* _b_ `c` # 1. {x} $5 ![d](e) ~ |"),
        (r"\[a](b) and \(c) and *d*", "[a](b) and (c) and d"),
        (r"$5, **$6** and `\(a\)` and `$x$`", r"$5, $6 and \(a\) and $x$"),
        ("from $$ to **$$$** and\\\nmore", "from $$ to $$$ and\nmore"),
        ("Before\n\\[\nx\n\\] *after*\n\n*end*", "Before\nx after\nend"),
    ],
)
def test_what_is_no_formula_is_markdown(text: str, shown: str) -> None:
    assert read(text) == shown


@pytest.mark.parametrize(
    ("formula", "shown"),
    [
        (r"\(x^2 + \frac{1}{2}mv^2 \leq \alpha_i\)", "x² + (1/2)mv² ≤ αᵢ"),
        (r"\[\sum_{i=1}^{n} x_i^2 = \sqrt{\frac{a}{b}}\]", "∑ᵢ₌₁ⁿ xᵢ² = √(a/b)"),
        (r"$$\frac{-b \pm \sqrt{b^2-4ac}}{2a}$$", "(−b ± √(b²−4ac))/(2a)"),
        (r"\(\hat{y} = \text{softmax of }(W x), x \in \mathbb{R}^n\)", "ŷ = softmax of (W x), x ∈ ℝⁿ"),
        (r"$O(n \log n)$, $x$ and $\pi \in \pi r$", "O(n log n), x and π ∈ πr"),
        (r"\(\lim_{x \to 0} 2\pi r^{1+q}, 90^\circ, \left(x\right)\)", "lim_(x → 0) 2πr^(1+q), 90°, (x)"),
        *((text, text) for text in (
            "costs $5$ or $5-10$ and 5$, $a few$, $5 and 10$", r"`$x$` and `\(x\)`",
            r"\(\not= x\), \(\binom{n}{k}\), \({x\)",
            r"\(" + "{" * 3000 + "}" * 3000 + r"\)",
        )),
    ],
)  # fmt: skip
def test_formulas_become_unicode_where_they_can(formula: str, shown: str) -> None:
    assert read(formula) == shown.replace("`", "")


def test_tasks_footnotes_and_diffs() -> None:
    assert flat("- [ ] a [^1]\n- [x] b\n- c[ ] d").flow(30).plain == "☐ a ¹\n☑ b\n• c[ ] d"
    notes = read("`[^1]` [^2]\n\n[^1]: https://e.org\n[^2]: [ ] two\nlines")
    assert notes == "[^1] ²\n¹ https://e.org\n² [ ] two lines"
    spans = {span.style for span in CodeFence.highlight("@@ 1\n-a\n+b\n c", "diff").spans}
    assert {"$text-error", "$text-success"} < spans


async def test_a_formula_is_shown_as_written_while_it_comes(stage: Stage, runtime: Any) -> None:
    text = "So \\(x \\, dx\\) and\n\n\\[\na_1 \\\\\n- \\{b\\}\n\\]\n\nend."
    async with stage(runtime) as s:
        runtime.answers, runtime.hold_after = [text], 8
        await s.ask("go")
        for words in ("So x dx and", r"a_1 \\"):
            await s.shows(words)
        runtime.released.set()
        await s.answered()
        for words in ("So x dx and", r"a_1 \\", r"- \{b\}", "end."):
            await s.shows(words)
        await s.pilot.press("ctrl+up")
        await s.pilot.press("c")
        await s.until(lambda: s.app.clipboard == text)


async def answered(s: Any, runtime: Any, text: str) -> Markdown:
    runtime.answers = [text]
    await s.ready()
    await s.say("go")
    found: Markdown = s.transcript.view(s.last.id).query_one(Markdown)
    return found


async def test_links_in_them_are_followed(stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    async with stage(runtime, size=(80, 24), ready=False) as s:
        monkeypatch.setattr(s.app, "open_url", opened.append)
        text = "- see [here](https://a.b)\n- run [this](app.exit)\n\n| x |\n|---|\n| [there](https://c.d) |\n"
        shown = await answered(s, runtime, text)
        await s.click(FlatList, offset=(7, 1))
        await s.until(lambda: "link not opened: app.exit" in [one.message for one in s.app._notifications])
        await s.click(FlatList, offset=(7, 0))
        await s.until(lambda: opened == ["https://a.b"])
        await s.click(FlatTable, offset=(2, 2))
        await s.until(lambda: opened == ["https://a.b", "https://c.d"])
        assert [type(one) for one in shown.children] == [FlatList, FlatTable]


async def test_lists_keep_their_blocks_of_code_and_are_laid_out_again(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(80, 30)) as s:
        shown = await answered(s, runtime, MIXED)
        assert shown.query_one(CodeFence).code == "x = 1"
        assert shown.query_one(FlatList)
        for words in ("1. before", "2. with code", "flat again"):
            await s.shows(words)
        await answered(s, runtime, NESTED)
        await s.shows("one with some code and words enough to be wrapped somewhere")
        await s.pilot.resize_terminal(44, 30)
        await s.hides("to be wrapped somewhere")
        await s.shows("three")


def said(markdown: Markdown) -> list[tuple[str, str]]:
    """What a tree of Markdown shows, block by block."""
    found = []
    for block in markdown.query("*"):
        text = block.flow(70).plain if isinstance(block, FlatBlock) else str(getattr(block, "visual", ""))
        found.append((type(block).__name__, text))
    return found


LONG = {
    "list": "Intro\n\n" + "".join(f"{n}. item *{n}*\n" for n in range(1, 60)) + "\nAfter.\n",
    "loose": "- a\n\n- b\n\n  more of b\n- c\n\nEnd [ref].\n\n[ref]: https://a.b\n",
    "table": "| a | b |\n|---|--:|\n" + "".join(f"| {n} | `{n}` |\n" for n in range(40)) + "\ndone",
    "mixed": MIXED + "\n> - quoted\n> - list\n\n# Head\n" + TABLE,
    "nested": NESTED + "\n" + TABLE + "\n```python\nx = 1\n```\nand the rest",
}


@pytest.mark.parametrize("name", grid(LONG, {"list", "mixed"}))
async def test_what_is_streamed_ends_as_a_full_render(stage: Stage, runtime: Any, name: str) -> None:
    text = LONG[name]
    async with stage(runtime, size=(80, 24)) as s:
        await answered(s, runtime, "x")
        body = s.transcript.view(s.last.id).body
        await body.update("")
        pump = Pump(body)
        running = asyncio.create_task(pump.run())
        for at in range(0, len(text), 23):
            pump.write(text[at : at + 23])
            await s.pilot.pause(0.002)
        pump.close()
        await running
        await s.settled()
        streamed = said(body.query_one(Markdown))
        whole = MarkdownBody(text)
        await s.transcript.mount(whole)
        await s.settled()
        assert streamed == said(whole.query_one(Markdown))
