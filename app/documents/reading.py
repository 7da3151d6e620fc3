"""The reader's child process: opens documents and writes their text, a section a line.

A parser of a hostile file may hang or fill the memory, so this process has limits on both, and `app.documents.reader`
starts another one when it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from app.documents.formats import MAX_BYTES, MAX_CHARACTERS, sections
from app.documents.sections import Section
from app.errors import DocumentError
from app.language import _, stay_english
from runtime.system.child_process import limit_memory

MEMORY_BYTES = 1 << 30
"""Memory limit of the process, where the system supports one."""
MAX_SECTIONS = 1 << 18
"""Maximum number of sections of a document; the rest is left out."""
_LONGEST_REASON = 200
_BATCH, _SECTION_COST = 2**16, 100
"""Characters that are written at a time, and as how many a section counts beside its text."""


def read(path: Path) -> Iterator[Section]:
    """Read a document.

    Raises:
        DocumentError: it can't be read, or only in part; what was read before holds.
    """
    with _opened(path) as stream:
        before = os.fstat(stream.fileno())
        left = MAX_CHARACTERS
        for count, section in enumerate(_guarded(stream, path.name)):
            if count == MAX_SECTIONS:
                raise DocumentError(_("has more than {most:,} paragraphs; the rest was left out", most=MAX_SECTIONS))
            if len(section.text) > left:
                yield Section(section.unit, section.first, section.text[:left])
                raise DocumentError(
                    _(
                        "is longer than {most:,} characters; the rest was left out",
                        most=MAX_CHARACTERS,
                    )
                )
            left -= len(section.text)
            yield section
        after = os.fstat(stream.fileno())
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise DocumentError(_("changed while it was read: attach it again"))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """An open regular file. A pipe or device is not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise DocumentError(_("can't be opened: {reason}", reason=error.strerror)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = _("a folder") if stat.S_ISDIR(status.st_mode) else _("a device or a pipe")
            raise DocumentError(_("is {kind}, not a file", kind=kind))
        if status.st_size > MAX_BYTES:
            raise DocumentError(
                _(
                    "has {size:,.0f} MB, and at most {most} MB are read: attach a part",
                    size=status.st_size / 1e6,
                    most=MAX_BYTES // 1_000_000,
                )
            )
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


def _guarded(stream: BinaryIO, name: str) -> Iterator[Section]:
    """The sections of a file; whatever its format's library raises becomes a `DocumentError`."""
    try:
        yield from sections(stream, name)
    except (DocumentError, GeneratorExit):
        raise
    except MemoryError as error:
        raise DocumentError(_("needs too much memory to be read")) from error
    except RecursionError as error:
        raise DocumentError(_("is nested too deeply to be read")) from error
    except Exception as error:  # a damaged file makes a library raise anything
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        raise DocumentError(_("is damaged: {reason}", reason=reason)) from error


def serve(seconds: float) -> None:
    """Serve requests on standard input, one path in JSON a line, until it is closed.

    The answer is lines of sections, `[[unit, first, text], ...]`, and then one that says why reading ended: an empty
    text, or what is wrong. A section that takes longer than the time limit ends the process.

    Args:
        seconds: Time limit of a section.
    """
    limit_memory(MEMORY_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for line in sys.stdin.buffer:
            ended = ""
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            held: list[list[object]] = []
            size, since = 0, time.monotonic()
            try:
                for section in read(Path(json.loads(line))):
                    held.append([section.unit, section.first, section.text])
                    size += _SECTION_COST + len(section.text)
                    if size > _BATCH:
                        _write(held)
                        held, size = [], 0
                    if time.monotonic() - since > seconds / 10:
                        since = time.monotonic()
                        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            except DocumentError as error:
                ended = str(error)
            _write(held)
            _write(ended)
            faulthandler.cancel_dump_traceback_later()


def _write(value: object) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    if sys.argv[2:] == ["english"]:
        stay_english()
    serve(float(sys.argv[1]))
