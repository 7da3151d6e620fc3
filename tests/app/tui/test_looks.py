"""Every screen: legible in high contrast, without colours, from 40 × 15 to 300 × 80, resized while text arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.grid import grid

Stage = Callable[..., Any]
SCREENS = {
    "chat": (), "message": ("ctrl+up", "d"), "chats": ("ctrl+b",), "help": ("f1",), "models": ("f2",),
    "settings": ("f3",), "device": ("f4",), "this-chat": ("f5",), "log": ("f6",), "palette": ("ctrl+p",),
    "tokens": ("f7",), "attach": ("ctrl+o",),
}  # fmt: skip
ABOVE = ("help", "this-chat", "palette", "attach")
"""Shown above the chat, which is dimmed on purpose."""
LEAST_CONTRAST = 4.5
"""WCAG 2.2, 1.4.3, level AA."""
SCRIPTS = "Emoji 👩‍👩‍👧 🙂 · 日本語のテキスト · שלום עולם · مرحبا بالعالم · e\u0301"


def segments(s: Any) -> Iterator[Any]:
    for strip in s.app.screen._compositor.render_strips():
        yield from strip


def luminance(colour: Any) -> float:
    parts = [part / 255 for part in colour.triplet]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(style: Any) -> float:
    low, high = sorted(luminance(colour) for colour in (style.color, style.bgcolor))
    return (high + 0.05) / (low + 0.05)


async def shown(s: Any, name: str) -> None:
    await s.ready()
    await s.say("Why?")
    s.app.clear_notifications()
    for key in SCREENS[name]:
        await s.pilot.press(key)
        await s.settled()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCREENS if name not in ABOVE])
async def test_high_contrast_is_one(stage: Stage, runtime: Any, tmp_path: Path, name: str) -> None:
    runtime.answers = ["A `word`, **bold**.\n\n- one\n- two"]
    async with stage(runtime, size=(110, 36), theme="contrast", kept=tmp_path / "history.db") as s:
        await shown(s, name)
        dim = {
            segment.text.strip(): round(contrast(segment.style), 1)
            for segment in segments(s)
            if any(letter.isalnum() for letter in segment.text)
            and segment.style.color is not None
            and segment.style.bgcolor is not None
            and segment.style.color.triplet
            and segment.style.bgcolor.triplet
            and contrast(segment.style) < LEAST_CONTRAST
        }
        assert not dim


@pytest.mark.slow
@pytest.mark.parametrize("name", SCREENS)
async def test_without_colours_everything_is_grey(
    stage: Stage, runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with stage(runtime, size=(80, 24), kept=tmp_path / "history.db") as s:
        await shown(s, name)
        colours = {
            colour.triplet
            for segment in segments(s)
            if segment.style is not None
            for colour in (segment.style.color, segment.style.bgcolor)
            if colour is not None and colour.triplet
        }
        assert {triplet for triplet in colours if len(set(triplet)) > 1} == set()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(40, 15), (300, 80)], ids=str)
@pytest.mark.parametrize("name", SCREENS)
async def test_the_smallest_and_the_largest_terminal(
    stage: Stage, runtime: Any, tmp_path: Path, name: str, size: tuple[int, int]
) -> None:
    async with stage(runtime, size=size, kept=tmp_path / "history.db") as s:
        await shown(s, name)
        lines = s.screen_text().split("\n")
        assert len(lines) == size[1]
        assert any(line.strip() for line in lines[:4])
        assert any(line.strip() for line in lines)


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
        await s.shows("●")
        line = next(line for line in s.screen_text().split("\n") if "●" in line)
        assert line.count("●") == 1
        assert line.count("○") >= 3
