"""GGUF files that other programs keep on this machine: Ollama, LM Studio, llama.cpp, and the Hugging Face cache.

Nothing there is changed or copied. A name says whose it is: `ollama:llama3.2:3b`, `lmstudio:owner/name/file.gguf`.
Ollama's files are named by their digests, so a link with a readable name leads to one that is used.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from models.errors import CheckpointError
from models.foreign import open_file, parse_json, read_file
from models.gguf.header import PART

OLLAMA, LM_STUDIO, LLAMA_CPP, HUB = "ollama", "lmstudio", "llama.cpp", "hub"
PROGRAMS: Mapping[str, str] = {OLLAMA: "Ollama", LM_STUDIO: "LM Studio", LLAMA_CPP: "llama.cpp", HUB: "hub cache"}
"""What a name begins with, and the program that it stands for."""
_MODEL = "application/vnd.ollama.image.model"
"""Type of the layer of a manifest that is the model."""
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LARGEST_MANIFEST = 1 << 20
_MOST = 10_000
"""Files that are looked at in a folder."""
_USUAL = ("registry.ollama.ai/", "library/")
"""What Ollama leaves out of names."""
_PROJECTOR = "mmproj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A file of another program."""

    program: str
    """One of `PROGRAMS`."""
    own_name: str
    """What the program calls it."""
    path: Path
    size: int
    """Bytes, of a model in parts those of the first."""

    @property
    def name(self) -> str:
        return f"{self.program}:{self.own_name}"


def found(programs: Collection[str] = tuple(PROGRAMS)) -> list[Found]:
    """The files of some programs, by name. Reads folders: call it in a worker thread."""
    files: dict[str, Found] = {}
    for program in programs:
        for own_name, path in _FILES[program]():
            with contextlib.suppress(OSError):
                if _is_gguf(path):
                    one = Found(program=program, own_name=own_name, path=path, size=path.stat().st_size)
                    files.setdefault(one.name, one)
    return [files[name] for name in sorted(files)]


def by_name(name: str, links: Path) -> Path | None:
    """The file of a name; None if it is no name of another program's file.

    Args:
        name: As `Found.name`.
        links: Folder for a link with a readable name, where a file has none.

    Raises:
        CheckpointError: the program has no such file, or the link cannot be made.
    """
    program, colon, own_name = name.partition(":")
    if not colon or program not in PROGRAMS:
        return None
    one = next((one for one in found([program]) if one.name == name), None)
    if one is None:
        raise CheckpointError(
            f"{PROGRAMS[program]} has no model {own_name!r} here: `lowbit-chat list --elsewhere` lists what there is"
        )
    if one.path.suffix == ".gguf":
        return one.path
    link = links / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', own_name).strip('-.')}.gguf"
    try:
        links.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or link.readlink() != one.path:
            link.unlink(missing_ok=True)
            link.symlink_to(one.path)
    except OSError as error:
        raise CheckpointError(f"no link to {one.path} can be made in {links} ({error.strerror})") from error
    return link


def _ollama() -> Iterator[tuple[str, Path]]:
    own = os.environ.get("OLLAMA_MODELS")
    shared = Path("/usr/share/ollama/.ollama/models")
    for folder in [Path(own)] if own else [Path.home() / ".ollama" / "models", shared]:
        manifests = folder / "manifests"
        for path in _walked(manifests):
            parts = path.relative_to(manifests).as_posix().rsplit("/", 1)
            if len(parts) == 1 or (digest := _digest(path)) is None:
                continue
            name, tag = parts
            for usual in _USUAL:
                name = name.removeprefix(usual)
            yield f"{name}:{tag}", folder / "blobs" / f"sha256-{digest}"


def _digest(manifest: Path) -> str | None:
    """The digest of a manifest's model; None if it has none, or cannot be read."""
    try:
        layers = parse_json(read_file(manifest, _LARGEST_MANIFEST))["layers"]
        model = next(layer["digest"] for layer in layers if layer["mediaType"] == _MODEL)
        match = _DIGEST.fullmatch(model)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return None
    return match[1] if match else None


def _lm_studio() -> Iterator[tuple[str, Path]]:
    for folder in (".lmstudio", ".cache/lm-studio"):
        yield from _models_in(Path.home() / folder / "models")


def _llama_cpp() -> Iterator[tuple[str, Path]]:
    caches = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    yield from _models_in(Path(os.environ.get("LLAMA_CACHE") or caches / "llama.cpp"))


def _hub() -> Iterator[tuple[str, Path]]:
    from models.hub.cache import cache_root

    root = cache_root(None)
    for repository in sorted(root.glob("models--*--*")):
        owner_name = "/".join(repository.name.split("--", 2)[1:])
        for snapshot in sorted((repository / "snapshots").glob("*")):
            yield from ((f"{owner_name}/{own_name}", path) for own_name, path in _models_in(snapshot))


_FILES: Mapping[str, Callable[[], Iterator[tuple[str, Path]]]] = {
    OLLAMA: _ollama,
    LM_STUDIO: _lm_studio,
    LLAMA_CPP: _llama_cpp,
    HUB: _hub,
}
"""A program's own names of its files, and the files, which may be missing."""


def _models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """GGUF files in a folder, named by their places in it."""
    for path in _walked(folder):
        if _holds_model(path.name):
            yield path.relative_to(folder).as_posix(), path


def _walked(folder: Path) -> Iterator[Path]:
    """The files in a folder and those in it, a limited number; a folder that cannot be read has none."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > _MOST:
                return
            yield Path(place, name)


def _holds_model(file: str) -> bool:
    """Whether a file is a model, or the first part of one, and no projector of pictures."""
    part = PART.fullmatch(file)
    return file.endswith(".gguf") and not file.startswith(_PROJECTOR) and (part is None or int(part["number"]) == 1)


def _is_gguf(path: Path) -> bool:
    with open_file(path) as file:
        return file.read(4) == b"GGUF"
