"""Every screen: legible in each theme, without colours, from 40 × 15 to 300 × 80, resized while text arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.color import Color
from textual.color import Color as Shade
from textual.screen import ModalScreen

from app.tui.messages import QuantizeAsked
from runtime.wire.requests import QuantizeRequest
from tests.grid import grid

Stage = Callable[..., Any]
SIZES = [(120, 40), (80, 24), (40, 15)]
SCREENS = {
    "chat": (), "chats": ("ctrl+b",), "help": ("f1",), "models": ("f2",), "settings": ("f3",), "device": ("f4",),
    "this-chat": ("f5",), "log": ("f6",), "palette": ("ctrl+p",), "tokens": ("f7",), "attach": ("ctrl+o",),
    "message": ("ctrl+up", "d"),
}  # fmt: skip
DIMMING = {"this-chat", "palette", "attach"}
"""Above the chat, which is dimmed on purpose."""
AA = 4.5
"""Least contrast between a text and what is behind it, hints too: WCAG 2.2, 1.4.3, level AA."""
SCRIPTS = "Emoji 👩‍👩‍👧 🙂 · 日本語のテキスト · שלום עולם · مرحبا بالعالم · e\u0301"


def segments(s: Any) -> Iterator[Any]:
    """What is on the screen; of a dialog, without what it dims behind it."""
    screen = s.app.screen
    region = screen.children[0].region if isinstance(screen, ModalScreen) else screen.region
    for y, strip in enumerate(screen._compositor.render_strips()):
        if region.y <= y < region.bottom:
            yield from strip.crop(region.x, region.right)


def shade(color: Color) -> Shade:
    return Shade(*color.get_truecolor())


def contrasts(s: Any) -> dict[str, float]:
    """The least contrast of every piece of text on the screen."""
    found: dict[str, float] = {}
    for segment in segments(s):
        text, style = segment.text.strip(), segment.style
        if not any(map(str.isalnum, text)) or style is None or style.color is None or style.bgcolor is None:
            continue
        ratio = contrast(shade(style.color), shade(style.bgcolor))
        found[text] = min(ratio, found.get(text, ratio))
    return found


def contrast(one: Shade, other: Shade) -> float:
    """WCAG's contrast ratio."""

    def light(color: Shade) -> float:
        parts = [part / 255 for part in color.rgb]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    bright, dark = sorted((light(one), light(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


async def tour(s: Any, names: Iterable[str] = SCREENS) -> AsyncIterator[str]:
    """Show one screen after the other."""
    await s.ready()
    await s.say("Why?")
    s.app.clear_notifications()
    for name in names:
        for key in SCREENS[name]:
            await s.pilot.press(key)
            await s.settled()
        yield name
        while s.app.screen is not s.app.chat:
            s.app.pop_screen()
            await s.settled()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["dark", "light", "contrast"])
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_all_screens_can_be_read(
    stage: Stage, runtime: Any, tmp_path: Path, size: tuple[int, int], theme: str
) -> None:
    code = "```python\ndef f(x):\n    return 'a' + 1\n```"
    runtime.answers = [f"# A title\n\nA [link](x), `code`, **bold**.\n\n- one\n- two\n\n{code}"]
    async with stage(runtime, size=size, theme=theme, kept=tmp_path / "history.db") as s:
        async for name in tour(s, [name for name in SCREENS if name not in DIMMING]):
            found = contrasts(s)
            faint = {text: round(value, 1) for text, value in found.items() if value < AA}
            assert not faint, f"{name}: {faint}"


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", grid(SIZES, {(80, 24)}), ids=str)
async def test_work_can_be_read(stage: Stage, runtime: Any, size: tuple[int, int], theme: str) -> None:
    async with stage(runtime, size=size, theme=theme) as s:
        runtime.load_delay_s = 60
        s.app.post_message(QuantizeAsked(QuantizeRequest(source="owner/some-model")))
        await s.shows("▸ quantize")
        assert min(contrasts(s).values()) >= AA


@pytest.mark.slow
async def test_without_colours_everything_is_grey(
    stage: Stage, runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with stage(runtime, size=(80, 24), kept=tmp_path / "history.db") as s:
        async for name in tour(s):
            colours = {
                colour.triplet
                for strip in s.app.screen._compositor.render_strips()
                for segment in strip
                if segment.style is not None
                for colour in (segment.style.color, segment.style.bgcolor)
                if colour is not None and colour.triplet
            }
            assert {triplet for triplet in colours if len(set(triplet)) > 1} == set(), name


@pytest.mark.slow
@pytest.mark.parametrize("size", [(40, 15), (300, 80)], ids=str)
async def test_the_smallest_and_the_largest_terminal(
    stage: Stage, runtime: Any, tmp_path: Path, size: tuple[int, int]
) -> None:
    async with stage(runtime, size=size, kept=tmp_path / "history.db") as s:
        async for name in tour(s):
            lines = s.screen_text().split("\n")
            assert len(lines) == size[1], name
            assert any(line.strip() for line in lines[:4]), name


async def test_resized_while_an_answer_arrives(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    runtime.answers = ["\n".join(f"{n}. item {n} with some words" for n in range(1, 60))]
    runtime.delay_s = 0.001
    async with stage(runtime, size=(120, 40), kept=tmp_path / "history.db") as s:
        await s.ask("a list")
        for size in ((40, 15), (300, 80), (60, 18), (99, 30), (100, 30), (80, 24)):
            await s.pilot.resize_terminal(*size)
            await s.pilot.pause(0.05)
        await s.answered()
        await s.shows("59. item 59 with some words")
        view = s.transcript.view(s.last.id)
        assert view.body is not None
        assert s.last.text == runtime.answers[0]
        await s.shows("details")


@pytest.mark.parametrize("size", grid([(40, 15), (120, 40)], {(40, 15)}), ids=str)
async def test_all_scripts_in_composer_transcript_and_tokens(
    stage: Stage, runtime: Any, tmp_path: Path, size: tuple[int, int]
) -> None:
    runtime.answers = [SCRIPTS]
    async with stage(runtime, size=size, kept=tmp_path / "history.db") as s:
        await s.pilot.press(*"日本 שלום ")
        s.composer.insert("🙂")
        await s.settled()
        assert s.composer.value == "日本 שלום 🙂"
        await s.say(SCRIPTS)
        assert [message.text for message in s.app.session.conversation.path()] == [SCRIPTS, SCRIPTS]
        await s.shows("日本語")
        await s.pilot.press("f7")
        await s.shows("日本語")
        for _ in range(12):
            await s.pilot.press("right")
        await s.shows("13 of")


async def test_what_is_chosen_shows_without_colours(
    stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with stage(runtime, size=(100, 40)) as s:
        await s.pilot.press("f3")
        await s.shows("○ off")
        assert s.screen_text().count("●") == 1
        line = next(line for line in s.screen_text().split("\n") if "●" in line)
        assert line.count("○") >= 3
        await s.pilot.press("escape", "f2", "q")
        await s.shows("[ ] smooth keys")
