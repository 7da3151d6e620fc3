"""Models that stay loaded beside the one that was asked last, so that a request for them does not load them again."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Iterator

from runtime.load.loading import LoadedModel
from runtime.wire.requests import LoadRequest


class Parked:
    """Loaded models, the least recently used first. Thread-safe to read; one thread changes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: OrderedDict[str, tuple[LoadRequest, LoadedModel]] = OrderedDict()

    def __iter__(self) -> Iterator[LoadedModel]:
        """The models, the latest used first."""
        with self._lock:
            models = [loaded for _, loaded in self._models.values()]
        return reversed(models)

    def __len__(self) -> int:
        return len(self._models)

    def get(self, name: str) -> LoadedModel | None:
        with self._lock:
            found = self._models.get(name)
        return None if found is None else found[1]

    def put(self, request: LoadRequest, loaded: LoadedModel) -> None:
        """Keep a model, which was loaded so."""
        with self._lock:
            self._models[request.model] = request, loaded

    def take(self, name: str) -> tuple[LoadRequest, LoadedModel] | None:
        """A model, and how it was loaded; it is no longer kept here. None if it is not."""
        with self._lock:
            return self._models.pop(name, None)

    def drop(self, name: str) -> None:
        """Close a model."""
        dropped = self.take(name)
        if dropped is not None:
            dropped[1].engine.close()
            del dropped
            gc.collect()  # the memory is needed now

    def drop_idle(self) -> bool:
        """Close the least recently used of those that answer nothing. Returns whether there was one."""
        idle = [loaded.name for loaded in self if not loaded.busy]
        if idle:
            self.drop(idle[-1])
        return bool(idle)

    def close(self) -> None:
        """Close all."""
        for name in list(self._models):
            self.drop(name)
