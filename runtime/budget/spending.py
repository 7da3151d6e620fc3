"""Applies the slowdown budgets to an opened model: tunes decoding, picks the best way to decode, tunes prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from models.progress import ProgressCallback, ignore_progress, never_cancelled
from runtime.backends.decoder import Decoder
from runtime.budget.offering import take
from runtime.budget.profile_key import TunedModel
from runtime.budget.prompt_tuning import PROMPT_TOKENS, is_known, prompts_within_budget
from runtime.budget.refining import refined
from runtime.budget.tuning import within_budget
from runtime.compensation import Compensation
from runtime.drafting import Drafts, Speculate
from runtime.errors import Problem
from runtime.wire.device import PromptTuning, Tuning
from tuner.profiles import ProfileStore

Lend = Callable[..., AbstractContextManager[Decoder]]
"""`Engine.borrow`: lends the decoder to a caller that needs this many tokens of slot 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Result of applying the budgets; the decoder is already set."""

    tuning: Tuning | None
    """Tuning of decoding; None without a budget, or if a problem prevented it."""
    prompts: PromptTuning | None
    """Tuning of prompts, likewise; `pending` if it is left to `spend_on_prompts`."""
    speculation: Drafts
    """Drafting mode: as requested, or by the model if that was measured to pay."""
    problems: tuple[Problem, ...]
    """Problems that make a budget ineffective; one that concerns both is listed once."""


def spend(
    lend: Lend,
    model: TunedModel,
    compensation: Compensation,
    *,
    drafts: Drafts,
    profiles: ProfileStore,
    text: str | None = None,
    force: bool = False,
    prompts_later: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Spent:
    """Apply the budgets to a loaded model. A fixed `k_chunk` is kept.

    Args:
        lend: Lends the loaded model's decoder.
        model: What was loaded.
        compensation: The budgets.
        drafts: The requested drafting mode.
        profiles: Folder of profiles.
        text: The text of refinements, whose results are applied; None applies none.
        force: Whether to repeat stored measurements.
        prompts_later: Whether prompts that were never tuned wait for `spend_on_prompts`: a first answer need not.
        progress: Receives progress reports of the tuning.
        cancelled: Polled between measurements.

    Raises:
        Cancelled: `cancelled` said so; completed measurements are stored.
        BackendError: the device does not respond.
    """
    common: Any = {"profiles": profiles, "force": force, "progress": progress, "cancelled": cancelled}
    tuning, problem = None, None
    prompts: PromptTuning | None
    of_prompts: Problem | None = None
    speculation = drafts
    with lend() as decoder:
        if compensation.budget_percent is not None:
            tuning, problem = within_budget(decoder, model, budget_percent=compensation.budget_percent, **common)
        percent = compensation.prompt_percent
        known = not force and is_known(decoder, model, budget_percent=percent, profiles=profiles)
    later = prompts_later and not known
    with lend(0 if known or later else PROMPT_TOKENS) as decoder:
        if later:
            prompts = PromptTuning.later(percent)
        else:
            prompts, of_prompts = prompts_within_budget(decoder, model, budget_percent=percent, **common)
        if tuning is not None and tuning.budget_percent:
            if text is not None:
                tuning = refined(decoder, model, tuning, profiles=profiles, text=text)
            if not drafts:
                tuning, pays = take(decoder, model, tuning, profiles=profiles, drafts=drafts is not False)
                speculation = Speculate() if pays else drafts
    if of_prompts is not None and not of_prompts.failure:
        of_prompts = None  # already reported for decoding
    problems = tuple(found for found in (problem, of_prompts) if found is not None)
    return Spent(tuning=tuning, prompts=prompts, speculation=speculation, problems=problems)


def spend_on_prompts(
    lend: Lend,
    model: TunedModel,
    pending: PromptTuning,
    *,
    profiles: ProfileStore,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> tuple[PromptTuning | None, Problem | None]:
    """Apply the budget of prompts that `spend` left.

    Args:
        lend: As of `spend`.
        model: What was loaded.
        pending: `Spent.prompts`.
        profiles: Folder of profiles.
        progress: Receives progress reports.
        cancelled: Polled between steps.

    Returns:
        The result, or the problem that makes the budget ineffective.

    Raises:
        Cancelled: `cancelled` said so.
        BackendError: the device does not respond.
    """
    common: Any = {"profiles": profiles, "progress": progress, "cancelled": cancelled}
    with lend(PROMPT_TOKENS) as decoder:
        return prompts_within_budget(decoder, model, budget_percent=pending.budget_percent, **common)
