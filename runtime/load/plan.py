"""Load plan: backend, memory, preparation and opening of a stored model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from models.progress import ProgressCallback, ignore_progress
from models.store import StoredModel
from runtime.backends import AUTO, AnyBackend, ModelSizes
from runtime.backends.decoder import Decoder, DecoderOptions, KVKind, Selector
from runtime.compensation import CHUNK, Compensation
from runtime.engine.engine import Engine
from runtime.errors import BackendError, OutOfMemoryError
from runtime.kv.kinds import DEFAULT_KV
from runtime.load.memory import MemoryPlan, plan
from runtime.load.open import candidates, open_decoder, open_engine
from tuner.detect import MemoryInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The plan of a load: prepare it, then open it; a slowdown budget is applied to the opened model."""

    model: StoredModel
    """The model."""
    compensation: Compensation
    """Compensation settings."""
    backend_name: str
    """Name of the backend for `runtime.load.open`."""
    backend: AnyBackend
    """The backend planned for; opening may fall back to another."""
    memory: MemoryPlan
    """The memory plan."""
    options: DecoderOptions
    """Options of the decoder; without compensation if a budget is applied later."""

    def prepare(self, progress: ProgressCallback, *, ahead: bool = False) -> None:
        """See `Backend.prepare`."""
        compensated = self.compensation.possible
        self.backend.prepare(self.model, self.options.kv, compensated=compensated, ahead=ahead, progress=progress)

    def open_decoder(self, progress: ProgressCallback = ignore_progress) -> Decoder:
        """See `runtime.load.open.open_decoder`."""
        return open_decoder(self.model, self.options, self.backend_name, progress)[0]

    def open_engine(self, progress: ProgressCallback = ignore_progress) -> Engine:
        """See `runtime.load.open.open_engine`."""
        return open_engine(self.model, self.options, self.backend_name, progress)


def plan_load(
    model: StoredModel,
    compensation: Compensation,
    *,
    kv: KVKind = DEFAULT_KV,
    context: int | None = None,
    backend_name: str = AUTO,
    select: Selector = "approx",
    slots: int = 1,
    parallel: int = 1,
    memory: MemoryInfo | None = None,
) -> LoadPlan:
    """Choose a backend that the model fits: a model too large for the GPU, or whose layers it lacks, may fit the CPU.

    Args:
        model: The stored model.
        compensation: Compensation settings.
        kv: The kind of cache.
        context: Tokens of context; None: as many as fit, up to a default.
        backend_name: As in `runtime.load.open.open_decoder`.
        select: Channel selection method.
        slots: Number of cached sequences, which share the pages of one context; fewer if memory is short.
        parallel: Most full contexts of pages they share; fewer if memory is short.
        memory: Free main memory; None: looked up.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: not enough memory.
        RequestError: as `runtime.load.memory.plan`.
    """
    spec, summary = model.spec, model.info.summary
    sizes = ModelSizes(
        weight_bytes=summary.gpu_bytes,
        residual_bytes=summary.residual_bytes,
        whole=CHUNK in compensation.by_type.values(),
        recipe=model.recipe,
    )
    full: OutOfMemoryError | BackendError | None = None
    for candidate in candidates(backend_name):
        backend, free = candidate.backend, candidate.presence.memory
        try:
            footprint = backend.footprint(spec, sizes, compensated=compensation.possible)
        except BackendError as error:
            full = error
            logger.info("%s is passed over: %s", backend.label, error)
            continue
        plan_of = partial(
            plan,
            spec,
            footprint,
            kv=kv,
            context=context,
            slots=slots,
            shared=True,
            parallel=parallel,
            memory=free or memory,
        )
        try:
            rows, planned = _most_rows(plan_of, backend.step_rows)
        except OutOfMemoryError as error:
            full = error
            if free is None:
                break  # no other backend needs less main memory
            logger.warning("the model does not fit %s: %s", backend.label, error)
            continue
        options = DecoderOptions(
            kv=kv,
            context=planned.context,
            slots=planned.slots,
            pages=planned.pages,
            k_chunk=compensation.by_type,
            select=select,
            max_rows=rows,
        )
        return LoadPlan(
            model=model,
            compensation=compensation,
            backend_name=backend_name if full is None else backend.name,
            backend=backend,
            memory=planned,
            options=options,
        )
    raise full or BackendError("no backend can run here")


def _most_rows(plan_of: Callable[..., MemoryPlan], choices: Sequence[int]) -> tuple[int, MemoryPlan]:
    """The most rows per step whose buffers and windows leave context and slots as the fewest rows would have them.

    Args:
        plan_of: Plans for a number of `rows`.
        choices: Numbers of rows, most first.

    Raises:
        OutOfMemoryError: even the fewest do not fit.
    """
    fewest = plan_of(rows=choices[-1])
    for rows in choices[:-1]:
        try:
            planned = plan_of(rows=rows)
        except OutOfMemoryError:
            continue
        if (planned.context, planned.slots, planned.contexts) == (fewest.context, fewest.slots, fewest.contexts):
            return rows, planned
    return choices[-1], fewest
