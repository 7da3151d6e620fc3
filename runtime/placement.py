"""Where a model goes: backend and memory plan together, for a model that does not fit the GPU may fit the CPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from models.spec import ModelSpec
from runtime.decoder import KVKind
from runtime.errors import OutOfMemoryError
from runtime.memory import Backend, MemoryPlan, ModelSizes, plan
from runtime.open import target
from tuner.detect import MemoryInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What came of it."""

    backend: str
    """What `runtime.open` is to be asked for."""
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
    backend: str = "auto",
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
        backend: As in `runtime.open.open_decoder`.
        memory: Main memory; looked up if None.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: memory does not suffice.
        RequestError: as `runtime.memory.plan`.
    """
    chosen = target(backend)

    def planned(where: Backend, free: MemoryInfo | None) -> MemoryPlan:
        return plan(
            spec,
            sizes,
            kv=kv,
            context=context,
            slots=slots,
            shared=True,
            backend=where,
            compensated=compensated,
            memory=free,
        )

    if chosen.backend == "triton":
        try:
            return Placement(backend=backend, plan=planned("triton", chosen.memory))
        except OutOfMemoryError as error:
            if backend == "triton":
                raise
            logger.warning("the model does not fit the GPU, so the CPU runs it: %s", error)
            backend = "cpu"
    resident: Backend = "reference" if chosen.backend == "reference" else "cpu"
    return Placement(backend=backend, plan=planned(resident, memory))
