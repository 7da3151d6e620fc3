"""The results file: every measured number with all its inputs, so that a later run only fills gaps."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.store.durable import write_file
from tests.bench.reporting.origin import commit

Entry = dict[str, Any]
"""A JSON object: what was measured, `key`, `code`, `date`, `commit`, and the numbers."""


def digest(value: object) -> str:
    """Sixteen hexadecimal digits for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digest_files(files: Iterable[Path]) -> str:
    """The same for the content of files, in the order of their paths."""
    joined = hashlib.sha256()
    for file in sorted(files):
        joined.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return joined.hexdigest()[:16]


class Results:
    """Entries by section and key, in a JSON file that is replaced as a whole.

    Args:
        path: The file; need not exist.
        keep: Whether entries of another version of the program's code count.
    """

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        self.path = path
        self._keep = keep
        self._used: set[tuple[str, str]] = set()
        self.about: Entry = {}
        """Machine, versions, texts: what concerns all entries."""
        self.sections: dict[str, dict[str, Entry]] = {}
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            self.about = content["about"]
            for section, entries in content["sections"].items():
                self.sections[section] = {entry["key"]: entry for entry in entries}

    def find(self, section: str, identity: object, code: str) -> Entry | None:
        """What was measured before with the same identity, if it still counts.

        Args:
            section: `points`, `stored`, `full`, `peers`, ...
            identity: JSON value: everything that decides the numbers but the program's code.
            code: Digest of the code that decides them.
        """
        key = digest(identity)
        entry = self.sections.get(section, {}).get(key)
        if entry is None or not (self._keep or entry["code"] == code):
            return None
        self._used.add((section, key))
        return entry

    def add(self, section: str, identity: object, code: str, numbers: Mapping[str, Any]) -> Entry:
        """Keep what was measured; `save` writes it."""
        key = digest(identity)
        today = dt.datetime.now(tz=dt.UTC).date().isoformat()
        entry = {"key": key, "code": code, "date": today, "commit": commit(), **numbers}
        self.sections.setdefault(section, {})[key] = entry
        self._used.add((section, key))
        return entry

    def drop_unused(self) -> None:
        """Forget entries that this run neither found nor added: leftovers of other texts, recipes or code."""
        for section, entries in self.sections.items():
            self.sections[section] = {key: entry for key, entry in entries.items() if (section, key) in self._used}

    def all(self, section: str) -> list[Entry]:
        """The entries of a section in a stable order."""
        return [entry for _, entry in sorted(self.sections.get(section, {}).items(), key=_order)]

    def save(self) -> None:
        """Write the file, one line for each entry."""
        lines = ["{", f'"about": {json.dumps(self.about, ensure_ascii=False)},', '"sections": {']
        for number, section in enumerate(sorted(self.sections)):
            rows = [json.dumps(entry, ensure_ascii=False) for entry in self.all(section)]
            comma = "," if number + 1 < len(self.sections) else ""
            lines += [f'"{section}": [', ",\n".join(rows), f"]{comma}"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.path, ["\n".join([*lines, "}", "}", ""]).encode()])


def _order(item: tuple[str, Entry]) -> str:
    shown = {key: value for key, value in item[1].items() if isinstance(value, str | int | float | bool)}
    fields = ("model", "method", "kind", "bits", "group_size", "residual_bits", "select")
    rank = [f"{shown.get(name, '')!s:>12}" for name in fields]
    return "|".join([*rank, f"{shown.get('k_chunk', 0):>6}", item[0]])
