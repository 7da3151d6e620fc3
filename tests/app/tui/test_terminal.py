"""A terminal that disappears, and one that does not know its size."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest

from app.tui.terminal import NO_PROGRESS, Output, ensure_size, marks_progress, surviving, window_title


class Failing(io.StringIO):
    """A stream whose terminal has gone."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


def test_what_nobody_sees_is_swallowed() -> None:
    output = Output(Failing(), is_gone=lambda: True)
    assert output.write("frame") == 5
    output.flush()


def test_an_error_of_a_terminal_that_is_there_is_told() -> None:
    output = Output(Failing(), is_gone=lambda: False)
    with pytest.raises(OSError):
        output.write("frame")
    with pytest.raises(OSError):
        output.flush()


@pytest.mark.skipif(sys.platform == "win32", reason="needs Textual's driver for Linux and macOS")
def test_the_thread_that_writes_outlives_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from textual.drivers import _writer_thread, linux_driver

    class Started(linux_driver.LinuxDriver):
        def __init__(self) -> None:
            self._file = Failing()

        def start_application_mode(self) -> None:
            self._writer_thread = _writer_thread.WriterThread(self._file)
            self._writer_thread.start()

    monkeypatch.setattr("app.tui.terminal.terminal_is_gone", lambda: True)
    driver = surviving(Started)()  # type: ignore[call-arg]
    driver.start_application_mode()
    for _ in range(5 * _writer_thread.MAX_QUEUED_WRITES):  # blocks for ever when nobody takes them
        driver.write("frame")
    driver.close()


def test_the_title_of_the_window_is_kept_and_given_back() -> None:
    written: list[str] = []

    class Screen:
        def start_application_mode(self) -> None:
            written.append("start")

        def stop_application_mode(self) -> None:
            written.append("stop")

        def write(self, data: str) -> None:
            written.append(data)

    driver: Any = surviving(Screen)()  # type: ignore[arg-type, call-arg]
    driver.start_application_mode()
    driver.stop_application_mode()
    assert written == ["start", "\x1b[22;2t", "\x1b[23;2t", "stop"]
    assert window_title("a\x1b]0;b\x07") == "\x1b]2;a␛]0;b␇\x1b\\"


@pytest.mark.parametrize(
    ("environment", "marks"),
    [
        ({"WT_SESSION": "{1}"}, True),
        ({"ConEmuPID": "12"}, True),
        ({"KONSOLE_VERSION": "250400"}, True),
        ({"TERM_PROGRAM": "ghostty"}, True),
        ({"TERM_PROGRAM": "WezTerm", "TERM_PROGRAM_VERSION": "20250301-083000-1234abcd"}, True),
        ({"TERM_PROGRAM": "WezTerm", "TERM_PROGRAM_VERSION": "20240203-110809-5046fc22"}, False),
        ({"TERM_PROGRAM": "iTerm.app", "TERM_PROGRAM_VERSION": "3.4"}, False),
        ({"WT_SESSION": "{1}", "TMUX": "/tmp/tmux-1000/default,1,0"}, False),
        ({"WT_SESSION": "{1}", "STY": "1.screen"}, False),
        ({}, False),
    ],
)
def test_progress_is_marked_only_where_it_is_no_notice(environment: dict[str, str], marks: bool) -> None:
    assert marks_progress(environment) is marks


def test_a_mark_of_progress_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WT_SESSION", "{1}")
    monkeypatch.delenv("TMUX", raising=False)
    written: list[str] = []

    class Screen:
        def stop_application_mode(self) -> None:
            pass

        def write(self, data: str) -> None:
            written.append(data)

    driver: Any = surviving(Screen)()  # type: ignore[arg-type, call-arg]
    driver.stop_application_mode()
    assert NO_PROGRESS in "".join(written)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("size", [(0, 0), (0, 80), (30, 100)])
def test_a_terminal_has_a_size(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    import pty
    import termios

    leader, follower = pty.openpty()
    try:
        termios.tcsetwinsize(follower, size)
        with open(follower, closefd=False) as stream:
            monkeypatch.setattr(sys, "__stdin__", stream)
            ensure_size()
        assert termios.tcgetwinsize(follower) == (size if all(size) else (24, 80))
    finally:
        os.close(leader)
        os.close(follower)
