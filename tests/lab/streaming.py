"""Speed of the terminal UI with a stream of nasty documents: `python -m tests.lab.streaming [--speed N]`.

One long list, one wide table, one long fence and prose arrive at so many tokens a second in a chat of the real screen,
in a headless terminal. Measured is how late a timer of 5 ms comes (the event loop's lag), and whether what is shown at
the end is what a full render shows. Then keys are typed into the same chat behind 200 messages, in a terminal of its
own (120 x 40): how long until a key's letter is there. Prints tables; ends with 1 where a document differs, or where 5
in 100 ticks or keys are later than their limits.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import importlib.util
import os
import pty
import struct
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from textual.widgets import Markdown

from app.tui.preload import preload
from app.tui.widgets.flat_blocks import FlatBlock
from tests.lab.start import until

LIMIT_MS = 30.0
"""Lag of the event loop that 95 of 100 ticks may have at most."""
KEY_LIMIT_MS = 50.0
"""Time to the screen that 95 of 100 keys may take at most."""
LETTERS = "".join(map(chr, range(0x0400, 0x0460))) * 2
"""What is typed: no document has Cyrillic letters."""
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
    app, runtime = streams(scripted, text, speed)
    lags: list[float] = []
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


def streams(scripted: ModuleType, text: str, speed: float) -> tuple[Any, Any]:
    """The application, whose every answer is `text` at `speed` tokens a second, and its scripted runtime."""
    runtime = scripted.Runtime()

    async def paced(*_: Any) -> Any:
        from app.protocol import ChatDelta

        begin = time.perf_counter()
        for at in range(0, len(text), PIECE):
            yield ChatDelta(text=text[at : at + PIECE])
            await asyncio.sleep(max(0.0, begin + (at / PIECE + 1) / speed - time.perf_counter()))
        yield ChatDelta(text="", finish_reason="stop", timings=runtime.timings)

    scripted.Client.chat = paced  # type: ignore[attr-defined]
    return scripted.make_app(runtime), runtime


def typed(scripted: ModuleType, text: str, speed: float, earlier: int = 200) -> list[float]:
    """Type `LETTERS` while a document streams behind so many messages; milliseconds from each key to its letter."""
    child, terminal = pty.fork()
    if child == 0:
        asyncio.run(behind(streams(scripted, text, speed)[0], earlier))
        os._exit(0)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    took = []
    try:
        until(terminal, "What is it?", 20.0)
        os.write(terminal, b"go\r")
        until(terminal, "", 2.0)
        for letter in LETTERS:
            os.write(terminal, letter.encode())
            took.append(1000 * until(terminal, letter, 5.0))
            os.write(terminal, b"\x7f")
            until(terminal, "", 0.1)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(terminal)
    return took


async def behind(app: Any, earlier: int) -> None:
    """Run the application, with so many messages in its chat."""
    running = asyncio.ensure_future(app.run_async())
    while not app.session.ready:  # noqa: ASYNC110  there is no event for it
        await asyncio.sleep(0.05)
    conversation = app.session.conversation
    for _ in range(earlier // 2):
        asked = conversation.add("user", "What is it?", parent=conversation.head)
        conversation.add("assistant", "It *is* what `it` is.\n\n- one\n- two", parent=asked.id)
    app.call_later(app.chat.transcript.reopen)
    await running


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
    print(f"\n{'typed into':<10}{'keys':>10}{'p50':>10}{'p95':>10}{'max, ms':>10}")
    for name, text in documents(60 * parsed.characters).items():
        keys = sorted(typed(scripted, text, parsed.speed))
        p50, p95 = keys[len(keys) // 2], keys[int(0.95 * len(keys))]
        good = good and p95 <= KEY_LIMIT_MS
        print(f"{name:<10}{len(keys):>10}{p50:>10.1f}{p95:>10.1f}{keys[-1]:>10.1f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
