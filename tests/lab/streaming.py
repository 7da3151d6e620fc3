"""Speed of the terminal UI with a stream of nasty documents: `python -m tests.lab.streaming [--speed N]`.

One long list, one wide table, one long fence and prose arrive at so many tokens a second in a chat of the real screen,
in a headless terminal. Measured is how late a timer of 5 ms comes (the event loop's lag), and whether what is shown at
the end is what a full render shows. Prints a table; ends with 1 where a document differs, or where 5 in 100 ticks are
later than the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from textual.widgets import Markdown

from app.tui.preload import preload
from app.tui.widgets.flat_blocks import FlatBlock

LIMIT_MS = 30.0
"""Lag of the event loop that 95 of 100 ticks may have at most."""
TICK_S = 0.005
PIECE = 4
"""Characters of a token."""


def documents(characters: int) -> Mapping[str, str]:
    """Markdown of about so many characters, each of one nasty kind."""
    rows = characters // 40
    return {
        "list": "".join(f"{n}. item number {n} with *some* words\n" for n in range(1, rows + 1)),
        "table": "| a | b | c |\n|---|---|---|\n" + "".join(f"| {n} | `x{n}` | some words |\n" for n in range(rows)),
        "fence": "```python\n" + "".join(f"value_{n} = function({n}, 'text')  # note\n" for n in range(rows)) + "```\n",
        "prose": "".join(
            f"Sentence {n} with **bold** words and 日本語 🙂.{' ' if n % 5 else chr(10) * 2}" for n in range(rows)
        ),
    }


async def measured(scripted: ModuleType, text: str, speed: float) -> tuple[list[float], bool, float]:
    """Stream one document.

    Returns:
        Lags in milliseconds, whether the end is a full render's, seconds of the stream.
    """
    runtime = scripted.Runtime()
    app = scripted.make_app(runtime)
    lags: list[float] = []

    async def paced(*_: Any) -> Any:
        from app.protocol import ChatDelta

        begin = time.perf_counter()
        for at in range(0, len(text), PIECE):
            yield ChatDelta(text=text[at : at + PIECE])
            await asyncio.sleep(max(0.0, begin + (at / PIECE + 1) / speed - time.perf_counter()))
        yield ChatDelta(text="", finish_reason="stop", timings=runtime.timings)

    scripted.Client.chat = paced  # type: ignore[attr-defined]
    async with app.run_test(size=(120, 40)) as pilot:
        stage = scripted.Stage(app, pilot, runtime)
        await stage.ready()

        async def tick() -> None:
            while True:
                begin = time.perf_counter()
                await asyncio.sleep(TICK_S)
                lags.append(1000 * (time.perf_counter() - begin - TICK_S))

        await asyncio.to_thread(preload, freeze=True)  # as the program does outside tests
        await stage.ask("go")
        begin = time.perf_counter()
        ticking = asyncio.create_task(tick())
        writing = app.session.answers.of(app.session.conversation.id)
        assert writing is not None
        assert writing.task is not None
        await asyncio.wait([writing.task])
        took = time.perf_counter() - begin
        ticking.cancel()
        await stage.answered()
        shown = stage.transcript.view(stage.last.id).query_one(Markdown)
        streamed = blocks_of(shown)
        source = shown.source
        await shown.update(text)
        await stage.settled()
        same = source == text == stage.last.text and streamed == blocks_of(shown)
    return lags, same, took


def blocks_of(shown: Markdown) -> list[tuple[str, str]]:
    """What a tree of Markdown shows: kind and text of each block."""
    return [
        (type(one).__name__, one.flow(80).plain if isinstance(one, FlatBlock) else str(getattr(one, "visual", "")))
        for one in shown.query("*")
    ]


def scripted_runtime() -> ModuleType:
    """The script of the UI's tests."""
    file = Path(__file__).parents[1] / "app" / "tui" / "conftest.py"
    spec = importlib.util.spec_from_file_location("scripted_runtime", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["scripted_runtime"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Measure every document, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", type=float, default=150.0, help="tokens a second")
    parser.add_argument("--characters", type=int, default=6000, help="length of a document")
    parsed = parser.parse_args()
    scripted, good = scripted_runtime(), True
    print(f"{'document':<10}{'tokens/s':>10}{'lag p50':>10}{'p95':>10}{'max, ms':>10}  the end")
    for name, text in documents(parsed.characters).items():
        lags, same, took = asyncio.run(measured(scripted, text, parsed.speed))
        lags.sort()
        p50, p95 = lags[len(lags) // 2], lags[int(0.95 * len(lags))]
        good = good and same and p95 <= LIMIT_MS
        reached = len(text) / PIECE / took
        end = "as a full render" if same else "DIFFERS"
        print(f"{name:<10}{reached:>10.0f}{p50:>10.1f}{p95:>10.1f}{lags[-1]:>10.1f}  {end}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
