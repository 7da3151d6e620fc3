"""The real loader and catalogue: stored models and bundled ones, planned against free memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import StoreError
from models.progress import Cancelled as CancelledCheck
from models.progress import Progress, ProgressCallback
from models.store import Store, StoredModel, StoredModelInfo
from runtime.errors import Cancelled, RequestError
from runtime.server.records import LoadedModel, LoadRequest, ModelEntry
from runtime.server.service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What came with the program. The runtime does not know where it lies and is told."""

    models: Mapping[str, Path] = field(default_factory=dict)
    """Folders of bundled models in the store's layout, by name."""
    calibration: Path | None = None
    """Text from which quantizers take activations."""
    evaluation: Path | None = None
    """Text on which a new model is measured."""


class StoreCatalogue:
    """The models of a store, and the bundled ones."""

    def __init__(self, store: Store, bundled: Mapping[str, Path]) -> None:
        self._store = store
        self._bundled = bundled

    def entries(self) -> list[ModelEntry]:
        """All usable models, by name, bundled ones first."""
        bundled = [entry for name in sorted(self._bundled) if (entry := self.find(name)) is not None]
        taken = {entry.name for entry in bundled}
        return bundled + [model_entry(info) for info in self._store.list() if info.name not in taken]

    def find(self, name: str) -> ModelEntry | None:
        """One of them; None if there is none of that name, or if it is damaged beyond being listed."""
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
        self._store.remove(name)


class StoreLoader:
    """Loads models of a catalogue with `runtime.open`."""

    def __init__(self, catalogue: StoreCatalogue) -> None:
        self._catalogue = catalogue

    def load(self, request: LoadRequest, progress: ProgressCallback, cancelled: CancelledCheck) -> LoadedModel:
        """Load a model. A context longer than the model's own is cut to it.

        Raises:
            Cancelled: `cancelled` said so.
            ModelError: the model is missing or damaged.
            RuntimeFailure: memory does not suffice, or the backend cannot run it.
        """
        from runtime.decoder import DecoderOptions
        from runtime.kernels.select.budget import LAYER_KINDS, default_k_chunk, k_chunk_of
        from runtime.memory import ModelSizes, describe, plan
        from runtime.open import open_engine, preparation

        def report(phase: str, message: str) -> None:
            if cancelled():
                raise Cancelled("the load was stopped")
            progress(Progress(phase=phase, done=0, total=None, unit="", message=message))

        report("open", f"opening {request.model}")
        model = self._catalogue.open(request.model)
        summary = model.info.summary
        k_chunk = default_k_chunk(model.recipe.residual_bits) if request.k_chunk is None else request.k_chunk
        by_type = {kind: k_chunk_of(k_chunk, kind) for kind in LAYER_KINDS}
        planned = plan(
            model.spec,
            ModelSizes(weight_bytes=summary.gpu_bytes, residual_bytes=summary.residual_bytes),
            kv=request.kv or "fp16",
            context=None if request.context is None else min(request.context, model.spec.max_context),
            backend="reference" if request.backend == "reference" else "cpu",
            compensated=any(by_type.values()),
        )
        if first := preparation(request.backend):
            report("compile", first)
        else:
            report("load", f"loading {request.model}: {describe(planned)}")
        options = DecoderOptions(kv=request.kv or "fp16", context=planned.context, k_chunk=by_type)
        engine = open_engine(model, options, request.backend)
        if cancelled():
            engine.close()
            raise Cancelled("the load was stopped")
        return LoadedModel(
            name=request.model,
            engine=engine,
            backend=engine.decoder.backend,
            reason=engine.reason,
            bits=model.recipe.bits,
            kv=options.kv,
            k_chunk=by_type,
            context=options.context,
            weight_bytes=engine.decoder.weight_bytes,
            kv_bytes=engine.decoder.kv_bytes,
        )


def open_service(home: Path, bundle: Bundle, *, idle_unload_s: float | None = None) -> Service:
    """The service of the models under a home folder.

    Args:
        home: The program's folder; the store is `<home>/models`.
        bundle: What came with the program.
        idle_unload_s: Unload a model after so many seconds without a request; None: never.
    """
    from runtime.server.making import StoreWorkshop

    store = Store(home / "models")
    catalogue = StoreCatalogue(store, bundle.models)
    return Service(StoreLoader(catalogue), catalogue, StoreWorkshop(store, bundle), idle_unload_s=idle_unload_s)


def model_entry(info: StoredModelInfo, *, bundled: bool = False) -> ModelEntry:
    """What a listing shows of a model."""
    summary = info.summary
    return ModelEntry(
        name=info.name,
        bits=info.recipe.bits,
        bits_per_weight=summary.bits_per_weight,
        disk_bytes=summary.disk_bytes,
        gpu_bytes=summary.gpu_bytes,
        residual_bytes=summary.residual_bytes,
        parameters=summary.parameters,
        family=summary.family,
        context=summary.context,
        bundled=bundled,
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
