"""Loading a model for a command: settings, memory plan, options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.cli import options
from app.cli.interrupt import Interrupt
from app.cli.output import Output
from app.cli.services import Services, prepare_folders

if TYPE_CHECKING:
    from app.settings import Settings
    from models.store import StoredModel
    from runtime.backends.decoder import KVKind, Selector
    from runtime.budget.spending import Lend, Spent
    from runtime.compensation import Compensation
    from runtime.drafting import Drafts
    from runtime.engine.engine import Engine
    from runtime.load.plan import LoadPlan


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
    from runtime.kv.kinds import cache_for
    from runtime.load.memory import DEFAULT_CONTEXT
    from runtime.load.plan import plan_load

    settings = _settings(choices)
    maximum = model.spec.max_context
    plan = plan_load(
        model,
        settings.compensation(choices.compensation, choices.prompt_budget),
        kv=cache_for(settings.cache(choices.kv), drafts=settings.speculation is not None),
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


def spend_budgets(lend: Lend, plan: LoadPlan, choices: LoadChoices, services: Services, output: Output) -> Spent:
    """Give a model that was just loaded what its plan's budgets pay for, and tell which have no effect.

    Args:
        lend: Lends its decoder.
        plan: How it was loaded.
        choices: What was asked for.
        services: The machine and its profiles.
        output: For progress, and for what the person should know.

    Raises:
        KeyboardInterrupt: the person stopped the tuning; what was measured is kept for the next time.
    """
    from runtime.budget.spending import Spent, spend

    drafts = _settings(choices).drafts
    if not plan.compensation.possible:
        return Spent(tuning=None, prompts=None, speculation=drafts, problems=())
    with Interrupt() as interrupt, output.progress() as progress:
        spent = spend(
            lend,
            plan.model,
            plan.compensation,
            drafts=drafts,
            profiles=services.profiles(),
            progress=progress,
            cancelled=interrupt.cancelled,
        )
    asked = choices.compensation is not None or choices.prompt_budget is not None
    for problem in spent.problems:
        if problem.failure or asked:
            output.note(f"{problem.what}; {problem.fix}")
    return spent


def speculate(engine: Engine, wanted: Drafts) -> None:
    """Let a loaded model speculate.

    Raises:
        KeyboardInterrupt: the person stopped it.
    """
    from runtime.engine.speculation.costs import start
    from runtime.errors import Cancelled

    with Interrupt() as interrupt:
        try:
            start(engine, wanted, cancelled=interrupt.cancelled)
        except Cancelled:
            interrupt.raise_if_pressed()
