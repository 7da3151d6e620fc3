"""Models that stay loaded while another one answers, so that a request for one of them does not load it again."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Iterator

from runtime.load.loading import LoadedModel
from runtime.wire.requests import LoadRequest


class Parked:
    """Loaded models that do not answer, the least recently used first. Thread-safe to read; one thread changes them.

    Args:
        most: How many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._models: OrderedDict[str, tuple[LoadRequest, LoadedModel]] = OrderedDict()

    def __iter__(self) -> Iterator[LoadedModel]:
        """The models, the latest used first."""
        with self._lock:
            models = [loaded for _, loaded in self._models.values()]
        return reversed(models)

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._models

    def put(self, request: LoadRequest, loaded: LoadedModel) -> None:
        """Keep a model. The least recently used ones that are too many are closed."""
        with self._lock:
            self._models[request.model] = request, loaded
        while len(self._models) > self._most:
            self.drop_oldest()

    def take(self, name: str) -> tuple[LoadRequest, LoadedModel] | None:
        """A model, and how it was loaded; it is no longer kept here. None if it is not."""
        with self._lock:
            return self._models.pop(name, None)

    def drop_oldest(self) -> bool:
        """Close the least recently used one. Returns whether there was one."""
        with self._lock:
            dropped = self._models.popitem(last=False)[1][1] if self._models else None
        if dropped is None:
            return False
        dropped.engine.close()
        del dropped
        gc.collect()  # the memory is needed now
        return True

    def close(self) -> None:
        """Close all."""
        while self.drop_oldest():
            pass
