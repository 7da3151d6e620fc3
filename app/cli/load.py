"""Loading a model for a command: settings, memory plan, options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.cli import options
from app.cli.interrupt import Interrupt
from app.cli.output import Output
from app.cli.services import Services, prepare_folders

if TYPE_CHECKING:
    from app.settings import Settings
    from models.store import StoredModel
    from runtime.compensation import Compensation
    from runtime.decoder import Decoder, KVKind, Selector
    from runtime.engine import Engine
    from runtime.loading import LoadPlan
    from runtime.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoices:
    """What the person asked for; None leaves it to the settings and the program."""

    kv: KVKind | None = None
    """The kind of cache."""
    context: int | None = None
    """Tokens of context."""
    compensation: Compensation | None = None
    """What decides how much is compensated."""
    prompt_budget: float | None = None
    """How much longer a prompt may take by compensation, in percent."""
    speculate: bool | None = None
    """Whether tokens are drafted."""
    gamma: int | None = None
    """How many in each round."""
    backend: str | None = None
    """What runs the model."""
    select: Selector = "approx"
    """How salient channels are chosen."""


def load_plan(model: StoredModel, choices: LoadChoices, services: Services, output: Output) -> LoadPlan:
    """How to load a model here, after the settings and the memory plan; its kernels are there afterwards.

    Args:
        model: The stored model.
        choices: What was asked for.
        services: The machine and its memory.
        output: For what the person should know.

    Raises:
        SettingsError: a setting is not acceptable.
        RuntimeFailure: the choices do not go together, or memory does not suffice.
    """
    from runtime.compensation import of_settings
    from runtime.drafting import cache_for
    from runtime.loading import plan_load
    from runtime.memory import DEFAULT_CONTEXT

    settings = _settings(choices)
    compensation = of_settings(
        settings.k_chunk, settings.budget, choices.compensation, prompt_budget=settings.prompt_budget
    )
    if choices.prompt_budget is not None:
        compensation = replace(compensation, prompt_budget_percent=choices.prompt_budget)
    maximum = model.spec.max_context
    plan = plan_load(
        model,
        compensation,
        kv=cache_for(choices.kv if settings.speculation else settings.kv, settings.speculation),
        # A context on the command line is kept or refused; one in the settings gives way to a model that has less.
        context=choices.context or (settings.context and min(settings.context, maximum)),
        asked=settings.backend,
        select=choices.select,
        memory=services.memory(),
    )
    planned = plan.options.context
    if choices.context is None and planned < min(maximum, settings.context or DEFAULT_CONTEXT):
        output.note(f"the context is {planned} tokens: no more fits what memory is free")
    prepare_folders()
    with output.progress() as progress:
        plan.prepare(progress)
    return plan


def _settings(choices: LoadChoices) -> Settings:
    """The settings, with what was asked for in their place."""
    from app.settings import load

    speculate = options.speculate_setting(choices.speculate)
    return load({"kv": choices.kv, "backend": choices.backend, "speculate": speculate, "gamma": choices.gamma})


def speculate(engine: Engine, choices: LoadChoices, *, pays: bool) -> None:
    """Let a model that was loaded and compensated speculate, where the choices or the settings say so.

    Args:
        engine: The loaded model.
        choices: What was asked for.
        pays: Whether drafts were measured to pay, for those who leave it open.

    Raises:
        KeyboardInterrupt: the person stopped it.
    """
    from runtime.drafting import Speculate
    from runtime.errors import Cancelled
    from runtime.speculation.costs import start

    with Interrupt() as interrupt:
        try:
            wanted = _settings(choices)
            found = Speculate() if pays and wanted.drafts is None else wanted.speculation
            start(engine, found, cancelled=interrupt.cancelled)
        except Cancelled:
            interrupt.raise_if_pressed()


def compensate(decoder: Decoder, plan: LoadPlan, choices: LoadChoices, services: Services, output: Output) -> bool:
    """Give a model that was just loaded the compensation that its plan's budgets pay for, with progress.

    Where there is no budget, nothing is done; where it has no effect, that is said. Where the ways to decode it were
    measured for the budget, it gets the best.

    Returns:
        Whether the best way drafts.

    Raises:
        KeyboardInterrupt: the person stopped the tuning; what was measured is kept for the next time.
    """
    from runtime.offering import take
    from runtime.prompt_tuning import prompts_within_budget
    from runtime.tuning import within_budget

    budget, prompts = plan.compensation.budget_percent, plan.compensation.prompt_percent
    problem: Problem | None = None
    drafts = False
    with Interrupt() as interrupt, output.progress() as progress:
        common: Any = {"profiles": services.profiles(), "progress": progress, "cancelled": interrupt.cancelled}
        if budget:
            tuned, problem = within_budget(decoder, plan.model, budget_percent=budget, **common)
            wanted = _settings(choices).drafts
            if tuned is not None and not wanted:
                allowed = wanted is None
                _, drafts = take(decoder, plan.model, tuned, profiles=services.profiles(), drafts=allowed)
        if prompts and problem is None:
            _, problem = prompts_within_budget(decoder, plan.model, budget_percent=prompts, **common)
    asked = choices.compensation is not None or choices.prompt_budget is not None
    if problem is not None and (problem.failure or asked):
        output.note(f"{problem.what}; {problem.fix}")
    return drafts
