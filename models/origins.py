"""Origins of stored models: where the checkpoint is that a model was made from. Works without torch.

Whether a model was made from a given checkpoint is told by the sha256 of every source file in its recipe.json, since
names alone do not identify weights. Hashing gigabytes at every start would take seconds, so a match is cached together
with the sizes and modification times of the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.catalogue import KNOWN
from models.errors import CheckpointError
from models.fetch import fetched
from models.files import replacing
from models.hub import cached, is_hub_name
from models.store import Store, StoredModelInfo
from models.store.layout import RECIPE
from models.store.store import GGUF


class Origins:
    """Cached matches of checkpoints (and their places) and stored models, in a file that may be deleted any time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.file = store.root / ".origins.json"

    def made_from(self, info: StoredModelInfo, checkpoint: Path) -> bool:
        """Whether a model was made from this folder or GGUF file."""
        files = recorded(info)
        if not files or (checkpoint.is_file() and checkpoint.name not in files):
            return False
        folder = _folder(checkpoint)
        stamps = _stamps(folder, files)
        if stamps is None:
            return False
        key = _key(info, folder)
        entry = {"stamps": stamps, "files": files}
        known = self._read()
        if known.get(key) == entry:
            return True
        if any(_sha256(folder / name) != sha256 for name, sha256 in files.items()):
            return False
        self._write({**known, key: entry})
        return True

    def remember(self, info: StoredModelInfo, checkpoint: Path) -> None:
        """Note where the checkpoint is that a model was made from."""
        self._write({_key(info, _folder(checkpoint)): {}, **self._read()})

    def source(self, info: StoredModelInfo) -> Path:
        """The very checkpoint that a model was made from: its folder, or its GGUF file.

        It is looked for where it was noted to be, beside a bundled model, in the Hugging Face cache, and among the
        files of the catalogue.

        Raises:
            CheckpointError: it is nowhere there, or was changed since.
        """
        found = list(self._places(info))
        for place in found:
            if self.made_from(info, place):
                return place
        if found:
            raise CheckpointError(
                f"{found[0]} is not the checkpoint that {info.name} was made from, or was changed since: its checksums "
                "differ from those of the model, so make it again (`quantize --force`)"
            )
        raise CheckpointError(
            f"the checkpoint that {info.name} was made from ({info.source}) is not where it was: get it again "
            "(`pull`), or name its folder or GGUF file once, as in `lowbit-chat run PATH --budget exact`"
        )

    def _places(self, info: StoredModelInfo) -> Iterator[Path]:
        """Where it may be, as far as something is there."""
        begin = _key(info, Path())
        noted = [Path(key.removeprefix(begin)) for key in self._read() if key.startswith(begin)]
        files = [name for name in recorded(info) if name.endswith(GGUF)]
        for folder in (*noted, info.path.with_name("checkpoint")):
            place = folder / files[0] if files else folder
            if place.exists():
                yield place
        if is_hub_name(info.source) and (snapshot := cached(info.source)) is not None:
            yield snapshot
        if info.source in KNOWN and (file := fetched(KNOWN[info.source], self._store)) is not None:
            yield file

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}  # nothing cached: hash the files
        return data if isinstance(data, dict) else {}

    def _write(self, known: dict[str, Any]) -> None:
        """Save the cache. If that fails, files are hashed again next time."""
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.file, synced=False) as file:
                file.write(json.dumps(known).encode())
        except OSError:
            return


def _folder(checkpoint: Path) -> Path:
    return checkpoint.parent if checkpoint.is_file() else checkpoint


def _key(info: StoredModelInfo, folder: Path) -> str:
    return f"{info.path.resolve()} {folder.resolve() if folder.name else ''}"


def recorded(info: StoredModelInfo) -> dict[str, str]:
    """sha256 by name of the files that a model was made from; empty if not recorded."""
    try:
        files = json.loads((info.path / RECIPE).read_text(encoding="utf-8"))["source"]["files"]
        return {str(name): str(entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _stamps(folder: Path, names: dict[str, str]) -> dict[str, list[int]] | None:
    """Size and modification time of each file; None if any is missing."""
    try:
        statuses = {name: (folder / name).stat() for name in names}
    except OSError:
        return None
    return {name: [status.st_size, status.st_mtime_ns] for name, status in statuses.items()}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
