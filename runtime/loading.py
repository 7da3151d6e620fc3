"""From a stored model to one that is about to run here: where it goes, what is made ready, and how it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from models.progress import ProgressCallback
from models.store import StoredModel
from runtime.backend import ModelSizes
from runtime.backends import AUTO
from runtime.compensation import Compensation
from runtime.decoder import Decoder, DecoderOptions, KVKind, Selector
from runtime.engine import Engine
from runtime.open import open_decoder, open_engine
from runtime.placement import Placement, place
from tuner.detect import MemoryInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How a model is loaded here: first `prepare`, then open; a budget is spent on what was opened."""

    model: StoredModel
    """What is loaded."""
    compensation: Compensation
    """What decides how much of it is compensated."""
    placement: Placement
    """Backend and memory."""
    options: DecoderOptions
    """For the decoder; without compensation where a budget decides later."""

    def prepare(self, progress: ProgressCallback) -> None:
        """Do what only the first load of such a model takes long for; see `Backend.prepare`."""
        possible = self.compensation.possible
        self.placement.backend.prepare(self.model, self.options.kv, compensated=possible, progress=progress)

    def open_decoder(self) -> Decoder:
        """Load the model without its tokenizer; see `runtime.open.open_decoder`."""
        return open_decoder(self.model, self.options, self.placement.asked)[0]

    def open_engine(self) -> Engine:
        """Load the model with its tokenizer; see `runtime.open.open_engine`."""
        return open_engine(self.model, self.options, self.placement.asked)


def plan_load(
    model: StoredModel,
    compensation: Compensation,
    *,
    kv: KVKind = "fp16",
    context: int | None = None,
    backend: str = AUTO,
    select: Selector = "approx",
    slots: int = 1,
    memory: MemoryInfo | None = None,
) -> LoadPlan:
    """Plan a load of a stored model; `place` tells of the arguments, and of what goes wrong."""
    summary = model.info.summary
    placed = place(
        model.spec,
        ModelSizes(weight_bytes=summary.gpu_bytes, residual_bytes=summary.residual_bytes),
        kv=kv,
        context=context,
        compensated=compensation.possible,
        slots=slots,
        asked=backend,
        memory=memory,
    )
    options = DecoderOptions(
        kv=kv,
        context=placed.plan.context,
        slots=placed.plan.slots,
        pages=placed.plan.pages,
        k_chunk=compensation.by_type,
        select=select,
    )
    return LoadPlan(model=model, compensation=compensation, placement=placed, options=options)
