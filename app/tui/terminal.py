"""Handling of a terminal that disappears: a closed window, a lost connection."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

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
    """A driver class whose output survives the loss of the terminal, where Textual lets it be replaced."""

    class SurvivingDriver(driver):  # type: ignore[misc, valid-type]
        def start_application_mode(self) -> None:
            stream = getattr(self, "_file", None)
            if stream is not None and not isinstance(stream, Output):
                self._file = Output(stream)
            super().start_application_mode()

    return SurvivingDriver
