"""Stored tuning results of a model on this machine, without loading it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.cli.services import DEMO

if TYPE_CHECKING:
    from app.cli.services import Services
    from models.store import StoredModel
    from runtime.backends import AnyBackend


def profile_report(services: Services, backend_name: str) -> dict[str, Any] | None:
    """The profile that the model of the settings (or the bundled one) would use here, and an explanation.

    Args:
        services: The program's stores.
        backend_name: The backend that would run it.

    Returns:
        `model`, `budget_percent`, `k_chunk`, `measured_slowdown_percent`, `reason`, and as text `prompts` and `offer`,
        the best way to decode within the budget (None if not measured); None if settings or model cannot be read, which
        other checks report.
    """
    from app.settings import SettingsError, load
    from models.errors import ModelError

    try:
        settings = load()
        name = settings.model or DEMO
        model = services.demo() if name == DEMO else services.store().open(name)
    except (SettingsError, ModelError):
        return None
    from runtime.backends import backend
    from runtime.backends.decoder import DecoderOptions
    from runtime.budget.profile_key import profile_key
    from runtime.budget.refining import as_stored
    from runtime.budget.tuning import obstacle, tuning_of
    from runtime.compensation import layer_words
    from runtime.errors import BackendError

    compensation = settings.compensation()
    budget = compensation.budget_percent
    report: dict[str, Any] = {
        "model": name,
        "budget_percent": budget,
        "k_chunk": None,
        "measured_slowdown_percent": None,
        "reason": "",
        "prompts": "prompts are not compensated",
        "offer": None,
    }
    runner = backend(backend_name)
    problem = obstacle(runner, model, model.spec.max_context)
    if problem is None and budget:
        report["offer"] = _offer(services, runner, model, budget)
    if problem is None and compensation.prompt_percent:
        report["prompts"] = _prompts(services, runner, model, compensation.prompt_percent)
    if budget is None:
        return {**report, "reason": f"k_chunk is fixed at {compensation.k_chunk} by the settings"}
    if not budget:
        return {**report, "reason": "the slowdown budget is 0, so nothing is compensated"}
    if problem is not None:
        return {**report, "reason": problem.what}
    try:
        device = runner.device(DecoderOptions())
    except BackendError as error:
        return {**report, "reason": str(error)}
    key = profile_key(device, backend_name, model, budget)
    profile = services.profiles().find(key)
    if profile is None:
        reason = (
            f"not tuned yet for {budget:g} % slowdown; the first use tunes it, or run: lowbit-chat tune-device {name}"
        )
        return {**report, "reason": reason}
    found = as_stored(tuning_of(profile, cached=True), key, services.profiles())
    chosen = ", ".join(f"{layer_words(kind)} {count}" for kind, count in found.k_chunk.items())
    measured = found.measured_slowdown_percent
    return {
        **report,
        "k_chunk": dict(found.k_chunk),
        "measured_slowdown_percent": measured,
        "reason": f"k_chunk {chosen}; {measured:.1f} % slower, {budget:g} % allowed, measured on {profile.date[:10]}; "
        f"{found.refinement}",
    }


def _prompts(services: Services, runner: AnyBackend, model: StoredModel, budget_percent: float) -> str:
    """The stored tuning of prompts, as text."""
    from runtime.backends.decoder import DecoderOptions
    from runtime.budget.profile_key import profile_key
    from runtime.budget.prompt_tuning import prompt_tuning_of
    from runtime.errors import BackendError
    from tuner.prompts import PromptStore

    try:
        device = runner.device(DecoderOptions())
    except BackendError as error:
        return str(error)
    profile = PromptStore(services.profiles().folder).find(profile_key(device, runner.name, model, budget_percent))
    if profile is None:
        return (
            f"prompts are not tuned yet for {budget_percent:g} % more time to the first word; the first use tunes them"
        )
    return prompt_tuning_of(profile, cached=True).words


def _offer(services: Services, runner: AnyBackend, model: StoredModel, budget_percent: float) -> str | None:
    """The best way to decode within a budget, as text; None if `tune-device` has not measured any."""
    from runtime.budget.offering import known
    from runtime.errors import BackendError

    try:
        found = known(runner.name, model, budget_percent=budget_percent, profiles=services.profiles())
    except BackendError:
        return None
    return None if found is None else found.words(found.chosen)
