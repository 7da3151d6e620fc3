"""What a terminal does besides drawing: it disappears, sleeps with the machine, and has a clipboard.

A suspend shows in one clock that advanced while the monotonic clock did not. Where both advance, the gap between two
checks reveals it. On Linux, CLOCK_BOOTTIME differs from the monotonic clock by suspends alone: neither a stopped
process nor a clock that was set looks like one. The clipboard is reached by OSC 52 and by the system's tools, since
each fails somewhere.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from app.errors import CommandError
from app.language import _
from app.printable import printable

if TYPE_CHECKING:
    from textual.driver import Driver


def terminal_is_gone() -> bool:
    """Whether the terminal on standard input was closed. Always False where the system can't tell."""
    if not hasattr(select, "poll") or sys.__stdin__ is None:
        return False
    poll = select.poll()
    try:
        poll.register(sys.__stdin__.fileno(), select.POLLHUP)
        return any(event & (select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return True


def ensure_size() -> None:
    """Set a terminal that doesn't know its size (a serial line, some containers) to 80 x 24.

    Otherwise two parts of Textual assume different sizes and lay the screen out endlessly.
    """
    if sys.platform == "win32" or sys.__stdin__ is None:
        return
    import termios

    with contextlib.suppress(OSError, ValueError, termios.error):
        number = sys.__stdin__.fileno()
        if 0 in termios.tcgetwinsize(number):
            termios.tcsetwinsize(number, (24, 80))


class Output:
    """A stream to a terminal that discards output once the terminal is gone.

    Textual passes its frames to a thread over a short queue. A stream error would end that thread, and the program
    would block for ever on the next frame: it could neither quit nor close the runtime.
    """

    def __init__(self, stream: TextIO, is_gone: Callable[[], bool] | None = None) -> None:
        """Write to a stream while its terminal exists."""
        self._stream = stream
        self._is_gone = is_gone or terminal_is_gone

    def write(self, text: str) -> int:
        """Write text.

        Raises:
            OSError: the stream failed although the terminal still exists.
        """
        try:
            return self._stream.write(text)
        except OSError:
            if not self._is_gone():
                raise
            return len(text)

    def flush(self) -> None:
        """Write the buffered text.

        Raises:
            OSError: the stream failed although the terminal still exists.
        """
        try:
            self._stream.flush()
        except OSError:
            if not self._is_gone():
                raise

    def fileno(self) -> int:
        """The stream's file descriptor."""
        return self._stream.fileno()


def surviving(driver: type[Driver]) -> type[Driver]:
    """A driver class that survives the loss of the terminal and any stop, where Textual lets its output be replaced."""

    class SurvivingDriver(driver):  # type: ignore[misc, valid-type]
        def start_application_mode(self) -> None:
            stream = getattr(self, "_file", None)
            if stream is not None and not isinstance(stream, Output):
                self._file = Output(stream)
            keys = getattr(self, "_key_thread", None)
            if keys is not None and keys.is_alive():  # continued after SIGSTOP, of which nobody is told
                self.suspend_application_mode()
                self._must_signal_resume = True
            super().start_application_mode()
            self.write(TITLE_SAVED)

        def stop_application_mode(self) -> None:
            self.write(TITLE_RESTORED + (NO_PROGRESS if marks_progress() else ""))
            super().stop_application_mode()

    return SurvivingDriver


MIN_SUSPEND_S = 20.0
"""Shorter gaps are ignored: a busy machine, or a clock that was set."""


class SuspendDetector:
    """Compares two clocks at regular checks."""

    def __init__(
        self, every_s: float, running: Callable[[], float] = time.monotonic, day: Callable[[], float] | None = None
    ) -> None:
        """Start.

        Args:
            every_s: Interval in seconds at which `suspended_s` is called.
            running: Seconds that the machine has run.
            day: Time of day in seconds; by default CLOCK_BOOTTIME where there is one.
        """
        self._every_s = every_s
        self._exact = day is None and hasattr(time, "CLOCK_BOOTTIME")
        if day is None:
            day = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if self._exact else time.time
        self._running, self._day = running, day
        self._seen = (running(), day())

    def suspended_s(self) -> float | None:
        """Seconds that the machine was suspended since the last check; None if it was not."""
        now = (self._running(), self._day())
        ran, passed = now[0] - self._seen[0], now[1] - self._seen[1]
        self._seen = now
        absence = passed - ran
        if not self._exact:
            absence = max(absence, min(ran, passed) - 2 * self._every_s)
        return absence if absence >= MIN_SUSPEND_S else None


LONG_S = 20.0
"""Work that took less is not worth a notice."""


class LongWork:
    """Tells the end of long work, by regular checks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def ended(self, *, busy: bool) -> bool:
        """Whether work that took long has ended since the last check."""
        since, now = self._since, self._clock()
        self._since = (now if since is None else since) if busy else None
        return not busy and since is not None and now - since >= LONG_S


def notice(text: str, *, inside_tmux: bool = False) -> str:
    """The bell, and the escape sequence (OSC 9) that asks the terminal for a notice on the desktop; most know one."""
    return f"{_osc(f'9;{text}', inside_tmux=inside_tmux)}\a"


def window_title(text: str) -> str:
    """The escape sequence (OSC 2) that gives the terminal's window a title. What is shown of it is printable."""
    return f"\x1b]2;{printable(text)}\x1b\\"


def marks_progress(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the terminal shows progress (OSC 9;4) in its tab or the task bar, where an older one would show a notice.

    Not inside tmux and screen: their windows outlive the terminal, and who attaches later sees nothing of it.
    """
    environment = os.environ if environment is None else environment
    if environment.get("TMUX") or environment.get("STY"):
        return False
    if any(environment.get(name) for name in ("WT_SESSION", "ConEmuPID", "KONSOLE_VERSION")):
        return True
    program, version = environment.get("TERM_PROGRAM"), environment.get("TERM_PROGRAM_VERSION", "")
    return program == "ghostty" or (program == "WezTerm" and version >= "2025")  # WezTerm's versions are dates


def progress_mark(share: float | None) -> str:
    """The escape sequence (OSC 9;4) that marks the terminal's tab with progress; None: how much is done is unknown."""
    return _osc("9;4;3;0" if share is None else f"9;4;1;{round(100 * share)}", inside_tmux=False)


NO_PROGRESS = "\x1b]9;4;0;0\x07"
"""Removes the mark."""
TITLE_SAVED, TITLE_RESTORED = "\x1b[22;2t", "\x1b[23;2t"
"""XTWINOPS: a window's title is kept for the end; terminals that don't know it ignore it."""
TOOL_TIMEOUT_S = 2.0
_ENCODINGS = {"clip.exe": "utf-16"}
"""Encodings that tools read, other than UTF-8."""


def osc52(text: str, *, inside_tmux: bool = False) -> str:
    """The escape sequence that asks the terminal to put `text` on the clipboard."""
    payload = base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")
    return _osc(f"52;c;{payload}", inside_tmux=inside_tmux)


def _osc(command: str, *, inside_tmux: bool) -> str:
    """An operating system command.

    Inside tmux it is sent twice: bare, for what tmux itself knows, and wrapped, for `allow-passthrough on`.
    """
    bare = f"\x1b]{command}\x07"
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


def edit(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Have the user's editor change a text, on this terminal, which must be free. It waits for the editor's end.

    Args:
        text: The text.
        environment: Where `VISUAL` or `EDITOR` names the editor; this process's by default.

    Raises:
        CommandError: no editor is named, or it failed.
    """
    environment = os.environ if environment is None else environment
    named = environment.get("VISUAL") or environment.get("EDITOR")
    if not named:
        raise CommandError(_("no editor is chosen: set VISUAL or EDITOR before the start, as in export EDITOR=nano"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "draft.md"
        try:
            file.write_text(text, encoding="utf-8")
            ended = subprocess.run([*shlex.split(named), str(file)], check=False)
            if ended.returncode:
                raise CommandError(
                    _(
                        "{named} ended with status {status}; the draft is as it was",
                        named=named,
                        status=ended.returncode,
                    )
                )
            return file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, ValueError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise CommandError(
                _("{named} did not edit the draft, which is as it was: {reason}", named=named, reason=reason)
            ) from error
