"""Output: standard output carries the answer, standard error everything else.

The answer is one JSON object with `--json`, otherwise text. Notes, progress and errors go to standard error. Piped
output is unchanged; output to a terminal is sanitized by `SanitizedStream`.

Errors that users or files can cause are reported in one line; the first Ctrl-C stops the running work, the second the
program.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from app.amounts import Estimate, byte_count
from app.language import _, stay_english
from app.printable import cells, printable, without_middle
from app.reports import reported

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from models.progress import Progress, ProgressCallback

NAME = "lowbit-chat"
NAME_CELLS = 20
"""Cells in which most names can be told from each other."""
LINE_S = 3.0
"""Seconds between two lines of progress if standard error is not a terminal."""


class CliError(Exception):
    """An error found by the command line itself. The message says what happened and what to do."""


def explained() -> tuple[type[BaseException], ...]:
    """Errors that users or files can cause; anything else is a bug and shows its traceback.

    Only called after an error, so that no start pays for these imports.
    """
    from app.errors import ClientError, DocumentError, HistoryError
    from app.settings import SettingsError
    from models.errors import ModelError
    from runtime.errors import RuntimeFailure
    from tuner.errors import TunerError

    return (
        CliError,
        ClientError,
        DocumentError,
        HistoryError,
        SettingsError,
        ModelError,
        RuntimeFailure,
        TunerError,
        OSError,
        MemoryError,
    )


def in_one_line(error: BaseException) -> str:
    """The error's message without line breaks."""
    if isinstance(error, MemoryError):
        return _("not enough memory: close other programs, or use a smaller model, fewer bits or a shorter context")
    if isinstance(error, OSError) and error.strerror:
        why = reported(error.strerror)
        return f"{error.filename}: {why}" if error.filename else why
    return reported(" ".join(str(error).split())) or type(error).__name__


class Interrupt:
    """Context manager: Ctrl-C sets `pressed` instead of raising; pressed again, it raises `KeyboardInterrupt`.

    Work takes `cancelled` as its argument of that name. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def cancelled(self) -> bool:
        return self.pressed

    def raise_if_pressed(self) -> None:
        """Raise as Ctrl-C does, now that the work has stopped."""
        if self.pressed:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        """Restore Ctrl-C. Work that failed because it was stopped ends as with Ctrl-C."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
        if error is not None:
            self.raise_if_pressed()

    def _press(self, _signal: int, _frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


class SanitizedStream:
    """A stream to a terminal that displays escape sequences in the text instead of executing them.

    It replaces `sys.stdout` or `sys.stderr`, so that everything passes through it: our own output, the parser's errors
    about options, library warnings, tracebacks.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        """Writes the program's own sequences, such as colours."""

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one text after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user named: atomically, a link's target in its place; a pipe or device is written into.

    Raises:
        StoreError: it can't be written.
    """
    from models.files import replacing
    from models.store.durable import TEMPORARY, explained

    with explained(_("cannot write {file}", file=path)):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = None
        # what /dev/stdout leads to may be a file that somebody else has open
        opened = path.is_symlink() and path.absolute().parts[1:2] in (("dev",), ("proc",))
        if opened or not (mode is None or stat.S_ISREG(mode)):
            with path.open("ab") as file:
                file.write(content)
            return
        target = path.resolve()
        temporary = target.with_name(target.name + TEMPORARY)
        with replacing(target, temporary) as file:
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            file.write(content)


def prepare_streams() -> None:
    """Let no character that a terminal lacks abort an answer, and have pipes carry UTF-8 on Windows, too."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            piped = sys.platform == "win32" and not stream.isatty()
            stream.reconfigure(encoding="utf-8" if piped else None, errors="replace")


def sanitize_streams() -> None:
    """Install `SanitizedStream` on standard error, and on standard output if that is a terminal. Safe to call twice."""
    if sys.stderr is not None and not isinstance(sys.stderr, SanitizedStream):
        sys.stderr = cast("TextIO", SanitizedStream(sys.stderr))
    if sys.stdout is not None and sys.stdout.isatty() and not isinstance(sys.stdout, SanitizedStream):
        sys.stdout = cast("TextIO", SanitizedStream(sys.stdout))


class Output:
    """The output of one command."""

    def __init__(self, *, as_json: bool = False, lines: bool = False) -> None:
        self.as_json = as_json or lines
        self.lines = lines
        """Whether pieces of an answer are JSON objects of their own, before that of the whole."""
        if self.as_json:
            stay_english()

    def result(self, data: Mapping[str, Any]) -> None:
        """Write the command's JSON object. NaN and infinity become null."""
        print(json.dumps(_finite(data), allow_nan=False), flush=self.lines)

    def text(self, line: str = "") -> None:
        """Write a line of the answer."""
        print(line)

    def fields(self, rows: Sequence[tuple[str, str]], width: int) -> None:
        """Write a list of names and values, which begin in column `width` if the names leave room for that."""
        width = max([width, *(cells(name) + 1 for name, _value in rows)])
        for name, value in rows:
            indented = value.replace("\n", "\n" + " " * width)
            self.text(f"{name}{' ' * (width - cells(name))}{indented}")

    def stream(self, piece: str) -> None:
        """Write a piece of the answer at once, without a line break."""
        if piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def picture(self, text: str) -> None:
        """Write a picture with the program's own colours."""
        print(text.rstrip("\n"), file=_unfiltered(sys.stdout))

    def table(self, rows: Sequence[Sequence[str]], *, spare: Sequence[str] = ()) -> None:
        """Write rows in aligned columns; columns that begin with a digit are right-aligned.

        Args:
            rows: The heading, then the others.
            spare: Columns that a narrow terminal does without, the first one first. If it is still too narrow, the
                first column is shortened in the middle. What is piped is whole.
        """
        if spare and sys.stdout.isatty():
            rows = _fitted(rows, spare, shutil.get_terminal_size().columns)
        widths = _widths(rows)
        right = [all(row[i][:1].isdigit() or row[i] == "-" for row in rows[1:]) for i in range(len(widths))]
        for row in rows:
            padded = []
            for cell, width, numeric in zip(row, widths, right, strict=True):
                space = " " * (width - cells(cell))
                padded.append(space + cell if numeric else cell + space)
            self.text("  ".join(padded).rstrip())

    def note(self, line: str) -> None:
        """Write a note for the user that is not part of the answer."""
        print(f"{NAME}: {line}", file=sys.stderr, flush=True)

    @contextmanager
    def progress(self) -> Iterator[ProgressCallback]:
        """Show progress on standard error: bars on a terminal, else a line for each phase and every few seconds."""
        if plain() or not sys.stderr.isatty():
            yield _PhaseLines(self)
            return
        bars = _PhaseBars()
        try:
            yield bars
        finally:
            bars.close()


class _PhaseLines:
    """One line when a phase begins, and every few seconds its progress and remaining time."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._phase = ""
        self._said = 0.0
        self._ending = False
        self._estimate = Estimate()

    def __call__(self, report: Progress) -> None:
        now = time.monotonic()
        self._estimate.take(now, report.phase, report.done, report.total)
        if report.phase != self._phase:
            self._phase, self._said, self._ending = report.phase, now, False
            self._output.note(reported(report.message))
        elif now - self._said >= LINE_S and not (self._ending and self._estimate.ending):
            self._said, self._ending = now, self._estimate.ending
            left = self._estimate.words
            self._output.note(f"{reported(report.message)}: {_amount(report)}{f', {left}' if left else ''}")


class _PhaseBars:
    """One bar per phase. The drawing library is imported with the first report, since most starts have none."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._marked = ""
        self._tasks: dict[str, Any] = {}
        self._estimate = Estimate()

    def __call__(self, report: Progress) -> None:
        self._estimate.take(time.monotonic(), report.phase, report.done, report.total)
        if self._bars is None:
            self._bars = _started_bars()
        if report.phase not in self._tasks:
            for task in self._tasks.values():
                self._bars.update(task, visible=False)
            self._tasks[report.phase] = self._bars.add_task("", total=report.total, amount="", left="")
        self._bars.update(
            self._tasks[report.phase],
            completed=report.done,
            total=report.total,
            description=printable(reported(report.message)),
            amount=_amount(report),
            left=self._estimate.words,
        )
        from app.tui.terminal import marks_progress, progress_mark

        if marks_progress():
            self._mark(self._bars, progress_mark(min(1.0, report.done / report.total) if report.total else None))

    def _mark(self, bars: Bars, mark: str) -> None:
        """Mark the terminal's window with progress, past Rich, which holds standard error."""
        if mark != self._marked:
            self._marked = mark
            bars.console.file.write(mark)
            bars.console.file.flush()

    def close(self) -> None:
        """Remove the bars from the terminal."""
        if self._bars is not None:
            self._bars.stop()
            if self._marked:
                from app.tui.terminal import NO_PROGRESS

                self._mark(self._bars, NO_PROGRESS)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cells, column)) for column in zip(*rows, strict=True)]


def _fitted(rows: Sequence[Sequence[str]], spare: Sequence[str], columns: int) -> Sequence[Sequence[str]]:
    """The rows of a table without the spare columns for which a terminal has no room, and with shortened names."""

    def room() -> int:
        """Cells for the first column."""
        return columns - sum(width + 2 for width in _widths(rows)[1:])

    for name in spare:
        if room() < min(NAME_CELLS, _widths(rows)[0]):
            at = rows[0].index(name)
            rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    width = max(NAME_CELLS // 2, room())
    return [[row[0] if cells(row[0]) <= width else without_middle(row[0], width), *row[1:]] for row in rows]


def plain() -> bool:
    """Whether nothing that was written is drawn again and nothing has a colour: for screen readers, `run --plain`."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def at_a_terminal() -> bool:
    """Whether both ends are terminals."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stdout.isatty())


def _started_bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
    )
    bars = Progress(*columns, console=Console(file=_unfiltered(sys.stderr)), transient=True)
    bars.start()
    sanitize_streams()  # while there are bars, Rich replaces the program's streams by its own
    return bars


def _amount(report: Progress) -> str:
    if report.unit == "bytes":
        done = byte_count(report.done)
        return done if report.total is None else _("{done} of {total}", done=done, total=byte_count(report.total))
    whole = f"/{int(report.total)}" if report.total is not None else ""
    return f"{int(report.done)}{whole} {_(report.unit)}"


def _unfiltered(stream: TextIO) -> TextIO:
    return stream.stream if isinstance(stream, SanitizedStream) else stream


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
