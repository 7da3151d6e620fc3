"""Results as they arrive: rows of one part of the benchmark, saved to disk one by one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

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
        write(self._file, self.rows)
        print("  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)

    def begin(self, row: Row) -> None:
        """Note what is measured next: where a part hangs, its last row says at what."""
        write(self._file, [*self.rows, {"what": "begun"} | row])

    def late(self) -> bool:
        """Whether no further measurement should begin."""
        return time.monotonic() - self._begin > self._seconds


def write(file: Path, value: object) -> None:
    """Write JSON so that a reader finds the old or the new, never half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(file.name + ".part")
    half.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    half.replace(file)
