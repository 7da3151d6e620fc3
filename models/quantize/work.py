"""The source of a stored model (its checkpoint's files by sha256, and the texts), and the folder in which it is made.

In that folder every file is written atomically and followed by an entry (`<file>.entry`) with its checksums; a file
with an entry is complete. `state.json` records the inputs; a folder with different inputs is discarded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models.checkpoint_files import CheckpointFiles
from models.errors import StoreError
from models.foreign import read_json
from models.plain_tokenizer import TOKENIZER_FILES
from models.quantize.text import EVALUATION_TOKENS, WINDOW, calibration_limit
from models.recipe import Recipe
from models.store import layout
from models.store.durable import private_folder, remove_folder, write_file
from models.store.layout import MANIFEST, RECIPE, block_file
from models.store.manifest import FileEntry, Manifest, describe, json_bytes, sample
from models.store.store import source_name
from models.store.tensors import Array, MappedTensors, PiecewiseTensor, tensor_file

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
    """Hash the files of a checkpoint, except those that have not been touched since an earlier run."""
    small = (layout.CONFIG, layout.GENERATION_CONFIG, *TOKENIZER_FILES)
    present = {name: checkpoint.path / name for name in small} if checkpoint.path.is_dir() else {}
    paths = {name: path for name, path in present.items() if path.is_file()}
    paths |= {path.name: path for path in checkpoint.weights}
    status = {name: path.stat() for name, path in paths.items()}
    stamps = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in status.items()}
    known: Mapping[str, Any] = earlier.get("identity", {}).get("source", {}).get("files", {})
    known_stamps = earlier.get("stamps", {})
    total = sum(stat.st_size for stat in status.values())
    files: dict[str, Mapping[str, Any]] = {}
    done = 0
    for name, path in sorted(paths.items()):
        if name in known and known_stamps.get(name) == stamps[name]:
            files[name] = known[name]
        else:
            entry = describe(path, partial(_shifted, watch, done, total))
            files[name] = {"bytes": entry.bytes, "sha256": entry.sha256}
        done += stamps[name][0]
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


STATE = "state.json"
_ENTRY = ".entry"
_STREAMS = "streams-"
_QUALITY = "quality"
_ALLOCATION = "allocation.json"
_DONE = ".done"


class Work:
    """The state of one quantization. The caller holds the store's lock on the model's name.

    What writes raises a StoreError where the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def state(self) -> dict[str, Any]:
        """The state that `begin` wrote last time; empty if there is none."""
        return _read_object(self.folder / STATE)

    def begin(self, identity: Mapping[str, Any], stamps: Mapping[str, Any]) -> None:
        """Continue with existing files if they have the same inputs, otherwise start over.

        Args:
            identity: Everything that decides the result, JSON values only.
            stamps: Size and time of each source file, to save hashing them again.
        """
        if identity not in (self.state().get("identity"), self._finished_identity(identity)):
            remove_folder(self.folder)
        private_folder(self.folder)
        if not self.complete() and self.state() != {"identity": identity, "stamps": stamps}:
            write_file(self.folder / STATE, [json_bytes({"identity": identity, "stamps": stamps})])

    def _finished_identity(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The source of the model, as recipe.json names it. Bits of blocks that were not asked for are left out."""
        found = _read_object(self.folder / RECIPE)
        found.pop(_QUALITY, None)
        if found and "block_bits" not in wanted["recipe"]:
            found["recipe"].pop("block_bits", None)
        return found

    def save(self, file: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file of the model and its entry."""
        digest, size = hashlib.sha256(), 0

        def hashed() -> Iterator[bytes | memoryview]:
            nonlocal size
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                yield piece

        path = self.folder / file
        write_file(path, hashed())
        entry = FileEntry(bytes=size, sha256=digest.hexdigest(), sample=sample(path))
        write_file(self.folder / (file + _ENTRY), [json_bytes(asdict(entry))])

    def save_tensors(self, file: str, tensors: Mapping[str, Array | PiecewiseTensor]) -> None:
        """Write a safetensors file of the model and its entry."""
        self.save(file, tensor_file(tensors))

    def save_block_bits(self, bits: tuple[int, ...]) -> None:
        """Keep the bits that were allocated to the blocks."""
        write_file(self.folder / _ALLOCATION, [json_bytes({"block_bits": list(bits)})])

    def block_bits(self) -> tuple[int, ...] | None:
        """The bits that `save_block_bits` kept; None if there are none."""
        found = _read_object(self.folder / _ALLOCATION).get("block_bits")
        return None if found is None else tuple(found)

    def mark(self, phase: str) -> None:
        """Note that a phase before the blocks is done."""
        write_file(self.folder / f"{phase}{_DONE}", [json_bytes({})])

    def marked(self, phase: str) -> bool:
        return (self.folder / f"{phase}{_DONE}").is_file()

    def save_streams(self, layer: int, tensors: Mapping[str, Array]) -> None:
        """Keep the hidden states before block `layer`, and drop those of earlier blocks."""
        write_file(self._streams(layer), tensor_file(tensors))
        for path in self.folder.glob(f"{_STREAMS}*"):
            if path != self._streams(layer):
                path.unlink(missing_ok=True)

    def resume(self) -> tuple[int, MappedTensors] | None:
        """The block to go on with and the hidden states before it; None if nothing is done yet."""
        for path in sorted(self.folder.glob(f"{_STREAMS}*.safetensors"), reverse=True):
            layer = int(path.stem.removeprefix(_STREAMS))
            try:
                streams = MappedTensors(path)
            except StoreError:
                continue
            if all(self.has(block_file(done)) for done in range(layer)):
                return layer, streams
        return None

    def has(self, file: str) -> bool:
        """Whether a file is there as it was written (size and sampled checksum)."""
        path, entry = self.folder / file, _read_object(self.folder / (file + _ENTRY))
        return (
            bool(entry)
            and path.is_file()
            and path.stat().st_size == entry["bytes"]
            and (sample(path) == entry["sample"])
        )

    def entries(self) -> dict[str, FileEntry]:
        paths = sorted(self.folder.glob(f"*{_ENTRY}"))
        return {path.name.removesuffix(_ENTRY): FileEntry(**_read_object(path)) for path in paths}

    def saved_recipe(self) -> dict[str, Any]:
        """The content of recipe.json; empty if it is not written yet."""
        return _read_object(self.folder / RECIPE) if self.has(RECIPE) else {}

    def complete(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    def finish(self) -> Manifest:
        """Remove everything that is not part of the finished model."""
        manifest = Manifest.read(self.folder)
        extra = [path for path in self.folder.iterdir() if path.name not in manifest.files]
        for path in sorted(extra, key=lambda path: path.name == STATE):  # the state goes last
            if path.name != MANIFEST:
                remove_folder(path)
        return manifest

    def _streams(self, layer: int) -> Path:
        return self.folder / f"{_STREAMS}{layer:05d}.safetensors"


def recipe_file(identity: Mapping[str, Any], quality: Mapping[str, Any]) -> bytes:
    return json_bytes({**identity, _QUALITY: quality})


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
