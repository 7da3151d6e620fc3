"""Pictures of every screen at several sizes in three themes: `python -m tests.bench.screens FOLDER [--only NAME]`.

Writes SVG files, `NAME-WIDTHxHEIGHT-THEME.svg`, of the real screens over the scripted runtime of the UI's tests.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.streaming import scripted_runtime

SIZES = ((120, 40), (80, 24), (60, 18), (40, 15))
THEMES = ("dark", "light", "contrast")
ANSWER = """<think>
Which channels have large activations?
</think>

A channel with a **large activation** multiplies its `weight error`:

1. few channels are large
2. they change from token to token

```python
def error(weights, activations, quantize, scale=1.0, groups=64, symmetric=False, clip=True):
    return (weights - quantize(weights)) @ activations
```

| bits | loss |
|---|---|
| 3 | 5.1 |
| 4 | 4.8 |
"""
KEYS: Mapping[str, tuple[str, ...]] = {
    "empty": (), "answer": (), "message": ("ctrl+up", "d"), "chats": ("ctrl+b",), "help": ("f1",), "models": ("f2",),
    "quantize": ("f2", "q"), "settings": ("f3",), "device": ("f4",), "this-chat": ("f5",), "log": ("f6",),
    "palette": ("ctrl+p",), "tokens": ("f7",),
}  # fmt: skip
"""What is pressed for each picture."""


async def picture(scripted: Any, name: str, size: tuple[int, int], theme: str, folder: Path) -> Path:
    """Take one picture.

    Returns:
        Its file.
    """
    runtime = scripted.Runtime(answers=[ANSWER, "Another answer, beside the first.", ANSWER])
    with tempfile.TemporaryDirectory() as home:
        app = scripted.make_app(runtime, kept=Path(home) / "history.db", theme=theme)
        async with app.run_test(size=size) as pilot:
            stage = scripted.Stage(app, pilot, runtime)
            stage.composer.cursor_blink = False
            await stage.ready()
            if name != "empty":
                await stage.ask("Why do activation outliers matter?")
                await stage.answered()
                for _ in range(2):
                    await app.action_regenerate()
                    await stage.answered()
            app.clear_notifications()
            for key in KEYS[name]:
                await pilot.press(key)
                await stage.settled()
            await pilot.pause(0.3)
            file = folder / f"{name}-{size[0]}x{size[1]}-{theme}.svg"
            file.write_text(app.export_screenshot(title="lowbit-chat"), encoding="utf-8")
            return file


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=sorted(KEYS), help="one screen alone")
    parsed = parser.parse_args()
    parsed.folder.mkdir(parents=True, exist_ok=True)
    scripted = scripted_runtime()
    for name in [parsed.only] if parsed.only else KEYS:
        for size in SIZES:
            for theme in THEMES:
                print(asyncio.run(picture(scripted, name, size, theme, parsed.folder)))


if __name__ == "__main__":
    main()
