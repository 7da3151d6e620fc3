"""The pump: never loses or reorders text, limits its rate, and spares Markdown large open blocks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from app.tui.pump import LARGE_BLOCK_LINES, REST_PER_COST, SHORTEST_REST_S, BlockTracker, Pump


class RecordingSink:
    """Keeps what it was given, and can be slow."""

    def __init__(self, cost: float = 0.0, layout_cost: float = 0.0) -> None:
        self._layout_cost = layout_cost
        self.markdown = ""
        self.tail = ""
        self.final: str | None = None
        self.tails: list[str] = []
        self.shown: list[str] = []
        self.largest_append = 0
        self.now = 0.0
        self._cost = cost

    async def append(self, text: str) -> None:
        assert text
        self.markdown += text
        self.largest_append = max(self.largest_append, len(text))
        self.now += self._cost
        await asyncio.sleep(0)

    async def show_tail(self, text: str) -> None:
        self.tail = text
        if text:
            self.tails.append(text)
        self.shown.append(self.markdown + text)

    async def settle(self) -> None:
        self.now += self._layout_cost

    async def update(self, text: str) -> None:
        assert self.final is None
        self.final = text
        self.tail = ""


async def no_rest(_seconds: float) -> None:
    await asyncio.sleep(0)


async def until(predicate: Callable[[], bool]) -> None:
    """Let the pump go on until something holds."""
    for _ in range(1000):
        if predicate():
            return
        await asyncio.sleep(0)
    raise AssertionError("waited in vain")


async def pumped(pieces: list[str], **options: object) -> RecordingSink:
    sink = RecordingSink()
    pump = Pump(sink, rest=no_rest, **options)  # type: ignore[arg-type]
    running = asyncio.create_task(pump.run())
    for piece in pieces:
        pump.write(piece)
        for _ in range(4):
            await asyncio.sleep(0)
    pump.close()
    await asyncio.wait_for(running, 5)
    return sink


LONG_LIST = "Intro\n\n" + "".join(f"- item {n}\n" for n in range(200)) + "\nAfter the list.\n\nEnd"
FENCE = "a\n\n```python\n" + "x = 1\n" * 100 + "```\n\nlast words"
TABLE = "| a | b |\n|---|---|\n" + "".join(f"| {n} | {n} |\n" for n in range(100)) + "\ndone"
WILD = "# 見出し\n\n🙂 emoji\n\n~~~~\n```\nnot the end\n~~~~\n1) one\n\n   more\n2) two\n\nplain `a|b`\n```unfinished"


@pytest.mark.parametrize(
    "text", [LONG_LIST, FENCE, TABLE, WILD, "", "one line"], ids=["list", "fence", "table", "wild", "empty", "line"]
)
@pytest.mark.parametrize("seed", range(5))
async def test_nothing_is_lost_or_reordered(text: str, seed: int) -> None:
    generator = random.Random(seed)
    pieces, at = [], 0
    while at < len(text):
        size = generator.choice([1, 2, 3, 7, 40])
        pieces.append(text[at : at + size])
        at += size
    sink = await pumped(pieces)
    assert sink.final == text
    for shown in sink.shown:
        assert text.startswith(shown)
    assert text.startswith(sink.markdown)


@pytest.mark.parametrize("text", [LONG_LIST, FENCE, TABLE], ids=["list", "fence", "table"])
async def test_a_large_open_block_is_plain_until_it_closes(text: str) -> None:
    sink = await pumped(text.splitlines(keepends=True))
    assert sink.tails
    assert sink.tail == ""
    assert sink.markdown.rstrip("\n") == text.rstrip("\n")
    # While the block is open, Markdown gets no more than its first lines ...
    assert all(len(tail) < len(text) for tail in sink.tails)
    # ... and once it closes, the rest in one go.
    assert sink.largest_append > len(text) / 2


async def test_what_stands_before_a_large_block_is_rendered() -> None:
    sink = await pumped(["Intro **bold**\n\n" + "- item\n" * 60])
    assert sink.markdown == "Intro **bold**\n\n"
    assert sink.tails == ["- item\n" * 60]


async def test_a_small_block_is_rendered_as_it_comes() -> None:
    sink = await pumped([f"- item {n}\n" for n in range(LARGE_BLOCK_LINES - 2)])
    assert sink.tails == []


async def test_it_rests_in_proportion_to_what_an_append_costs() -> None:
    sink = RecordingSink(cost=0.25, layout_cost=0.25)
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await asyncio.sleep(0)

    pump = Pump(sink, clock=lambda: sink.now, rest=rest)
    running = asyncio.create_task(pump.run())
    pump.write("slow")
    await until(lambda: len(rests) == 1)
    sink._cost = sink._layout_cost = 0.0
    pump.write(" fast")
    await until(lambda: len(rests) == 2)
    pump.close()
    await running
    assert rests == [REST_PER_COST * 0.5, SHORTEST_REST_S]


async def test_closing_cuts_a_rest_short() -> None:
    sink = RecordingSink(cost=1000.0)
    pump = Pump(sink, clock=lambda: sink.now)
    running = asyncio.create_task(pump.run())
    pump.write("a")
    await until(lambda: sink.markdown == "a")
    pump.write("b")
    pump.close()
    await asyncio.wait_for(running, 5)
    assert sink.final == "ab"


async def test_a_continued_answer_is_not_shown_twice() -> None:
    sink = RecordingSink()
    pump = Pump(sink, written="before ", rest=no_rest)
    running = asyncio.create_task(pump.run())
    pump.write("after")
    await until(lambda: sink.markdown == "after")
    pump.close()
    await running
    assert sink.final == pump.text == "before after"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (["text"], "other"),
        (["- a", "", "  more"], "list"),
        (["- a", "", "text"], "other"),
        (["- a", "lazy"], "list"),
        (["1. a", "2. b"], "list"),
        (["```py", "- a", "| b |"], "fence"),
        (["```py", "x", "```"], "other"),
        (["````", "```"], "fence"),
        (["~~~", "```"], "fence"),
        (["```", "``` not an end"], "fence"),
        (["`` `a` ``"], "other"),
        (["| a |", "|---|"], "table"),
        (["| a |", ""], "other"),
        (["- a", "```"], "fence"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_the_open_block_is_recognized(lines: list[str], kind: str) -> None:
    tracker = BlockTracker()
    for line in lines:
        tracker.feed(line)
    assert tracker.kind == kind
