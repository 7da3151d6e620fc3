"""Loading a model for a command: settings, memory plan, options."""

from __future__ import annotations

import contextlib
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
    """Choices on the command line; None leaves them to the settings and the program."""

    kv: KVKind | None = None
    """The kind of cache."""
    context: int | None = None
    """Tokens of context."""
    compensation: Compensation | None = None
    """Compensation."""
    prompt_budget: float | None = None
    """Slowdown budget of prompts, in percent."""
    speculate: bool | None = None
    """Whether to speculate."""
    gamma: int | None = None
    """Draft tokens per round."""
    backend: str | None = None
    """The backend."""
    experts_on_device: str | None = None
    """Experts of each block on the card, or `auto`."""
    select: Selector = "approx"
    """Selection of salient channels."""


def load_plan(model: StoredModel, choices: LoadChoices, services: Services, output: Output) -> LoadPlan:
    """Plan loading a model by settings and free memory; compiles its kernels.

    Args:
        model: The stored model.
        choices: The command line's choices.
        services: The machine and its memory.
        output: For notes to the user.

    Raises:
        SettingsError: a setting is invalid.
        RuntimeFailure: the choices conflict, or there is not enough memory.
    """
    from app.paths import profiles_dir
    from runtime.kv.kinds import cache_for
    from runtime.load.memory import DEFAULT_CONTEXT, experts_within
    from runtime.load.plan import plan_load

    settings = _settings(choices)
    maximum, experts = model.spec.max_context, settings.experts_on_device
    if choices.experts_on_device is None:  # what the settings say is for any model
        experts = experts_within(experts, model.spec)
    plan = plan_load(
        model,
        settings.compensation(choices.compensation, choices.prompt_budget),
        kv=cache_for(settings.cache(choices.kv), drafts=settings.speculation is not None),
        # A context on the command line is binding; one in the settings is reduced to the model's maximum.
        context=choices.context or (settings.context and min(settings.context, maximum)),
        backend_name=settings.backend,
        experts_on_device=experts,
        select=choices.select,
        memory=services.memory(),
        measurements=profiles_dir(),
    )
    planned = plan.options.context
    if choices.context is None and planned < min(maximum, settings.context or DEFAULT_CONTEXT):
        output.note(f"the context is {planned} tokens: more does not fit in the free memory")
    prepare_folders()
    with output.progress() as progress:
        plan.prepare(progress)
    return plan


def _settings(choices: LoadChoices) -> Settings:
    """The settings, overridden by the command line's choices."""
    from app.settings import load

    speculate = options.speculate_setting(choices.speculate)
    return load(
        {
            "kv": choices.kv,
            "backend": choices.backend,
            "experts_on_device": choices.experts_on_device,
            "speculate": speculate,
            "gamma": choices.gamma,
        }
    )


def spend_budgets(
    lend: Lend,
    plan: LoadPlan,
    choices: LoadChoices,
    services: Services,
    output: Output,
    *,
    prompts_later: bool = False,
) -> Spent:
    """Apply the plan's budgets to a loaded model, and report those without effect.

    Args:
        lend: Lends its decoder.
        plan: Its load plan.
        choices: The command line's choices.
        services: The machine and its profiles.
        output: For progress and notes to the user.
        prompts_later: Whether prompts that were never tuned are left to `spend_on_prompts`.

    Raises:
        KeyboardInterrupt: the user stopped the tuning; completed measurements are stored.
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
            text=services.evaluation_text(),
            prompts_later=prompts_later,
            progress=progress,
            cancelled=interrupt.cancelled,
        )
    asked = choices.compensation is not None or choices.prompt_budget is not None
    for problem in spent.problems:
        if problem.failure or asked:
            output.note(f"{problem.what}; {problem.fix}")
    return spent


def spend_on_prompts(engine: Engine, plan: LoadPlan, spent: Spent, services: Services, output: Output) -> None:
    """Tune the prompts that `spend_budgets` left, for the next time; Ctrl-C leaves them to it.

    Args:
        engine: The loaded model.
        plan: Its load plan.
        spent: What was spent on it.
        services: The machine and its profiles.
        output: For progress to the user.
    """
    from runtime.budget import spending
    from runtime.errors import Cancelled

    if spent.prompts is None or not spent.prompts.pending:
        return
    with contextlib.suppress(Cancelled, KeyboardInterrupt), output.progress() as progress:
        plan.prepare(progress, ahead=True)  # what compiles in the background is waited for without Ctrl-C
        with Interrupt() as interrupt:
            spending.spend_on_prompts(
                engine.borrow,
                plan.model,
                spent.prompts,
                profiles=services.profiles(),
                progress=progress,
                cancelled=interrupt.cancelled,
            )


def speculate(engine: Engine, wanted: Drafts, services: Services) -> None:
    """Turn on speculation for a loaded model.

    Args:
        engine: The loaded model.
        wanted: The request.
        services: The text on which sensitive layers are found.

    Raises:
        KeyboardInterrupt: the user stopped it.
    """
    from runtime.engine.speculation.costs import start
    from runtime.errors import Cancelled

    with Interrupt() as interrupt:
        try:
            text = services.evaluation_text
            start(engine, wanted, text=lambda: engine.tokenizer.encode(text()), cancelled=interrupt.cancelled)
        except Cancelled:
            interrupt.raise_if_pressed()
