"""Saving and finding chats from the terminal UI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from app.conversation import Conversation
from app.errors import HistoryError
from app.history.store import History
from app.tui.background_history import BackgroundHistory
from app.tui.screens.chats import ChatsScreen, ChatTable, when
from tests.app.tui.kept import keep_chats
from tests.grid import grid

Stage = Callable[..., Any]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Two chats that were had before."""
    chats = (("Why is the sky blue?", "Rayleigh scattering."), ("A trip to Porto", "Take the tram."))
    return keep_chats(tmp_path / "history.db", chats, model="tiny-3bit")


async def told(s: Any, text: str) -> None:
    """Wait for a notification."""
    await s.until(lambda: any(text in note.message for note in s.app._notifications), f"{text!r} to be told")


async def listed(s: Any) -> ChatTable:
    """Open the list, and wait until it is filled."""
    await s.pilot.press("ctrl+b")
    await s.until(lambda: isinstance(s.app.screen, ChatsScreen), "the chats")
    table: ChatTable = s.app.screen.query_one(ChatTable)
    await s.until(lambda: table.row_count, "rows")
    await s.settled()
    return table


async def test_what_was_just_said_is_read_at_once(tmp_path: Path) -> None:
    errors: list[str] = []
    kept, conversation = BackgroundHistory(tmp_path / "history.db", errors.append), Conversation()
    await kept.chats()
    for count in range(50):
        kept.record(conversation, conversation.add("user", f"line {count}", parent=conversation.head))
        assert len(await kept.messages(conversation.id)) == count + 1
    await kept.close()
    assert errors == []


async def test_a_cancelled_caller_leaves_no_file_open(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[History] = []
    begin = History.__init__

    def slowly(history: History, path: Path) -> None:
        time.sleep(0.05)
        opened.append(history)
        begin(history, path)

    monkeypatch.setattr(History, "__init__", slowly)
    chats = BackgroundHistory(kept, pytest.fail)
    for _ in range(3):
        asking = asyncio.create_task(chats.chats())
        await asyncio.sleep(0.01)
        asking.cancel()
    await chats.close()
    assert len(opened) == 1
    with pytest.raises(HistoryError, match="closed"):
        opened[0].chats()
    with pytest.raises(HistoryError, match="closed"):
        await chats.chats()


def titles(path: Path) -> list[str]:
    with closing(History(path)) as history:
        return [chat.title for chat in history.chats()]


async def test_what_is_said_is_there_next_time(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    path = tmp_path / "home" / "history.db"
    async with stage(runtime, kept=path) as s:
        await s.say("What is a residual?")
        await s.pilot.press("ctrl+n")
        await s.until(lambda: not len(s.app.session.conversation), "a new chat")
        await s.say("And now for something else")
    assert titles(path) == ["And now for something else", "What is a residual?"]
    assert not [call for call in runtime.calls if call[0] == "forget"]
    async with stage(runtime, kept=path) as s:
        await listed(s)
        await s.pilot.press("down", "down", "enter")
        await s.shows("Hello from the script.", "What is a residual?")
        await s.say("Go on")
        assert [message.text for message in s.app.session.conversation.path()][::2] == ["What is a residual?", "Go on"]
    assert titles(path) == ["What is a residual?", "And now for something else"]


async def test_a_chat_is_found_as_one_types(stage: Stage, runtime: Any, kept: Path) -> None:
    async with stage(runtime, kept=kept) as s:
        table = await listed(s)
        assert table.row_count == 2
        await s.pilot.press(*"tram")
        await s.until(lambda: table.row_count == 1, "one row")
        await s.shows("Take the tram.")
        await s.pilot.press(*"xyz")
        await s.shows("No message contains all these words.")
        await s.pilot.press("escape")
        await s.until(lambda: table.row_count == 2, "all rows")
        await s.pilot.press(*"rayl", "enter")
        await s.until(lambda: not isinstance(s.app.screen, ChatsScreen), "the chat")
        await s.shows("Rayleigh scattering.")
        await told(s, "This chat uses tiny-3bit, which is loaded when you send a message.")


async def test_a_key_is_kept_while_the_chats_are_read(stage: Stage, runtime: Any, kept: Path) -> None:
    """Enter means the match of what was typed, even before it is found, and in the table the row that is shown."""
    async with stage(runtime, kept=kept) as s:
        history, read = s.app.session.history, asyncio.Event()

        def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
            async def held(*args: Any) -> Any:
                await read.wait()
                return await call(*args)

            return held

        await listed(s)
        history.search, history.chats = slowly(history.search), slowly(history.chats)
        await s.pilot.press(*"rayl", "enter")
        assert isinstance(s.app.screen, ChatsScreen)
        read.set()
        await s.until(lambda: not isinstance(s.app.screen, ChatsScreen), "the chat")
        await s.shows("Rayleigh scattering.")
        await listed(s)
        read.clear()
        await s.pilot.press("down")
        s.app.screen.refill()
        await s.pilot.press("enter")
        await s.until(lambda: not isinstance(s.app.screen, ChatsScreen), "the chat")
        await s.shows("Take the tram.")


async def test_a_chat_is_deleted_restored_renamed_and_pinned(stage: Stage, runtime: Any, kept: Path) -> None:
    async with stage(runtime, kept=kept) as s:
        table = await listed(s)
        await s.pilot.press("down", "d")
        await told(s, "A trip to Porto was deleted; U restores it.")
        await s.until(lambda: table.row_count == 1, "one row less")
        assert [call for call in runtime.calls if call[0] == "forget"]
        assert titles(kept) == ["Why is the sky blue?"]
        await s.pilot.press("u")
        await s.until(lambda: table.row_count == 2, "the row")
        assert titles(kept) == ["A trip to Porto", "Why is the sky blue?"]
        await s.pilot.press("end", "r")
        await s.until(lambda: s.app.screen.query("TitleDialog, .dialog"), "the dialog")
        s.app.screen.query_one(Input).value = "Skies"
        await s.pilot.press("enter")
        await s.shows("Skies")
        await s.pilot.press("p")
        await s.shows("▴")
    assert titles(kept) == ["Skies", "A trip to Porto"]


async def test_the_chat_in_sight_can_be_deleted(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    async with stage(runtime, kept=path) as s:
        await s.say("my secret")
        chat = s.app.session.conversation.id
        await listed(s)
        await s.pilot.press("down", "d")
        await s.until(lambda: ("forget", chat) in runtime.calls, "the runtime to forget")
        await s.pilot.press("escape")
        await s.until(lambda: not isinstance(s.app.screen, ChatsScreen), "the chat")
        await s.shows("Ask anything.")
        await s.hides("my secret")
    assert titles(path) == []


async def test_nothing_is_kept_where_that_is_not_wanted(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    async with stage(runtime, kept=path, history="off") as s:
        await s.say("Hi")
        chat = s.app.session.conversation.id
        await s.pilot.press("ctrl+n", "y")
        await s.until(lambda: ("forget", chat) in runtime.calls, "the runtime to forget")
        await s.pilot.press("ctrl+b")
        await s.shows("Chats are not being saved")
    assert not path.exists()


async def test_a_history_that_cannot_be_written_is_told_and_the_chat_goes_on(
    stage: Stage, runtime: Any, tmp_path: Path
) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(b"no database" * 1000)
    async with stage(runtime, kept=path, size=(100, 30)) as s:
        await s.say("Hi")
        await told(s, "This chat is not being saved")
        await s.say("Again")
        await s.pilot.press("ctrl+b")
        await s.shows("damaged")
    assert path.read_bytes().startswith(b"no database")


async def test_half_a_character_in_an_answer_does_not_end_the_history(
    stage: Stage, runtime: Any, tmp_path: Path
) -> None:
    path = tmp_path / "history.db"
    runtime.answers = ["half \ud83d", "whole"]
    async with stage(runtime, kept=path) as s:
        for question in ("One \udcff", "Two"):
            await s.say(question)
    with closing(History(path)) as history:
        (chat,) = history.chats()
        texts = [message.text for message in history.messages(chat.id)]
    assert texts == ["One \ufffd", "half \ufffd", "Two", "whole"]


@pytest.mark.parametrize("size", grid([(40, 15), (60, 18), (99, 60)], {(40, 15)}))
async def test_the_list_fits_the_terminal(stage: Stage, runtime: Any, kept: Path, size: tuple[int, int]) -> None:
    async with stage(runtime, kept=kept, size=size) as s:
        await listed(s)
        await s.shows("Why is the sky", "A trip to")
        columns = s.app.screen.query_one("ChatTable").columns.values()
        assert not any(column.auto_width for column in columns), "else a busy machine may leave them as they were"


def test_times_as_people_say_them() -> None:
    now = datetime(2026, 11, 22, 12, tzinfo=UTC).astimezone()
    assert when(now - timedelta(minutes=1), now) == f"{now - timedelta(minutes=1):%H:%M}"
    assert when(now - timedelta(days=2), now) == f"{now - timedelta(days=2):%a %H:%M}"
    assert when(datetime(2026, 3, 5, 12, tzinfo=UTC), now) == "5 Mar"
    assert when(datetime(2024, 3, 5, 12, tzinfo=UTC), now) == "5 Mar 2024"


async def test_an_answer_goes_on_in_a_chat_that_is_left(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    runtime.answers = ["one two three four"]
    runtime.hold_after = 2
    async with stage(runtime, kept=tmp_path / "history.db") as s:
        await s.ask("go")
        await s.until(lambda: "two" in s.last.text)
        left = s.app.session.conversation
        await s.pilot.press("ctrl+n")
        await s.until(lambda: s.app.session.conversation is not left)
        await s.shows("Ask anything.")
        assert not s.app.chat.busy
        await s.pilot.press("ctrl+b")
        await s.until(lambda: s.app.screen.query("ChatTable") and s.app.screen.query_one("ChatTable").row_count)
        await s.pilot.press("enter")
        await s.until(lambda: s.app.session.conversation is left)
        await s.shows("one two")
        runtime.released.set()
        await s.answered()
        assert s.last.text == "one two three four"
        await s.shows("one two three four")
        assert not runtime.cancelled
