"""The reader: has a child process read documents, within limits on time and memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

from app.documents.folders import survey
from app.documents.sections import Section, whole
from app.errors import DocumentError
from app.language import _, english
from app.printable import printable_name
from runtime.system.child_process import ChildProcess

SECTION_S = 15.0
"""Time limit in seconds of a page, or of a file of another kind."""
DOCUMENT_S = 120.0
"""Time limit in seconds of a document."""
MAX_TOGETHER = 50
"""Files of a folder that are sent together at most."""


class Reader:
    """Reads documents, one at a time. Thread-safe.

    Args:
        section_s: Time limit of a section in seconds.
        document_s: Time limit of a document in seconds.
    """

    def __init__(self, section_s: float = SECTION_S, document_s: float = DOCUMENT_S) -> None:
        self._document_s = document_s
        self._child = ChildProcess("app.documents.reading", str(section_s), *(["english"] if english() else []))
        self._lock = threading.Lock()

    def read(self, path: Path) -> Iterator[Section]:
        """The sections of a document.

        Raises:
            DocumentError: it can't be read, or only in part; what was read before holds.
        """
        name = printable_name(path.name)
        with self._lock:
            timer = threading.Timer(self._document_s, self._child.kill)
            timer.daemon = True
            timer.start()
            ended = False
            try:
                for line in self._child.lines(json.dumps(str(path)).encode()):
                    found = json.loads(line)
                    if isinstance(found, str):
                        ended = True
                        if found:
                            raise DocumentError(f"{name} {found}")
                        return
                    yield from (Section(*one) for one in found)
                raise DocumentError(_("{name} was given up: reading it took too long or too much memory", name=name))
            except OSError as error:
                raise DocumentError(
                    _("no process could be started to read {name}: {reason}", name=name, reason=error.strerror)
                ) from error
            finally:
                timer.cancel()
                if not ended:
                    self._child.kill()

    def text(self, path: Path) -> tuple[str, str]:
        """The text of a document, and why some of it is missing; empty if nothing is.

        Raises:
            DocumentError: it can't be read.
        """
        found: list[Section] = []
        try:
            found.extend(self.read(path))
        except DocumentError as error:
            if not found:
                raise
            return whole(found), str(error)
        if not found:
            raise DocumentError(_("{name} has no text", name=printable_name(path.name)))
        return whole(found), ""

    def texts(self, path: Path, most: int) -> tuple[dict[str, str], list[str]]:
        """The text of a document, or of each in a small folder, by name, and why something is missing.

        Args:
            path: A file or folder.
            most: Bytes from which the files of a folder are too large; then there are no texts.

        Raises:
            DocumentError: it can't be read.
        """
        if not path.is_dir():
            text, problem = self.text(path)
            return {path.name: text}, [problem] if problem else []
        found = survey(path)
        problems = [
            _("{count:,} {what} were left out", count=count, what=what) for what, count in found.skipped.items()
        ]
        if len(found.files) > MAX_TOGETHER or sum(file.size for file in found.files) > most:
            return {}, problems
        texts = {}
        for file in found.files:
            try:
                texts[file.name], problem = self.text(file.path)
                problems += [problem] if problem else []
            except DocumentError as error:
                problems.append(str(error))
        return texts, problems

    def kill(self) -> None:
        """End what another thread is reading."""
        self._child.kill()

    def close(self) -> None:
        """End the process. Safe to call twice."""
        self._child.kill()
        with self._lock:
            self._child.close()
