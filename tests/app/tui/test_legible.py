"""Legibility of every screen in every theme and at three sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rich.color import Color
from textual.color import Color as Shade
from textual.screen import ModalScreen

from app.tui.messages import QuantizeAsked
from runtime.wire.requests import QuantizeRequest

SIZES = [(120, 40), (80, 24), (40, 15)]
SCREENS = {"chat": (), "models": ("f2",), "settings": ("f3",), "device": ("f4",), "keys": ("f1",), "log": ("f6",)}
LEAST_CONTRAST = 2.0
"""Between the text and what is behind it, of hints and of what can't be used; WCAG's ratio."""
LEAST_MEDIAN = 4.5
"""Of most of the text: WCAG's AA."""


def shade(color: Color) -> Shade:
    return Shade(*color.get_truecolor())


def contrasts(app: Any) -> dict[str, float]:
    """The contrast of every piece of text on the screen; of a dialog, without what it dims behind it."""
    found = {}
    screen = app.screen
    region = screen.children[0].region if isinstance(screen, ModalScreen) else screen.region
    for y, strip in enumerate(screen._compositor.render_strips()):
        for segment in strip.crop(region.x, region.right) if region.y <= y < region.bottom else ():
            text, style = segment.text.strip(), segment.style
            if not any(map(str.isalnum, text)) or style is None or style.color is None or style.bgcolor is None:
                continue
            front, back = shade(style.color), shade(style.bgcolor)
            front, back = (back, front) if style.reverse else (front, back)
            found[text] = ratio(front, back)
    return found


def ratio(front: Shade, back: Shade) -> float:
    """WCAG's contrast ratio."""

    def light(color: Shade) -> float:
        parts = [part / 255 for part in color.rgb]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    bright, dark = sorted((light(front), light(back)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_all_screens_can_be_read(
    stage: Callable[..., Any], runtime: Any, size: tuple[int, int], theme: str
) -> None:
    runtime.answers = ["# A title\n\nA [link](x), `code`, **bold**.\n\n```python\ndef f(x):\n    return 'a' + 1\n```"]
    async with stage(runtime, size=size, theme=theme) as s:
        await s.ready()
        await s.ask("Hello?")
        await s.answered()
        for name, keys in SCREENS.items():
            await s.pilot.press(*keys)
            await s.settled()
            found = contrasts(s.app)
            faint = {text: round(value, 1) for text, value in found.items() if value < LEAST_CONTRAST}
            assert not faint, f"{name}: {faint}"
            assert sorted(found.values())[len(found) // 2] >= LEAST_MEDIAN, name
            if name != "chat":
                await s.pilot.press("escape")
                await s.until(lambda: s.app.screen is s.app.chat)


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_work_can_be_read(stage: Callable[..., Any], runtime: Any, size: tuple[int, int], theme: str) -> None:
    async with stage(runtime, size=size, theme=theme) as s:
        await s.ready()
        runtime.load_delay_s = 60
        s.app.post_message(QuantizeAsked(QuantizeRequest(source="owner/some-model")))
        await s.shows("▸ quantize")
        assert min(contrasts(s.app).values()) >= LEAST_CONTRAST
