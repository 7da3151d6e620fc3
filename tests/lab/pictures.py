"""Pictures of the real program for README and documentation: runs it, and draws its terminal.

    python -m tests.lab.pictures --model smollm2-135m

Everything in them is real: the model answers, the tuner has measured. The model has to be there already; `demo` is the
bundled one.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

from textual.pilot import Pilot

from app import paths
from app.settings import load
from app.tui.app import ChatApp

OUT = Path(__file__).resolve().parents[2] / "docs" / "pictures"
QUESTIONS = ("Write a Python function that adds two numbers.", "Why is the sky blue?")
SIZE = (100, 30)
PATIENCE_S = 900.0
_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)


async def until(pilot: Pilot[None], true: Callable[[], object]) -> None:
    """Wait, while the program runs, until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("the program did not get there in time")
        await pilot.pause(0.1)


def draw(app: ChatApp, file: Path) -> None:
    """Write what the terminal shows; its letters are those of whoever looks at it, nothing is fetched for it."""
    text = _FONT.sub("", app.export_screenshot(title="lowbit-chat"))
    file.write_text(text.replace("Fira Code", "monospace"), encoding="utf-8")
    print(file)


async def ask(app: ChatApp, pilot: Pilot[None], question: str) -> None:
    """Ask, and wait for the answer."""
    session = app.session
    before = session.conversation.head
    app.chat.composer.load_text(question)
    await pilot.press("enter")
    await until(pilot, lambda: session.conversation.head != before and not app.chat.busy)
    await until(pilot, lambda: session.ready and not session.working)
    app.clear_notifications()


async def pictures(model: str, folder: Path) -> None:
    """Draw the chat, the models, the settings and the device."""
    app = ChatApp(load({"model": model}))
    async with app.run_test(size=SIZE) as pilot:
        app.chat.composer.cursor_blink = False
        await until(pilot, lambda: app.session.ready and not app.session.working)
        for question in QUESTIONS:
            await ask(app, pilot, question)
        await pilot.pause(1.0)
        draw(app, folder / "chat.svg")
        for key, name in (("f2", "models"), ("f3", "settings"), ("f4", "device")):
            await pilot.press(key)
            await until(pilot, lambda: all(found.display for found in app.screen.query("#models-found")))
            await pilot.pause(2.0)
            draw(app, folder / f"{name}.svg")
            await pilot.press("escape")
            await pilot.pause(0.5)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help=f"a stored model (those in {paths.store_root()})")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the SVG files")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(pictures(asked.model, asked.out))


if __name__ == "__main__":
    main()
