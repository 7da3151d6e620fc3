"""`Store`: a folder of stored models, and the models' names, which never point outside it. All works without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from models.catalogue import KNOWN
from models.errors import ModelNotFoundError, StoreError
from models.gguf.header import DEFAULT_TYPES, PART, type_of
from models.recipe import QOQ_STEPS, Recipe
from models.store.durable import explained, move_folder, private_folder, remove_folder
from models.store.manifest import Manifest, verify
from models.store.model import StoredModel, StoredModelInfo

_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_SEPARATOR = "--"
"""Replaces the slash of `org/name` in a folder's name, as in the Hugging Face cache."""
GGUF = ".gguf"
"""Ending of a GGUF file."""
_SNAPSHOT = re.compile(r"models--(?P<name>.+)")


def check_name(name: str) -> str:
    """Return `name` if it may name a stored model: `name` or `org/name` of letters, digits, `.`, `_` and `-`.

    Raises:
        StoreError: it may not, for example because it tries to leave the store.
    """
    parts = name.split("/")
    good = len(parts) <= 2 and all(_PART.fullmatch(part) for part in parts)
    if not good or _SEPARATOR in name or ".." in name or len(name) > 150:
        raise StoreError(
            f"{name!r} is not a good model name: use letters, digits, '.', '_' and single '-', beginning and ending "
            "with a letter or digit, as in 'name' or 'org/name'"
        )
    return name


def folder_of(name: str) -> str:
    return check_name(name).replace("/", _SEPARATOR)


def name_of(folder: str) -> str:
    """The model that a folder of the store belongs to.

    Raises:
        StoreError: the folder is none that `folder_of` gives.
    """
    return check_name(folder.replace(_SEPARATOR, "/", 1))


def source_name(checkpoint: Path) -> str:
    """The name of a checkpoint: its short name, or `org/name` in the Hugging Face cache, else its file name.

    A GGUF file in that cache is `org/name:TYPE`, or `org/name` if it has the type that is taken by default.
    """
    for known in KNOWN.values():
        if checkpoint.name == known.file:
            return known.name
    path = checkpoint.absolute() if checkpoint.is_file() else checkpoint.resolve()  # a file there links to a blob
    folder = path.parent if path.name.endswith(GGUF) else path
    if folder.parent.name == "snapshots" and (match := _SNAPSHOT.fullmatch(folder.parent.parent.name)):
        kind = None if folder is path else type_of(path.name)
        return match["name"].replace("--", "/", 1) + (f":{kind}" if kind not in (None, DEFAULT_TYPES[0]) else "")
    match = PART.fullmatch(path.name)
    return path.name if match is None else f"{match['model']}{GGUF}"


def made_of_hub(source: str, asked: str) -> bool:
    """Whether a model's source is what a name on the hub asks for, `owner/name` or `owner/name:TYPE`."""
    repository, _, kind = asked.partition(":")
    if kind and kind.upper() != DEFAULT_TYPES[0]:
        return source == f"{repository}:{kind.upper()}"
    return source == repository or source.startswith(f"{repository}:")


def default_name(checkpoint: Path, recipe: Recipe) -> str:
    """Name of a model unless one is given: source, method and bits, and what else differs from the usual recipe.

    For example `english3m-gptq-3bit`, or `org/name-rtn-4bit-g128` for a downloaded checkpoint.
    """
    known = source_name(checkpoint).removesuffix(GGUF)
    source = "/".join(filter(None, (_cleaned(part) for part in known.split("/")))) or "model"
    if recipe.kept:
        return check_name(f"{source}-{recipe.method}")
    usual = Recipe.usual(recipe.method, bits=recipe.bits)
    name = f"{source}-{recipe.method}-{recipe.bits:g}bit"
    for letter, field in (("g", "group_size"), ("r", "residual_bits"), ("h", "head_bits"), ("e", "expected_k_chunk")):
        if getattr(recipe, field) != getattr(usual, field):
            name += f"-{letter}{getattr(recipe, field)}"
    if recipe.per_token:
        usual = Recipe.usual(recipe.method, group_size=recipe.group_size)
        for field in QOQ_STEPS:
            if getattr(recipe, field) != getattr(usual, field):
                name += f"-{'' if getattr(recipe, field) else 'no-'}{field.replace('_', '-')}"
    if recipe.smooth_attention and not recipe.per_token:
        name += "-sa"
    return check_name(name)


def _cleaned(text: str) -> str:
    text = re.sub(r"[^A-Za-z0-9._]+", "-", text)  # runs of dashes included
    return re.sub(r"\.{2,}", ".", text).strip("-._")[:60].strip("-._")


_WORK = ".work"
_LOCKS = ".locks"
_REPLACED = ".replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedModel:
    """A folder of the store that is not a usable model."""

    folder: str
    reason: str


Infos = list[StoredModelInfo]
Damages = list[DamagedModel]


class Store:
    """The models under one folder: `<root>/<name>/`, `<root>/<org>--<name>/`.

    Unfinished work is in `<root>/.work/`, locks are in `<root>/.locks/`, and `<root>/.origins.json` says where sources
    are (`models.origins`). Nothing is created before the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self) -> Infos:
        """All usable models, by name. `damaged` has the others."""
        return self._scan()[0]

    def damaged(self) -> Damages:
        """Folders in the store that are no usable models, with the reason."""
        return self._scan()[1]

    def info(self, name: str) -> StoredModelInfo:
        """The description of one model, known without opening its weights.

        Raises:
            ModelNotFoundError: no model has that name.
            StoreError: it is damaged.
        """
        return StoredModelInfo.read(self._existing(name), name)

    def open(self, name: str) -> StoredModel:
        """Open a model: sizes, headers and sampled checksums are checked, weights are mapped.

        Raises:
            ModelNotFoundError: no model has that name.
            StoreError: it is damaged.
        """
        return StoredModel.open_folder(self._existing(name), name)

    def verify(self, name: str, watch: Callable[[int, int], None] | None = None) -> None:
        """Compare the sha256 of every file of a model.

        Raises:
            ModelNotFoundError: no model has that name.
            StoreError: it is damaged.
        """
        folder = self._existing(name)
        verify(folder, Manifest.read(folder), watch)

    def remove(self, name: str) -> None:
        """Delete a model, usable or not, and any unfinished work of that name.

        Raises:
            ModelNotFoundError: there is neither.
            StoreError: another process is making the model just now, or the system refuses.
        """
        folder, work = self.path(name), self.work_folder(name)
        if not (_exists(folder) or work.exists()):
            self._existing(name)
        with self.lock(name):
            if _exists(folder):
                doomed = work.with_name(work.name + ".removed")
                private_folder(doomed.parent)
                remove_folder(doomed)
                move_folder(folder, doomed)
                remove_folder(doomed)
            remove_folder(work)

    def path(self, name: str) -> Path:
        """The folder of a model of that name, whether or not it exists.

        Raises:
            StoreError: the name is invalid.
        """
        return self.root / folder_of(name)

    def __contains__(self, name: str) -> bool:
        self._recover(name)
        return _exists(self.path(name))

    def work_folder(self, name: str) -> Path:
        return self.root / _WORK / folder_of(name)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the right to make, replace or remove a model of that name.

        Raises:
            StoreError: another process holds it.
        """
        from filelock import FileLock, Timeout

        private_folder(self.root / _LOCKS)
        lock = FileLock(self.root / _LOCKS / f"{folder_of(name)}.lock", timeout=0)
        with explained(f"cannot lock {name} in {self.root}"):
            try:
                lock.acquire()
            except Timeout as error:
                raise StoreError(f"{name} is being made or removed by another process; wait until it ends") from error
        try:
            self._put_back(name)
            yield
        finally:
            lock.release()

    def publish(self, name: str) -> None:
        """Move the finished work folder of `name` into its place, replacing a model of that name.

        The caller holds the lock. A crash leaves the old model, the new one, or a state that the next access repairs.

        Raises:
            StoreError: the system refuses.
        """
        target, work, replaced = self.path(name), self.work_folder(name), self._replaced(name)
        if _exists(target):
            remove_folder(replaced)
            move_folder(target, replaced)
        move_folder(work, target)
        remove_folder(replaced)

    def _existing(self, name: str) -> Path:
        self._recover(name)
        folder = self.path(name)
        if not _exists(folder):
            names = ", ".join(info.name for info in self.list()[:10])
            raise ModelNotFoundError(
                f"there is no stored model {name!r}; "
                + (f"the store has: {names}" if names else f"the store {self.root} is empty")
            )
        return folder

    def _recover(self, name: str) -> None:
        """Restore a model whose replacement was interrupted between the two renames, by taking the lock."""
        if not self._replaced(name).exists() or _exists(self.path(name)):
            return
        # On failure another process is replacing it, or the store is read-only; the name stays missing.
        with suppress(StoreError), self.lock(name):
            pass

    def _put_back(self, name: str) -> None:
        if self._replaced(name).exists() and not _exists(self.path(name)):
            move_folder(self._replaced(name), self.path(name))

    def _replaced(self, name: str) -> Path:
        return self.root / _WORK / (folder_of(name) + _REPLACED)

    def _scan(self) -> tuple[Infos, Damages]:
        good: Infos = []
        bad: Damages = []
        for replaced in (self.root / _WORK).glob(f"*{_REPLACED}"):
            with suppress(StoreError):  # none of ours
                self._recover(name_of(replaced.name.removesuffix(_REPLACED)))
        with explained(f"cannot list {self.root}"):
            folders = sorted(path for path in self.root.iterdir()) if self.root.exists() else []
        for folder in folders:
            if folder.name.startswith("."):
                continue
            try:
                good.append(StoredModelInfo.read(folder, name_of(folder.name)))
            except StoreError as error:
                bad.append(DamagedModel(folder=folder.name, reason=str(error)))
        return sorted(good, key=lambda info: info.name), bad


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()
