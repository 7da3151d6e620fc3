"""Loading a model for a command: settings, memory plan, options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from app.cli.interrupt import Interrupt
from app.cli.output import Output
from app.cli.services import Services

if TYPE_CHECKING:
    from app.settings import Settings
    from models.store import StoredModel
    from runtime.backend import AnyBackend
    from runtime.decoder import Decoder, DecoderOptions
    from runtime.wire.device import Tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoices:
    """What the person asked for; None leaves it to the settings and the program."""

    kv: str | None = None
    """The kind of cache."""
    context: int | None = None
    """Tokens of context."""
    k_chunk: int | None = None
    """Salient channels per 1024 of every layer."""
    budget: float | None = None
    """Slowdown that compensation may cost, in percent."""
    backend: str | None = None
    """What runs the model."""
    select: Literal["approx", "exact", "static", "random"] = "approx"
    """How salient channels are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How a model is loaded here."""

    options: DecoderOptions
    """For the decoder; without compensation where the budget decides later."""
    backend: str
    """Name of the backend to ask for, or `auto`."""
    runner: AnyBackend
    """What will run it, unless it fails when it is opened."""
    budget: float | None
    """Slowdown that compensation may cost, in percent; None where k_chunk is fixed."""
    asked: bool
    """Whether the person asked for this budget on the command line."""


def load_plan(model: StoredModel, choices: LoadChoices, services: Services, output: Output) -> LoadPlan:
    """How to load a model here, after the settings and the memory plan.

    Args:
        model: The stored model.
        choices: What was asked for.
        services: The machine and its memory.
        output: For what the person should know.

    Raises:
        SettingsError: a setting is not acceptable.
        RuntimeFailure: the choices do not go together, or memory does not suffice.
    """
    from app.settings import load
    from runtime.backend import ModelSizes
    from runtime.decoder import DecoderOptions
    from runtime.memory import DEFAULT_CONTEXT
    from runtime.placement import place

    settings = load(
        {"kv": choices.kv, "k_chunk": choices.k_chunk, "budget": choices.budget, "backend": choices.backend}
    )
    k_chunk, budget = compensation(settings, asked=choices.budget)
    kv = settings.kv
    summary = model.info.summary
    placed = place(
        model.spec,
        ModelSizes(weight_bytes=summary.gpu_bytes, residual_bytes=summary.residual_bytes),
        kv=kv,
        context=_context(choices.context, settings.context, model.spec.max_context),
        asked=settings.backend,
        compensated=bool(k_chunk or budget),
        memory=services.memory(),
    )
    planned = placed.plan
    if choices.context is None and planned.context < min(model.spec.max_context, settings.context or DEFAULT_CONTEXT):
        output.note(f"the context is {planned.context} tokens: no more fits what memory is free")
    options = DecoderOptions(
        kv=kv,
        context=planned.context,
        k_chunk=k_chunk or 0,
        select=choices.select,
    )
    with output.progress() as progress:
        placed.backend.prepare(model, kv, compensated=bool(k_chunk or budget), progress=progress)
    return LoadPlan(
        options=options,
        backend=placed.asked,
        runner=placed.backend,
        budget=budget,
        asked=choices.budget is not None,
    )


def compensation(settings: Settings, *, asked: float | None = None) -> tuple[int | None, float | None]:
    """What decides the compensation: (k_chunk, None) or (None, budget in percent).

    Args:
        settings: A k_chunk in them goes before a budget in them.
        asked: A budget of the command line, which goes before both.
    """
    from runtime.tuning import DEFAULT_BUDGET_PERCENT

    if asked is not None:
        return None, asked
    if settings.k_chunk is not None:
        return settings.k_chunk, None
    return None, DEFAULT_BUDGET_PERCENT if settings.budget is None else settings.budget


def compensate(
    decoder: Decoder, model: StoredModel, plan: LoadPlan, services: Services, output: Output
) -> Tuning | None:
    """Give a model that was just loaded the compensation that its plan's budget pays for, with progress.

    Returns:
        What the tuner found; None where there is no budget, or it has no effect, which is said.

    Raises:
        KeyboardInterrupt: the person stopped the tuning; what was measured is kept for the next time.
    """
    if not plan.budget:
        return None
    with Interrupt() as interrupt, output.progress() as progress:
        found, problem = services.within_budget(
            decoder, model, budget_percent=plan.budget, progress=progress, cancelled=interrupt.cancelled
        )
    if problem is not None and (problem.failure or plan.asked):
        output.note(f"{problem.what}; {problem.fix}")
    return found


def _context(asked: int | None, setting: int | None, maximum: int) -> int | None:
    """A context on the command line is kept or refused; one in the settings gives way to a model that has less."""
    if asked is not None:
        return asked
    return None if setting is None else min(setting, maximum)
