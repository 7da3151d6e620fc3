"""The terminal that may go: a closed window, a lost connection."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from textual.driver import Driver


def terminal_is_gone() -> bool:
    """Whether the terminal that standard input was has been closed. Always False where that can't be asked."""
    if not hasattr(select, "poll") or sys.__stdin__ is None:
        return False
    poll = select.poll()
    try:
        poll.register(sys.__stdin__.fileno(), select.POLLHUP)
        return any(event & (select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return True


def ensure_size() -> None:
    """Give a terminal that doesn't know its size (a serial line, some containers) the usual 80 x 24.

    Two parts of Textual guess differently otherwise, and the screen is laid out again without end.
    """
    if sys.platform == "win32" or sys.__stdin__ is None:
        return
    import termios

    with contextlib.suppress(OSError, ValueError, termios.error):
        number = sys.__stdin__.fileno()
        if 0 in termios.tcgetwinsize(number):
            termios.tcsetwinsize(number, (24, 80))


class Output:
    """A stream to a terminal that swallows what nobody can see any more.

    Textual hands its frames to a thread over a short queue. An error of the stream would end that thread, and the
    program would wait for ever to hand over the next frame: it could neither be asked to end nor close the runtime.
    """

    def __init__(self, stream: TextIO, is_gone: Callable[[], bool] | None = None) -> None:
        """Write to a stream as long as there is a terminal behind it."""
        self._stream = stream
        self._is_gone = is_gone or terminal_is_gone

    def write(self, text: str) -> int:
        """Write text.

        Raises:
            OSError: the stream failed though the terminal is still there.
        """
        try:
            return self._stream.write(text)
        except OSError:
            if not self._is_gone():
                raise
            return len(text)

    def flush(self) -> None:
        """Write what is buffered.

        Raises:
            OSError: the stream failed though the terminal is still there.
        """
        try:
            self._stream.flush()
        except OSError:
            if not self._is_gone():
                raise

    def fileno(self) -> int:
        """The stream's file number."""
        return self._stream.fileno()


def outliving(driver: type[Driver]) -> type[Driver]:
    """Textual's driver of this platform, with an output that outlives the terminal where Textual has one to replace."""

    class OutlivingDriver(driver):  # type: ignore[misc, valid-type]
        def start_application_mode(self) -> None:
            stream = getattr(self, "_file", None)
            if stream is not None and not isinstance(stream, Output):
                self._file = Output(stream)
            super().start_application_mode()

    return OutlivingDriver
