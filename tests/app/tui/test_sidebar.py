"""The sidebar: chats by day, the current one marked, searched, renamed, pinned, deleted and restored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, OptionList

from app import settings
from app.history.store import Chat, History
from app.tui.screens.chats import ChatsScreen
from app.tui.screens.sidebar import Sidebar, grouped_by_day
from tests.app.tui.kept import keep_chats

Stage = Callable[..., Any]
WIDE = (120, 30)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Two chats that were had before."""
    chats = (("Why is the sky blue?", "Rayleigh scattering."), ("A trip to Porto 日本語", "Tram."))
    return keep_chats(tmp_path / "history.db", chats)


def titles(path: Path) -> list[str]:
    with closing(History(path)) as history:
        return [chat.title for chat in history.chats()]


async def begun(s: Any) -> Sidebar:
    await s.ready()
    await s.shows("Today", "sky blue")
    sidebar: Sidebar = s.app.chat.query_one(Sidebar)
    return sidebar


async def test_it_stands_beside_the_chat_where_there_is_room(stage: Stage, runtime: Any, kept: Path) -> None:
    async with stage(runtime, size=WIDE, kept=kept) as s:
        sidebar = await begun(s)
        await s.pilot.press("ctrl+b")
        assert isinstance(s.app.focused, Input), "the first ^B goes there"
        await s.pilot.press("ctrl+b")
        await s.until(lambda: not sidebar.display, "the second ^B hides it")
        assert s.app.focused is s.composer
        await s.pilot.press("ctrl+b")
        await s.shows("sky blue")
        await s.pilot.resize_terminal(80, 24)
        await s.hides("sky blue")
        s.composer.focus()
        await s.pilot.press("ctrl+b")
        await s.until(lambda: isinstance(s.app.screen, ChatsScreen), "the screen of its own")


@pytest.mark.parametrize(("before", "after"), [(WIDE, (130, 40)), ((80, 24), WIDE)], ids=["larger", "room for it now"])
async def test_another_size_of_the_terminal_fills_it_once(
    stage: Stage, runtime: Any, kept: Path, monkeypatch: pytest.MonkeyPatch, before: Any, after: Any
) -> None:
    searched: list[str] = []
    find = Sidebar._find

    async def count(sidebar: Sidebar, text: str) -> None:
        searched.append(text)
        await find(sidebar, text)

    async with stage(runtime, size=before, kept=kept) as s:
        await s.ready()
        await s.settled()
        monkeypatch.setattr(Sidebar, "_find", count)
        await s.pilot.resize_terminal(*after)
        await s.shows("sky blue")
        await s.settled()
        assert searched == [""]


async def test_whether_it_is_shown_is_remembered(stage: Stage, runtime: Any, kept: Path) -> None:
    async with stage(runtime, size=WIDE, kept=kept) as s:
        sidebar = await begun(s)
        await s.pilot.press("ctrl+b", "ctrl+b")
        await s.until(lambda: settings.load().sidebar == "off")
        assert not sidebar.display
    async with stage(runtime, size=WIDE, kept=kept, sidebar=settings.load().sidebar) as s:
        await s.settled()
        assert not s.app.chat.query_one(Sidebar).display
        await s.pilot.press("ctrl+b")
        await s.until(lambda: settings.load().sidebar == "on")
        await s.shows("sky blue")


async def test_without_kept_chats_there_is_none(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=WIDE) as s:
        assert not s.app.chat.query_one(Sidebar).display
        assert s.app.focused is s.composer, "what is typed first goes there"


async def test_chats_are_found_and_opened_by_key_and_mouse(stage: Stage, runtime: Any, kept: Path) -> None:
    async with stage(runtime, size=WIDE, kept=kept) as s:
        await begun(s)
        await s.pilot.press("ctrl+b", *"rayl")
        await s.hides("Porto")
        await s.shows("sky blue", "    Rayleigh scattering.")
        (line,) = s.app.chat.query_one("#sidebar-chats", OptionList).options[1:]
        assert [line.prompt.plain[span.start : span.end] for span in line.prompt.spans] == ["Rayleigh"]
        await s.pilot.press(*"zzz")
        await s.shows("no matches")
        await s.pilot.press("escape")
        await s.shows("Porto")
        await s.pilot.press("escape")
        assert s.app.focused is s.composer
        await s.pilot.press("ctrl+b", "down", "down", "enter")
        await s.until(lambda: len(s.app.session.conversation) == 2, "a chat")
        await s.shows("▸ ")
        first = s.app.session.conversation.id
        lines = [line[:28] for line in s.screen_text().split("\n")]
        row = next(y for y, line in enumerate(lines) if ("sky" in line or "Porto" in line) and "▸" not in line)
        await s.click(offset=(6, row))
        await s.until(lambda: s.app.session.conversation.id != first, "the other one")
        await s.until(lambda: s.app.focused is s.composer, "the composer to have the keys")


async def test_an_answer_goes_on_while_another_chat_is_in_sight(stage: Stage, runtime: Any, kept: Path) -> None:
    runtime.hold_after = 2
    async with stage(runtime, size=WIDE, kept=kept) as s:
        await begun(s)
        await s.ask("A slow one")
        await s.until(lambda: s.last.text, "its first words")
        await s.shows("▸ A slow one")
        await s.pilot.press("ctrl+b", *"porto", "enter")
        await s.shows("Tram.", "… A slow one")
        runtime.released.set()
        await s.hides("… A slow one")
        await s.shows("A slow one")


async def test_rename_pin_delete_and_have_back(stage: Stage, runtime: Any, kept: Path) -> None:
    async with stage(runtime, size=WIDE, kept=kept) as s:
        await begun(s)
        listed = s.app.chat.query_one("#sidebar-chats", OptionList)
        await s.pilot.press("ctrl+b", "down")
        await s.until(lambda: s.app.focused is listed, "the list")
        await s.pilot.press("end", "p")
        await s.shows("Pinned")
        await s.pilot.press("home", "r")
        await s.shows("Chat title")
        s.app.screen.query_one(Input).value = "Skies"
        await s.pilot.press("enter")
        await s.shows("  Skies")
        await s.until(lambda: s.app.focused is listed, "the list")
        await s.pilot.press("d")
        await s.hides("  Skies")
        await s.pilot.press("u")
        await s.shows("  Skies")
    assert titles(kept) == ["Skies", "A trip to Porto 日本語"]


def test_days() -> None:
    now = datetime(2026, 1, 20, 12, tzinfo=UTC).astimezone()

    def chat(days: int, *, pinned: bool = False) -> Chat:
        then = now - timedelta(days=days)
        return Chat(id=str(days), title=str(days), model=None, pinned=pinned, created=then, updated=then, head=None)

    chats = [chat(3, pinned=True), chat(0), chat(1), chat(4), chat(20), chat(90)]
    found = [(name, [one.id for one in group]) for name, group in grouped_by_day(chats, now)]
    assert found == [
        ("Pinned", ["3"]), ("Today", ["0"]), ("Yesterday", ["1"]), ("Last 7 days", ["4"]), ("Last month", ["20"]),
        ("Older", ["90"]),
    ]  # fmt: skip
