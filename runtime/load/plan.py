"""Load plan: backend, memory, preparation and opening of a stored model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from models.progress import ProgressCallback, ignore_progress
from models.store import StoredModel
from runtime.backends import AUTO, AnyBackend, ModelSizes
from runtime.backends.decoder import Decoder, DecoderOptions, KVKind, Selector
from runtime.compensation import CHUNK, Compensation
from runtime.engine.engine import Engine
from runtime.errors import BackendError, OutOfMemoryError
from runtime.kv.kinds import DEFAULT_KV
from runtime.load.expected import processor_is_faster
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
    passed_over: str | None = None
    """Why a better backend that can run here is not used; None: none was passed over."""

    def prepare(self, progress: ProgressCallback, *, ahead: bool = False) -> None:
        """See `Backend.prepare`."""
        compensated = self.compensation.possible
        self.backend.prepare(self.model, self.options.kv, compensated=compensated, ahead=ahead, progress=progress)

    def open_decoder(self, progress: ProgressCallback = ignore_progress) -> Decoder:
        """See `runtime.load.open.open_decoder`."""
        return open_decoder(self.model, self.options, self.backend_name, progress)[0]

    def open_engine(self, progress: ProgressCallback = ignore_progress) -> Engine:
        """See `runtime.load.open.open_engine`."""
        engine = open_engine(self.model, self.options, self.backend_name, progress)
        if self.passed_over is not None:
            engine.reason = f"{self.passed_over}; so {self.backend.label} runs the model"
        return engine


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
    experts_on_device: int | None = None,
    measurements: Path | None = None,
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
        experts_on_device: Experts of each block on a GPU; None: as many as fit.
        measurements: Folder where the memory's measured bandwidth is stored; None: where needed, it is measured again.

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
    failure: OutOfMemoryError | BackendError | None = None
    passed_over: str | None = None
    slower: LoadPlan | None = None
    for candidate in candidates(backend_name):
        backend, free = candidate.backend, candidate.presence.memory
        plan_of = partial(
            plan,
            spec,
            kv=kv,
            context=context,
            slots=slots,
            shared=True,
            parallel=parallel,
            memory=free or memory,
            experts_on_device=experts_on_device,
            main=memory,
        )
        try:
            footprint = backend.footprint(spec, sizes, compensated=compensation.possible)
            rows, planned = _most_rows(partial(plan_of, footprint), backend.step_rows)
        except (BackendError, OutOfMemoryError) as error:
            failure, passed_over = error, str(error)
            if isinstance(error, OutOfMemoryError) and free is None:
                break  # no other backend needs less main memory
            level = logging.WARNING if isinstance(error, OutOfMemoryError) else logging.INFO
            logger.log(level, "%s is passed over: %s", backend.label, error)
            continue
        options = DecoderOptions(
            kv=kv,
            context=planned.context,
            slots=planned.slots,
            pages=planned.pages,
            k_chunk=compensation.by_type,
            experts_on_device=planned.experts_on_device if planned.experts else None,
            select=select,
            max_rows=rows,
        )
        found = LoadPlan(
            model=model,
            compensation=compensation,
            backend_name=backend_name if passed_over is None else backend.name,
            backend=backend,
            memory=planned,
            options=options,
            passed_over=passed_over,
        )
        gpu = candidate.presence.gpu
        if planned.host_bytes and backend_name == AUTO and experts_on_device is None and gpu is not None:
            faster = processor_is_faster(model, planned, gpu.name, backend.link_gb_s(), measurements)
            if faster is not None:
                slower, passed_over = found, faster
                logger.info("%s is passed over: %s", backend.label, faster)
                continue
        return found
    if slower is not None:
        return slower
    raise failure or BackendError("no backend can run here")


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
