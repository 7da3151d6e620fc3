"""The Markdown block that is still open at the end of a growing text.

A rough line-by-line scan, good enough to decide when a block is too large to re-render at every token. The final
rendering never depends on it.
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["list", "table", "fence", "other"]

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_LIST_ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)")


class BlockTracker:
    """Scans complete lines and tracks the open block."""

    def __init__(self) -> None:
        self.kind: Kind = "other"
        """The block that the next line would continue."""
        self.lines = 0
        """Number of its lines so far."""
        self._fence = ""
        self._blank = False

    def feed(self, line: str) -> None:
        """Scan one line, without its line end."""
        before = self.kind
        if before == "fence":
            self._in_fence(line)
        elif before == "list":
            self._in_list(line)
        elif before == "table" and "|" in line:
            self.lines += 1
        else:
            self._start(line)

    def _in_fence(self, line: str) -> None:
        self.lines += 1
        match = _FENCE.fullmatch(line)
        if match and match[1].startswith(self._fence) and not match[2].strip():
            self.kind, self.lines = "other", 0

    def _in_list(self, line: str) -> None:
        ends = self._blank and line[:1] not in ("", " ", "\t") and not _LIST_ITEM.match(line)
        if ends or _FENCE.match(line):
            self._start(line)
        else:
            self.lines += 1
            self._blank = not line.strip()

    def _start(self, line: str) -> None:
        self._blank = False
        self.lines = 1
        if (match := _FENCE.fullmatch(line)) and not (match[1][0] == "`" and "`" in match[2]):
            self.kind, self._fence = "fence", match[1]
        elif _LIST_ITEM.match(line):
            self.kind = "list"
        elif line.lstrip().startswith("|"):
            self.kind = "table"
        else:
            self.kind, self.lines = "other", 0
