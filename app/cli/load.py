"""Loading a model for a command: its flags and the settings become options of the one load (`runtime.load.loading`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from app.cli import options
from app.cli.output import Interrupt, Output
from app.cli.services import Services, prepare_folders
from app.language import _
from app.reports import reported

if TYPE_CHECKING:
    from models.store import StoredModel
    from runtime.backends.decoder import KVKind, Selector
    from runtime.compensation import Compensation
    from runtime.load.loading import LoadedModel
    from runtime.load.plan import LoadOptions, LoadPlan


def load_options(
    model: StoredModel,
    *,
    kv: KVKind | None = None,
    context: int | None = None,
    compensation: Compensation | None = None,
    prompt_budget: float | None = None,
    speculate: bool | None = None,
    gamma: int | None = None,
    backend: str | None = None,
    experts_on_device: str | None = None,
    layers_on_device: str | None = None,
    select: Selector = "approx",
) -> LoadOptions:
    """How to load a model: the command line's choices, else the settings', as far as they fit any model.

    Raises:
        SettingsError: a setting is invalid.
    """
    from app.settings import load
    from runtime.load.memory import experts_within, layers_within
    from runtime.load.plan import LoadOptions

    on_device = {"experts_on_device": experts_on_device, "layers_on_device": layers_on_device}
    chosen = {"kv": kv, "backend": backend, **on_device, "gamma": gamma}
    settings = load({**chosen, "speculate": options.speculate_setting(speculate)})
    experts, layers = settings.experts_on_device, settings.layers_on_device
    if experts_on_device is None:  # what the settings say is for any model
        experts = experts_within(experts, model.spec)
    if layers_on_device is None:
        layers = layers_within(layers, model.spec)
    return LoadOptions(
        compensation=settings.compensation(compensation, prompt_budget),
        speculation=settings.drafts,
        kv=settings.cache(kv),
        # A context on the command line is binding; one in the settings is reduced to the model's maximum.
        context=context or (settings.context and min(settings.context, model.spec.max_context)),
        backend=settings.backend,
        experts_on_device=experts,
        layers_on_device=layers,
        select=select,
    )


def load_plan(model: StoredModel, asked: LoadOptions, services: Services) -> LoadPlan:
    """Plan a load by the free memory.

    Raises:
        RuntimeFailure: the options conflict, or there is not enough memory.
        ModelError: answers are to be exact, and the source is not at hand.
    """
    from app.paths import profiles_dir
    from runtime.load.plan import plan_load

    prepare_folders()
    return plan_load(model, asked, memory=services.memory(), measurements=profiles_dir(), store=services.store())


def load_model(
    model: StoredModel,
    asked: LoadOptions,
    services: Services,
    output: Output,
    *,
    budgets_asked: bool = False,
    prompts_later: bool = False,
) -> LoadedModel:
    """Load a model by the free memory, with progress; notes what the user should know.

    Args:
        model: The stored model.
        asked: How to load it.
        services: The machine, its memory and its profiles.
        output: For progress and notes to the user.
        budgets_asked: Whether the command line asks for compensation, so that what prevents it is worth a note.
        prompts_later: Whether prompts that were never tuned are left to `tune_pending_prompts`.

    Raises:
        RuntimeFailure, ModelError: as `load_plan`.
        KeyboardInterrupt: the user stopped it; completed measurements are stored.
    """
    from runtime.load.memory import DEFAULT_CONTEXT

    plan = load_plan(model, asked, services)
    planned = plan.options.context
    if planned < min(model.spec.max_context, asked.context or DEFAULT_CONTEXT):
        output.note(_("the context is {count} tokens: more does not fit in the free memory", count=planned))
    with Interrupt() as interrupt, output.progress() as progress:
        loaded = services.load(plan, prompts_later=prompts_later, progress=progress, cancelled=interrupt.cancelled)
    for problem in loaded.problems:
        if problem.failure or budgets_asked:
            output.note(f"{reported(problem.what)}; {reported(problem.fix)}")
    return loaded


def tune_pending_prompts(loaded: LoadedModel, services: Services, output: Output) -> None:
    """Tune the prompts that `load_model` left, for the next time; Ctrl-C leaves them to it."""
    from runtime.errors import Cancelled
    from runtime.load.loading import tune_prompts

    if loaded.plan is None or loaded.prompts is None or not loaded.prompts.pending:
        return
    with contextlib.suppress(Cancelled, KeyboardInterrupt), output.progress() as progress:
        loaded.plan.prepare(progress, ahead=True)  # what compiles in the background is waited for without Ctrl-C
        with Interrupt() as interrupt:
            tune_prompts(
                loaded,
                loaded.plan.model,
                profiles=services.profiles(),
                progress=progress,
                cancelled=interrupt.cancelled,
            )
