"""Copying to the clipboard from a terminal, by OSC 52 and by the system's tools, since each fails somewhere."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence

TOOL_TIMEOUT_S = 2.0
_ENCODINGS = {"clip.exe": "utf-16"}
"""Encodings that tools read, other than UTF-8."""


def osc52(text: str, *, inside_tmux: bool = False) -> str:
    """The escape sequence that asks the terminal to put `text` on the clipboard.

    Inside tmux it is sent twice: bare, for `set-clipboard on`, and wrapped, for `allow-passthrough on`.
    """
    payload = base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")
    bare = f"\x1b]52;c;{payload}\x07"
    return f"{bare}\x1bPtmux;\x1b{bare}\x1b\\" if inside_tmux else bare


def tools(environment: Mapping[str, str] | None = None) -> list[Sequence[str]]:
    """The installed commands that copy stdin to the clipboard of this session."""
    environment = os.environ if environment is None else environment
    candidates: list[Sequence[str]] = []
    if environment.get("WAYLAND_DISPLAY"):
        candidates.append(("wl-copy",))
    if environment.get("DISPLAY"):
        candidates += [("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input")]
    candidates += [("pbcopy",), ("clip.exe",), ("termux-clipboard-set",)]
    return [command for command in candidates if shutil.which(command[0], path=environment.get("PATH"))]


async def copy_with_tools(text: str, commands: Sequence[Sequence[str]] | None = None) -> bool:
    """Copy `text` with the first tool that succeeds.

    Returns:
        Whether one succeeded.
    """
    for command in tools() if commands is None else commands:
        with contextlib.suppress(OSError, TimeoutError):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                async with asyncio.timeout(TOOL_TIMEOUT_S):
                    await process.communicate(text.encode(_ENCODINGS.get(command[0], "utf-8"), "replace"))
            except TimeoutError:
                process.kill()
                await process.wait()
                raise
            if process.returncode == 0:
                return True
    return False
