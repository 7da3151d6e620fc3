"""Where a model goes: backend and memory plan together, for a model that does not fit the GPU may fit the CPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from models.spec import ModelSpec
from runtime.backend import AnyBackend, ModelSizes
from runtime.backends import AUTO
from runtime.decoder import KVKind
from runtime.errors import BackendError, OutOfMemoryError
from runtime.memory import MemoryPlan, plan
from runtime.open import candidates
from tuner.detect import MemoryInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What came of it."""

    asked: str
    """What `runtime.open` is to be asked for."""
    backend: AnyBackend
    """What will run the model, unless it fails when it is opened."""
    plan: MemoryPlan
    """What goes where."""


def place(
    spec: ModelSpec,
    sizes: ModelSizes,
    *,
    kv: KVKind,
    context: int | None,
    compensated: bool,
    slots: int = 1,
    asked: str = AUTO,
    memory: MemoryInfo | None = None,
) -> Placement:
    """Choose the backend that a model fits.

    Args:
        spec: The architecture.
        sizes: What the weights take.
        kv: The kind of cache.
        context: Tokens of context; None: as many as fit, up to a default.
        compensated: Whether error compensation may be used.
        slots: Sequences that keep a cache at the same time, sharing the pages of one context; fewer where memory does
            not suffice.
        asked: As in `runtime.open.open_decoder`.
        memory: Main memory; looked up if None.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: memory does not suffice.
        RequestError: as `runtime.memory.plan`.
    """
    full: OutOfMemoryError | None = None
    for candidate in candidates(asked):
        try:
            planned = plan(
                spec,
                candidate.backend.footprint(spec, sizes, compensated=compensated),
                kv=kv,
                context=context,
                slots=slots,
                shared=True,
                memory=candidate.presence.memory or memory,
            )
        except OutOfMemoryError as error:
            full = error
            if candidate.presence.memory is None:
                break  # no other backend takes less of main memory
            logger.warning("the model does not fit %s: %s", candidate.backend.label, error)
            continue
        first = asked if full is None else candidate.backend.name
        return Placement(asked=first, backend=candidate.backend, plan=planned)
    raise full or BackendError("no backend can run here")
