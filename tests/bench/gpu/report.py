"""Results as they arrive: rows of one part of the benchmark, saved to disk one by one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.bench.reporting.run import write_report

Row = dict[str, Any]


class Part:
    """The rows of one part.

    Args:
        file: Where they are kept.
        seconds: How long the part should take; `late` says when it has.
    """

    def __init__(self, file: Path, seconds: float) -> None:
        self._file = file
        self._begin = time.monotonic()
        self._seconds = seconds
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Keep and print a row."""
        self.rows.append(row)
        write_report(self._file, self.rows)
        print("  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    def begin(self, row: Row) -> None:
        """Note what is measured next: where a part hangs, its last row says at what."""
        write_report(self._file, [*self.rows, {"what": "begun"} | row])

    def late(self) -> bool:
        """Whether no further measurement should begin."""
        return time.monotonic() - self._begin > self._seconds
