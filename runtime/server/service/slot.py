"""Model slot: holds the loaded model, and its state."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from models.errors import CancelledError
from models.progress import Cancelled as CancelledCheck
from models.progress import Progress, ProgressCallback, ignore_progress
from runtime import program_version
from runtime.errors import Cancelled
from runtime.server.errors import api_error, conflict, unknown_model
from runtime.server.service.interfaces import Catalogue, LoadedModel, Loader
from runtime.wire.answers import ErrorRecord, Holding, State, Status
from runtime.wire.requests import LoadRequest, TuneRequest

logger = logging.getLogger(__name__)


class ModelSlot:
    """The loaded model. `status` and `holds` are thread-safe; everything else belongs to the engine's thread."""

    def __init__(self, loader: Loader, catalogue: Catalogue) -> None:
        self._loader = loader
        self._catalogue = catalogue
        self._lock = threading.Lock()  # guards the four fields below while they are copied
        self._state: State = "empty"
        self._loaded: LoadedModel | None = None
        self._target: LoadRequest | None = None  # the model that is loaded, being loaded, or unloaded when idle
        self._error: ErrorRecord | None = None
        self.tuning = False
        """Whether the device is being measured."""
        self._answered = False  # whether the loaded model has answered anything
        self._refines = True  # until refining fails

    def status(self, waiting: int) -> Status:
        """The runtime's state, given the number of waiting requests."""
        import psutil

        with self._lock:
            state, loaded, target, error = self._state, self._loaded, self._target, self._error
        status = Status(
            state=state,
            model=target.model if target is not None and state == "loading" else None,
            memory_bytes=int(psutil.Process().memory_info().rss),
            waiting=waiting + (loaded.engine.waiting if loaded is not None else 0),
            pid=os.getpid(),
            version=program_version(),
            error=error,
        )
        if loaded is None:
            return status
        running = loaded.engine.running
        return replace(
            status,
            state="generating" if running and state == "ready" else state,
            running=running,
            slots=loaded.slots,
            model=loaded.name,
            backend=loaded.backend,
            reason=loaded.reason,
            bits=loaded.bits,
            kv=loaded.kv,
            k_chunk=dict(loaded.k_chunk),
            budget_percent=loaded.tuning.budget_percent if loaded.tuning else None,
            slowdown_percent=loaded.tuning.measured_slowdown_percent if loaded.tuning else None,
            prompt_k_chunk=loaded.prompts.k_chunk if loaded.prompts else 0,
            prompt_slowdown_percent=loaded.prompts.measured_slowdown_percent if loaded.prompts else None,
            n_tb=dict(loaded.tuning.n_tb) if loaded.tuning and loaded.tuning.n_tb_max is not None else None,
            speculates=bool(loaded.speculation),
            context=loaded.context,
            weight_bytes=loaded.weight_bytes,
            kv_bytes=loaded.kv_bytes,
            sampling=dict(loaded.sampling),
        )

    @property
    def loaded(self) -> LoadedModel | None:
        """The loaded model; thread-safe."""
        with self._lock:
            return self._loaded

    def holds(self, name: str) -> bool:
        """Whether a model is loaded, or being loaded."""
        with self._lock:
            return self._state not in ("empty", "failed") and self._target is not None and self._target.model == name

    def load(self, request: LoadRequest, progress: ProgressCallback, cancelled: CancelledCheck) -> LoadedModel:
        """Unload the current model, then load. An unknown model leaves the current one loaded.

        Raises:
            ApiError: there is no such model.
            RuntimeFailure, ModelError: it cannot be loaded; no model is loaded then.
        """
        if self._catalogue.find(request.model) is None:
            raise unknown_model(request.model)
        if cancelled():
            raise Cancelled("the load was stopped")
        self._put_aside()
        self._set("loading", target=request)
        try:
            progress(
                Progress(phase="load", done=0, total=None, unit="", message=f"loading {request.model}"),
            )
            loaded = self._loader.load(request, progress, cancelled)
        except (Cancelled, CancelledError):
            self._set("empty")
            raise
        except BaseException as error:
            self._set("failed", target=request, error=api_error(error).record)
            raise
        self._answered, self._refines = False, True
        self._set("ready", target=request, loaded=loaded)
        return loaded

    def ensure(self, name: str, cancelled: CancelledCheck) -> LoadedModel:
        """The model of that name, loaded if it is not the current one.

        The kind of cache, the compensation or its budget, and the backend stay as last requested.

        Raises:
            ApiError, RuntimeFailure, ModelError: as `load`.
        """
        with self._lock:
            loaded, target = self._loaded, self._target
        if loaded is not None and target is not None and target.model == name:
            return loaded
        if target is None:
            request = LoadRequest(model=name)
        else:
            request = target if target.model == name else replace(target, model=name, context=None)
        return self.load(request, ignore_progress, cancelled)

    def tune(self, request: TuneRequest, progress: ProgressCallback, cancelled: CancelledCheck) -> LoadedModel:
        """Change the compensation of the loaded model. A model that was unloaded when idle is loaded first.

        Raises:
            ApiError: no model is loaded.
            RuntimeFailure, ModelError: it was stopped, or cannot be done; everything stays as it was.
        """
        with self._lock:
            loaded, target = self._loaded, self._target
        if target is None:
            raise conflict("no model is loaded, so there is nothing to tune: load one first", "no_model")
        compensation = request.compensation
        wanted = replace(
            target,
            k_chunk=compensation.k_chunk,
            budget=compensation.budget_percent,
            prompt_budget=compensation.prompt_budget_percent,
        )
        if loaded is None:
            loaded = self.load(wanted, progress, cancelled)
            if not request.force:
                return loaded
        self.tuning = True
        try:
            tuned = self._loader.tune(loaded, request, progress, cancelled)
        finally:
            self.tuning = False
        with self._lock:
            self._loaded = tuned
            self._target = wanted
        return tuned

    def refine(self, cancelled: CancelledCheck) -> None:
        """Improve the tuning of the loaded model step by step, once it has answered something. Never raises."""
        loaded = self.loaded
        if loaded is None or not (self._answered and self._refines) or cancelled():
            return
        self.tuning = True
        try:
            while (better := self._loader.refine(loaded, cancelled)) is not loaded:
                loaded = better
                with self._lock:
                    self._loaded = better
        except Exception:
            self._refines = False
            logger.exception("refining the slowdown budget failed")
        finally:
            self.tuning = False

    def forget(self, chat: str | None) -> Holding:
        """Delete the cached data of a conversation, or of all, in memory and on disk. Returns the deleted files.

        Raises:
            SavedCacheError: the system refuses to delete a file.
        """
        loaded = self.loaded
        if loaded is not None:
            loaded.engine.forget(chat)
        return self._loader.forget(chat)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Context manager: the state is "generating", for work that is not an engine request."""
        with self._lock:
            self._state = "generating"
        try:
            yield
        finally:
            with self._lock:
                self._state = "ready"

    def step(self) -> bool:
        """Run one step of the loaded model's requests. Returns whether work remains. Never raises."""
        loaded = self.loaded
        if loaded is None:
            return False
        try:
            self._answered |= loaded.engine.running > 0
            return loaded.engine.step()
        except BaseException as failure:
            logger.exception("a step failed")
            loaded.engine.abandon(api_error(failure))
            return False

    def is_ready(self, name: str) -> bool:
        """Whether a model is loaded, so that a request for it can join the running ones."""
        with self._lock:
            return self._loaded is not None and self._target is not None and self._target.model == name

    def unload(self) -> None:
        """Unload the model and forget how it was loaded."""
        self._put_aside()
        self._set("empty")

    def rest(self) -> None:
        """Unload the model when idle, and reload it in the same way on the next request."""
        with self._lock:
            target, loaded = self._target, self._loaded
        if loaded is not None:
            self._put_aside()
            self._set("empty", target=target)

    def _put_aside(self) -> None:
        with self._lock:
            loaded, self._loaded = self._loaded, None
            self._state = "empty" if loaded is not None else self._state
        if loaded is not None:
            loaded.engine.close()
            del loaded
            gc.collect()  # the memory is needed now, for the next model or other programs

    def _set(
        self,
        state: State,
        *,
        target: LoadRequest | None = None,
        loaded: LoadedModel | None = None,
        error: ErrorRecord | None = None,
    ) -> None:
        with self._lock:
            self._state, self._target, self._loaded, self._error = state, target, loaded, error
