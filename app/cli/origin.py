"""Origins: checks whether a stored model was made from a given checkpoint, since names alone do not identify weights.

The model's recipe.json contains the sha256 of every source file. Hashing gigabytes at every start would take seconds,
so a match is cached together with the sizes and modification times of the files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.files import replacing

if TYPE_CHECKING:
    from models.store import StoredModelInfo


class Origins:
    """Cached matches of checkpoints and stored models, in one file that may be deleted at any time."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def made_from(self, info: StoredModelInfo, checkpoint: Path) -> bool:
        """Whether a model was made from this folder or GGUF file."""
        files = recorded(info)
        if not files or (checkpoint.is_file() and list(files) != [checkpoint.name]):
            return False
        folder = checkpoint.parent if checkpoint.is_file() else checkpoint
        stamps = _stamps(folder, files)
        if stamps is None:
            return False
        key = f"{info.path.resolve()} {folder.resolve()}"
        entry = {"stamps": stamps, "files": files}
        known = self._read()
        if known.get(key) == entry:
            return True
        if any(_sha256(folder / name) != sha256 for name, sha256 in files.items()):
            return False
        self._write({**known, key: entry})
        return True

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # nothing cached: hash the files
        return data if isinstance(data, dict) else {}

    def _write(self, known: dict[str, Any]) -> None:
        """Save the cache. If that fails, files are hashed again next time."""
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self._file, synced=False) as file:
                file.write(json.dumps(known).encode())
        except OSError:
            return


def recorded(info: StoredModelInfo) -> dict[str, str]:
    """sha256 by name of the files that a model was made from; empty if not recorded."""
    from models.store.layout import RECIPE

    try:
        files = json.loads((info.path / RECIPE).read_text(encoding="utf-8"))["source"]["files"]
        return {str(name): str(entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _stamps(folder: Path, names: dict[str, str]) -> dict[str, list[int]] | None:
    """Size and modification time of each file; None if any is missing."""
    try:
        found = {name: (folder / name).stat() for name in names}
    except OSError:
        return None
    return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
