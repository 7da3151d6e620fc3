"""Where a model goes: backend and memory plan together, for a model that does not fit the GPU may fit the CPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from models.spec import ModelSpec
from runtime.decoder import KVKind
from runtime.errors import OutOfMemoryError
from runtime.memory import MemoryPlan, ModelSizes, plan
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
    backend: str = "auto",
    memory: MemoryInfo | None = None,
) -> Placement:
    """Choose the backend that a model fits.

    Args:
        spec: The architecture.
        sizes: What the weights take.
        kv: Precision of the cache.
        context: Tokens of context; None: as many as fit, up to a default.
        compensated: Whether error compensation may be used.
        backend: As in `runtime.open.open_decoder`.
        memory: Main memory; looked up if None.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: memory does not suffice.
        RequestError: as `runtime.memory.plan`.
    """
    chosen = target(backend)
    if chosen.backend == "triton":
        try:
            planned = plan(
                spec, sizes, kv=kv, context=context, backend="triton", compensated=compensated, memory=chosen.memory
            )
            return Placement(backend=backend, plan=planned)
        except OutOfMemoryError as error:
            if backend == "triton":
                raise
            logger.warning("the model does not fit the GPU, so the CPU runs it: %s", error)
            backend = "cpu"
    resident: Literal["cpu", "reference"] = "reference" if chosen.backend == "reference" else "cpu"
    planned = plan(spec, sizes, kv=kv, context=context, backend=resident, compensated=compensated, memory=memory)
    return Placement(backend=backend, plan=planned)
