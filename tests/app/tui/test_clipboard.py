"""Copying: the terminal's sequence, and the tools of the system."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from app.tui import terminal as clipboard


def test_the_sequence_carries_any_text() -> None:
    sequence = clipboard.osc52("日本 🙂\n")
    assert sequence.startswith("\x1b]52;c;")
    assert sequence.endswith("\x07")
    assert base64.b64decode(sequence[7:-1]).decode() == "日本 🙂\n"


def test_inside_tmux_it_is_also_wrapped() -> None:
    bare = clipboard.osc52("x")
    assert clipboard.osc52("x", inside_tmux=True) == f"{bare}\x1bPtmux;\x1b{bare}\x1b\\"


def test_only_tools_that_are_there_and_have_a_session(tmp_path: Path) -> None:
    for name in ("wl-copy", "xclip", "pbcopy"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    path = str(tmp_path)
    assert [command[0] for command in clipboard.tools({"PATH": path})] == ["pbcopy"]
    found = clipboard.tools({"PATH": path, "DISPLAY": ":0", "WAYLAND_DISPLAY": "w"})
    assert [command[0] for command in found] == ["wl-copy", "xclip", "pbcopy"]


async def test_the_first_tool_that_works_gets_the_text(tmp_path: Path) -> None:
    target = tmp_path / "copied"
    write = f"import sys, pathlib; pathlib.Path({str(target)!r}).write_bytes(sys.stdin.buffer.read())"
    commands = [("no-such-tool",), (sys.executable, "-c", "raise SystemExit(1)"), (sys.executable, "-c", write)]
    assert await clipboard.copy_with_tools("ü🙂", commands)
    assert target.read_bytes().decode() == "ü🙂"
    assert not await clipboard.copy_with_tools("x", commands[:2])


async def test_a_tool_that_hangs_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(clipboard, "TOOL_TIMEOUT_S", 0.1)
    assert not await clipboard.copy_with_tools("x", [(sys.executable, "-c", "import time; time.sleep(60)")])
