"""How a stored model is loaded here: backend and memory, what is prepared, how it is opened."""

from __future__ import annotations

import logging
from dataclasses import dataclass

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
    """Where a model goes. It is prepared, then opened; a budget is spent on what was opened."""

    model: StoredModel
    """What is loaded."""
    compensation: Compensation
    """What decides how much of it is compensated."""
    asked: str
    """What `runtime.load.open` is to be asked for."""
    backend: AnyBackend
    """What will run the model, unless it fails when it is opened."""
    memory: MemoryPlan
    """What goes where."""
    options: DecoderOptions
    """For the decoder; without compensation where a budget decides later."""

    def prepare(self, progress: ProgressCallback, *, ahead: bool = False) -> None:
        """See `Backend.prepare`."""
        compensated = self.compensation.possible
        self.backend.prepare(self.model, self.options.kv, compensated=compensated, ahead=ahead, progress=progress)

    def open_decoder(self, progress: ProgressCallback = ignore_progress) -> Decoder:
        """See `runtime.load.open.open_decoder`."""
        return open_decoder(self.model, self.options, self.asked, progress)[0]

    def open_engine(self, progress: ProgressCallback = ignore_progress) -> Engine:
        """See `runtime.load.open.open_engine`."""
        return open_engine(self.model, self.options, self.asked, progress)


def plan_load(
    model: StoredModel,
    compensation: Compensation,
    *,
    kv: KVKind = DEFAULT_KV,
    context: int | None = None,
    asked: str = AUTO,
    select: Selector = "approx",
    slots: int = 1,
    parallel: int = 1,
    memory: MemoryInfo | None = None,
) -> LoadPlan:
    """Choose the backend that a model fits: one that does not fit the GPU may fit the CPU.

    Args:
        model: The stored model.
        compensation: What decides how much of it is compensated.
        kv: The kind of cache.
        context: Tokens of context; None: as many as fit, up to a default.
        asked: As in `runtime.load.open.open_decoder`.
        select: How salient channels are chosen.
        slots: Sequences that keep a cache at the same time, sharing the pages of one context; fewer where memory does
            not suffice.
        parallel: Contexts whose pages they share, at most; fewer where memory is short.
        memory: Main memory; looked up if None.

    Raises:
        BackendError: an unknown backend, or one that cannot run here.
        OutOfMemoryError: memory does not suffice.
        RequestError: as `runtime.load.memory.plan`.
    """
    spec, summary = model.spec, model.info.summary
    sizes = ModelSizes(
        weight_bytes=summary.gpu_bytes,
        residual_bytes=summary.residual_bytes,
        whole=CHUNK in compensation.by_type.values(),
        recipe=model.recipe,
    )
    full: OutOfMemoryError | None = None
    for candidate in candidates(asked):
        backend, free = candidate.backend, candidate.presence.memory
        footprint = backend.footprint(spec, sizes, compensated=compensation.possible)
        try:
            planned = plan(
                spec,
                footprint,
                kv=kv,
                context=context,
                slots=slots,
                shared=True,
                parallel=parallel,
                rows=backend.step_rows,
                memory=free or memory,
            )
        except OutOfMemoryError as error:
            full = error
            if free is None:
                break  # no other backend takes less of main memory
            logger.warning("the model does not fit %s: %s", backend.label, error)
            continue
        options = DecoderOptions(
            kv=kv,
            context=planned.context,
            slots=planned.slots,
            pages=planned.pages,
            k_chunk=compensation.by_type,
            select=select,
            max_rows=backend.step_rows,
        )
        return LoadPlan(
            model=model,
            compensation=compensation,
            asked=asked if full is None else backend.name,
            backend=backend,
            memory=planned,
            options=options,
        )
    raise full or BackendError("no backend can run here")
