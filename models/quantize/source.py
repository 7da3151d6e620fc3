"""The source of a stored model: the checkpoint's files by sha256, and the texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from models.checkpoint_files import CheckpointFiles
from models.quantize.text import EVALUATION_TOKENS, TOKENIZER_FILES, WINDOW, calibration_limit
from models.recipe import Recipe
from models.store import layout
from models.store.manifest import describe
from models.store.names import source_name

_VERSIONED = ("numpy", "numba", "tokenizers", "torch", "transformers")
_QUANTIZERS = "3"
"""Raised where the same recipe gives another result, or a half-made model would go on differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Files of a checkpoint that decide the result."""

    files: Mapping[str, Mapping[str, Any]]
    """`bytes` and `sha256` of each, by name."""
    stamps: Mapping[str, list[int]]
    """Size and modification time in nanoseconds of each, by name."""


def read_source(checkpoint: CheckpointFiles, earlier: Mapping[str, Any], watch: Callable[[int, int], None]) -> Source:
    """Hash the files of a checkpoint, except those that have not been touched since an earlier run.

    Args:
        checkpoint: The checkpoint.
        earlier: The state of the earlier run, or an empty mapping.
        watch: Called with bytes hashed and bytes in all; may raise to stop.

    Raises:
        StoreError: a file cannot be read.
    """
    small = (layout.CONFIG, layout.GENERATION_CONFIG, *TOKENIZER_FILES)
    present = [checkpoint.path / name for name in small] if checkpoint.path.is_dir() else []
    paths = [path for path in present if path.is_file()] + list(checkpoint.weights)
    status = {path.name: path.stat() for path in paths}
    stamps = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in status.items()}
    known: Mapping[str, Any] = earlier.get("identity", {}).get("source", {}).get("files", {})
    known_stamps = earlier.get("stamps", {})
    total = sum(stat.st_size for stat in status.values())
    files: dict[str, Mapping[str, Any]] = {}
    done = 0
    for path in sorted(paths):
        if path.name in known and known_stamps.get(path.name) == stamps[path.name]:
            files[path.name] = known[path.name]
        else:
            entry = describe(path, partial(_shifted, watch, done, total))
            files[path.name] = {"bytes": entry.bytes, "sha256": entry.sha256}
        done += stamps[path.name][0]
    return Source(files=files, stamps=stamps)


def _shifted(watch: Callable[[int, int], None], before: int, total: int, size: int) -> None:
    watch(before + size, total)


def identity_of(
    checkpoint: CheckpointFiles, source: Source, recipe: Recipe, calibration: str | None, evaluation: str | None
) -> dict[str, Any]:
    """Everything that decides the result, as recipe.json records it."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    types = {} if checkpoint.types is None else {"types": dict(checkpoint.types)}
    revision = folder.resolve().name if folder.resolve().parent.name == "snapshots" else None
    return {
        "recipe": recipe.to_json(),
        "source": {"name": source_name(checkpoint.path), "revision": revision, "files": dict(source.files), **types},
        "texts": {
            "window": WINDOW,
            "calibration": _text(calibration, calibration_limit(recipe.method)),
            "evaluation": _text(evaluation, EVALUATION_TOKENS),
        },
        "versions": {"quantizers": _QUANTIZERS} | {name: version(name) for name in _VERSIONED},
    }


def _text(text: str | None, limit: int) -> dict[str, Any] | None:
    if text is None:
        return None
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "most_tokens": limit}
