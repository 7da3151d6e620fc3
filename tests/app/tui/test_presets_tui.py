"""System prompt presets in the UI: chosen for a chat, saved, changed, deleted; by key and mouse, at all sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Button, Input, OptionList, TextArea

from app import paths, presets
from app.tui.screens.chat_dialogs import ChatSettingsDialog
from app.tui.screens.presets import PresetDialog, PresetsDialog
from tests.grid import grid

Stage = Callable[..., Any]


async def opened(s: Any) -> PresetsDialog:
    await s.pilot.press("f8")
    await s.until(lambda: isinstance(s.app.screen, PresetsDialog) and s.app.screen.query_one(OptionList).option_count)
    await s.settled()
    dialog: PresetsDialog = s.app.screen
    return dialog


async def written(s: Any, name: str, text: str) -> None:
    await s.until(lambda: isinstance(s.app.screen, PresetDialog))
    s.app.screen.query_one(Input).value = name
    s.app.screen.query_one(TextArea).load_text(text)
    s.app.screen.query_one("#yes", Button).press()


async def test_one_is_chosen_for_this_chat_alone(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    async with stage(runtime, kept=tmp_path / "history.db") as s:
        await opened(s)
        await s.pilot.press("down")
        await s.shows("Answer in as few words")
        await s.pilot.press("enter")
        await s.until(lambda: s.app.screen is s.app.chat)
        await s.shows("Brief")
        await s.say("a")
        assert runtime.named("chat")[0][0][0] == {"role": "system", "content": presets.BUNDLED["Brief"]}
        await s.open(ChatSettingsDialog, "f5")
        s.app.screen.query_one("#own-temperature", Input).value = "0.2"
        s.app.screen.query_one("#yes", Button).press()
        await s.until(lambda: s.app.screen is s.app.chat)
        own = s.app.session.conversation.extras.settings
        assert own == {"preset": "Brief", "system_prompt": presets.BUNDLED["Brief"], "temperature": 0.2}
        await s.pilot.press("ctrl+n")
        await s.until(lambda: len(s.app.session.conversation) == 0)
        await s.hides("Brief")
        [chat] = await s.app.session.history.chats()
        await s.app.chat.open_chat(chat)
        await s.shows("Brief")
        dialog = await opened(s)
        assert dialog.query_one(OptionList).highlighted == 1, "it begins with the one that the chat has"
        await s.pilot.press("home", "enter")
        await s.hides("Brief")
        await s.say("b")
        assert runtime.named("chat")[1][0][0]["role"] == "user"


async def test_they_are_kept_changed_and_deleted(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await opened(s)
        await s.pilot.press("n")
        await written(s, "", "x")
        await s.shows("A preset needs a name.")
        await written(s, "Brief", "x")
        await s.shows("A preset named Brief already exists.")
        await written(s, "Pirate [x]", "Be a pirate.")
        await s.until(lambda: isinstance(s.app.screen, PresetsDialog))
        await s.shows("Pirate [x]", "Be a pirate.")
        await s.pilot.press("e")
        await written(s, "Parrot", "Repeat what is said.")
        await s.until(lambda: isinstance(s.app.screen, PresetsDialog))
        await s.shows("Parrot")
        assert presets.load() == {**presets.BUNDLED, "Parrot": "Repeat what is said."}
        await s.pilot.press("enter")
        await s.say("a")
        await opened(s)
        await s.pilot.press("d", "y")
        await s.until(lambda: presets.load() == presets.BUNDLED)
        await s.pilot.press("escape")
        await s.say("b")
        assert runtime.named("chat")[1][0][0]["content"] == "Repeat what is said.", "a chat that has it keeps it"


async def test_a_chat_s_own_prompt_is_kept_as_a_preset(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await s.open(ChatSettingsDialog, "f5")
        s.app.screen.query_one(TextArea).load_text("Be a pirate.")
        s.app.screen.query_one("#preset", Button).press()
        await s.until(lambda: isinstance(s.app.screen, PresetDialog))
        s.app.screen.query_one(Input).value = "Pirate"
        s.app.screen.query_one("#yes", Button).press()
        await s.until(lambda: presets.load().get("Pirate") == "Be a pirate.")
        await s.until(lambda: isinstance(s.app.screen, ChatSettingsDialog))
        s.app.screen.query_one("#yes", Button).press()
        await s.shows("custom system prompt")


async def test_a_file_that_cannot_be_read_is_told(stage: Stage, runtime: Any) -> None:
    paths.presets_file().parent.mkdir(parents=True, exist_ok=True)
    paths.presets_file().write_text("oh [no")
    async with stage(runtime, size=(100, 30)) as s:
        await s.pilot.press("f8")
        await s.shows("Expected '='")
        await s.pilot.press("n")
        await s.settled()
        assert isinstance(s.app.screen, PresetsDialog), "what is there is not written over"


@pytest.mark.parametrize("size", grid([(40, 15), (60, 18), (120, 40)], {(40, 15)}), ids=str)
async def test_it_fits(stage: Stage, runtime: Any, size: tuple[int, int]) -> None:
    async with stage(runtime, size=size) as s:
        await opened(s)
        await s.pilot.press("down")
        for words in ("none", "Brief", "Answer in as few", "N new"):
            await s.shows(words)
