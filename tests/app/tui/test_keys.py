"""Keys: changed by a setting, listed in the help; Ctrl+Z suspends to the shell and returns."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Select, TextArea

from app import settings
from app.settings import SettingsError
from app.tui.keys import keymap_of
from app.tui.screens.help import HelpScreen
from app.tui.screens.models import ModelsScreen
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.plain_table import PlainTable
from app.tui.work_app import CHANGEABLE

Stage = Callable[..., Any]


def test_keys_are_understood() -> None:
    assert keymap_of("", CHANGEABLE) == {}
    assert keymap_of("chat.new=f9, app.help=ctrl+x\nmessage.copy=y", CHANGEABLE) == {
        "chat.new": "f9", "app.help": "ctrl+x", "message.copy": "y",
    }  # fmt: skip
    assert keymap_of("app.help=f2 app.models=f1", CHANGEABLE), "two may change places"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("chat.new", "'chat.new' is invalid"),
        ("chat.new=Ctrl X", "is invalid"),
        ("chat.nwe=f9", "did you mean chat.new"),
        ("chat.new=f2", "f2 is assigned twice: to chat.new and app.models"),
    ],
)
def test_what_makes_no_sense_is_told(text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        keymap_of(text, CHANGEABLE)


async def test_a_changed_key_works_and_is_listed(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(120, 50), keys="app.help=f9, chat.regenerate=f10") as s:
        await s.shows("F9 help")
        await s.pilot.press("f1")
        await s.settled()
        assert s.app.screen is s.app.chat, "the key of before does nothing"
        await s.open(HelpScreen, "f9")
        await s.shows("chat.regenerate", "F10")
        titles = [command.title for command in s.app.get_system_commands(s.app.screen)]
        assert "Regenerate  F10" in titles


async def test_keys_are_changed_in_the_settings(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(120, 60)) as s:
        await s.pilot.press("f3")
        await s.until(lambda: s.app.screen.query("#setting-keys TextArea"))
        field = s.app.screen.query_one("#setting-keys TextArea", TextArea)
        field.load_text("app.hlep=f9")
        await s.pilot.press("escape")
        await s.until(lambda: any("did you mean app.help" in note.message for note in s.app._notifications))
        await s.pilot.press("f1")
        await s.until(lambda: isinstance(s.app.screen, HelpScreen), "the keys of before")
        await s.pilot.press("escape", "f3")
        await s.until(lambda: s.app.screen.query("#setting-keys TextArea"))
        s.app.screen.query_one("#setting-keys TextArea", TextArea).load_text("app.help=f9")
        await s.pilot.press("escape")
        await s.until(lambda: s.app.keymap == {"app.help": "f9"})
        assert settings.load().keys == "app.help=f9"


async def test_keys_of_vim_move_where_nothing_is_typed(stage: Stage, runtime: Any) -> None:
    """Off, on by the settings screen, and on from the start: in a table, in the help, in the composer."""
    async with stage(runtime, size=(100, 60)) as s:
        await s.pilot.press("f2")
        await s.until(lambda: s.app.screen.query(PlainTable) and s.app.screen.query_one(PlainTable).row_count > 4)
        table = s.app.screen.query_one(PlainTable)
        start = table.cursor_row
        await s.pilot.press("j", "G")
        assert table.cursor_row == start, "they are off"
        await s.pilot.press("escape", "f3")
        await s.until(lambda: s.app.screen.query("#setting-vim Select"))
        s.app.screen.query_one("#setting-vim Select", Select).value = "on"
        await s.until(lambda: s.app.moves)
        assert settings.load().vim == "on"
        await s.pilot.press("escape", *"jkgG")
        assert s.app.chat.composer.text == "jkgG"
        await s.pilot.press("f1")
        await s.shows("move in lists and messages")
    async with stage(runtime, size=(100, 60), vim="on") as s:
        await s.pilot.press("f2")
        await s.until(lambda: s.app.screen.query(PlainTable) and s.app.screen.query_one(PlainTable).row_count > 4)
        table = s.app.screen.query_one(PlainTable)
        start = table.cursor_row
        await s.pilot.press("j", "j", "k")
        assert table.cursor_row == start + 1
        await s.pilot.press("G")
        assert table.cursor_row == table.row_count - 1
        await s.pilot.press("g")
        assert table.cursor_row == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed, and this needs a terminal")
def test_ctrl_z_goes_to_the_shell_and_fg_comes_back(tmp_path: Path) -> None:
    name = f"lowbit-chat-{uuid.uuid4().hex[:8]}"

    def tmux(*words: str) -> str:
        command = ["tmux", "-L", name, "-f", os.devnull, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout

    def shows(text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in (screen := tmux("capture-pane", "-p")):
            assert time.monotonic() < deadline, f"no {text!r}:\n{screen}"
            time.sleep(0.2)

    root = Path(__file__).resolve().parents[3]
    program = f"LOWBIT_CHAT_HOME={tmp_path} {sys.executable} -c 'from app.cli.start import main; main()'"
    try:
        tmux("new-session", "-d", "-x", "90", "-y", "30", "-c", str(root), "env", "PS1=bash$ ", "bash", "--norc", "-i")
        tmux("send-keys", "-l", program)
        tmux("send-keys", "Enter")
        shows("Ask anything")
        tmux("send-keys", "-l", "half a thought")
        shows("half a thought")
        tmux("send-keys", "C-z")
        shows("Stopped")
        tmux("send-keys", "-l", "clear; echo in the $((40 + 2)) shell")
        tmux("send-keys", "Enter")
        shows("in the 42 shell")
        tmux("send-keys", "-l", "fg")
        tmux("send-keys", "Enter")
        shows("half a thought")
        tmux("send-keys", "C-q")
        shows("bash")
    finally:
        tmux("kill-server")


async def test_the_line_of_keys_is_made_anew_for_other_keys_alone(stage: Stage, runtime: Any) -> None:
    runtime.answers, runtime.hold_after = ["one two three"], 1
    async with stage(runtime) as s:
        await s.pilot.press("a", "b", "ctrl+underscore")
        await s.until(lambda: s.composer.text != "ab", "what was typed to be undone")
        line = s.app.screen.query_one(KeyLine)

        def words() -> list[str]:
            return [binding.description for binding, _tooltip in line.shown]

        await s.settled()
        before = line.shown
        assert "stop" not in words()
        s.app.show_session()
        await s.settled()
        assert line.shown is before
        await s.ask("count")
        await s.until(lambda: "stop" in words(), "a key that stops the answer")
        runtime.released.set()
        await s.answered()
        await s.until(lambda: "stop" not in words(), "that key to go")


async def test_keys_are_pressed_by_clicks_and_tell_what_they_do(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(60, 24)) as s:
        line = s.app.screen.query_one(KeyLine)
        await s.shows("F3 settings")
        text = line.render().plain
        assert "F4" not in text, "a key that does not fit is left out whole"
        await s.pilot.hover(KeyLine, offset=(text.index("models"), 0))
        await s.until(lambda: line.tooltip == "Choose, download, quantize or delete a model")
        await s.pilot.hover(KeyLine, offset=(text.index("models") - 4, 0))
        assert line.tooltip is None, "between two keys"
        await s.pilot.click(KeyLine, offset=(text.index("F2"), 0))
        await s.until(lambda: isinstance(s.app.screen, ModelsScreen), "the screen of the key")
