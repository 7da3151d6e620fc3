"""Catalogue: the models that a server can load, from the store and bundled with the program."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import StoreError
from models.store import Store, StoredModel, StoredModelInfo
from runtime.engine.conversations.saved_folder import forgetting
from runtime.errors import RequestError
from runtime.wire.answers import ModelEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Files bundled with the program, whose location the runtime does not know by itself."""

    models: Mapping[str, Path] = field(default_factory=dict)
    """Folders of bundled models in the store's layout, by name."""
    calibration: Path | None = None
    """Text for calibrating quantizers."""
    evaluation: Path | None = None
    """Text for measuring new models."""


class StoreCatalogue:
    """The models of a store, and the bundled ones.

    Args:
        store: The store.
        bundled: Folders of the bundled models, by name.
        chats: Folder of saved caches, to delete those of a deleted model; None: no saved caches.
    """

    def __init__(self, store: Store, bundled: Mapping[str, Path], chats: Path | None = None) -> None:
        self._store = store
        self._bundled = bundled
        self._chats = chats

    def entries(self) -> list[ModelEntry]:
        """All usable models, by name, bundled ones first."""
        bundled = [entry for name in sorted(self._bundled) if (entry := self.find(name)) is not None]
        taken = {entry.name for entry in bundled}
        return bundled + [model_entry(info) for info in self._store.list() if info.name not in taken]

    def find(self, name: str) -> ModelEntry | None:
        """A model by name; None if there is none, or if it is too damaged to be listed."""
        try:
            if name in self._bundled:
                return model_entry(StoredModelInfo.read(self._bundled[name], name), bundled=True)
            return model_entry(self._store.info(name))
        except StoreError:
            return None

    def open(self, name: str) -> StoredModel:
        """Open a model's files.

        Raises:
            ModelNotFoundError: there is none of that name.
            StoreError: it is damaged.
        """
        if name in self._bundled:
            return StoredModel.open_folder(self._bundled[name], name)
        return self._store.open(name)

    def remove(self, name: str) -> None:
        """Delete a stored model.

        Raises:
            RequestError: it is bundled.
            ModelError: there is none of that name, or the system refuses.
        """
        if name in self._bundled:
            raise RequestError(f"{name} is part of the program and cannot be removed")
        with nullcontext() if self._chats is None else forgetting(self._chats, self._store.root):
            self._store.remove(name)


def model_entry(info: StoredModelInfo, *, bundled: bool = False) -> ModelEntry:
    """A model's entry in the list."""
    summary = info.summary
    return ModelEntry(
        name=info.name,
        bits=info.recipe.bits,
        bits_per_weight=summary.bits_per_weight,
        disk_bytes=summary.disk_bytes,
        gpu_bytes=summary.gpu_bytes,
        active_bytes=summary.active_bytes,
        residual_bytes=summary.residual_bytes,
        parameters=summary.parameters,
        family=summary.family,
        context=summary.context,
        bundled=bundled,
        method=info.recipe.method,
        smooth_attention=info.recipe.smooth_attention,
        perplexity_before=summary.perplexity_before,
        perplexity_after=summary.perplexity_after,
        warning=summary.warning,
        created=_created(info.path),
    )


def _created(folder: Path) -> int:
    try:
        return int(folder.stat().st_mtime)
    except OSError:
        return 0
