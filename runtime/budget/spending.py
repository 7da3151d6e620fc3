"""The slowdown budgets of a loaded model: tunes decoding, picks the best way to decode, tunes prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from models.errors import ModelError
from models.progress import ProgressCallback, ignore_progress, never_cancelled
from runtime.backends.decoder import Decoder
from runtime.budget.offering import take
from runtime.budget.prompt_tuning import PROMPT_TOKENS, is_known, tune_prompts
from runtime.budget.tuning import NoTuningError, tune
from runtime.compensation import Compensation
from runtime.drafting import Drafts, Speculate
from runtime.errors import Cancelled, Problem, RuntimeFailure
from runtime.wire.device import PromptTuning, Tuning
from tuner.errors import TunerError
from tuner.profiles import ProfileStore

if TYPE_CHECKING:
    from models.store import StoredModel

Borrow = Callable[..., AbstractContextManager[Decoder]]
"""`Engine.borrow`: lends the decoder to a caller that needs this many tokens of slot 0."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedBudgets:
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
    lend: Borrow,
    model: StoredModel,
    compensation: Compensation,
    *,
    drafts: Drafts,
    profiles: ProfileStore,
    force: bool = False,
    prompts_later: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> AppliedBudgets:
    """Apply the budgets to a loaded model. A fixed `k_chunk` is kept; where tuning fails, nothing is compensated.

    Args:
        lend: Lends the loaded model's decoder.
        model: What was loaded.
        compensation: The budgets.
        drafts: The requested drafting mode.
        profiles: Folder of profiles.
        force: Whether to repeat stored measurements.
        prompts_later: Whether prompts that were never tuned wait for `spend_on_prompts`: a first answer need not.
        progress: Receives progress reports of the tuning.
        cancelled: Polled between measurements.

    Raises:
        Cancelled: `cancelled` said so; completed measurements are stored.
        BackendError: the device does not respond.
    """
    common: Any = {"profiles": profiles, "force": force, "progress": progress, "cancelled": cancelled}
    budget, percent = compensation.budget_percent, compensation.prompt_percent
    tuning, problem = None, None
    with lend() as decoder:
        if budget is not None:
            tuning, problem = or_problem(
                lambda: tune(decoder, model, budget_percent=budget, **common),
                lambda: decoder.set_k_chunk(0),
                instead=f"{model.name} runs without error compensation",
                fix="run `lowbit-chat tune-device --force`, or choose a fixed k_chunk",
            )
        known = not force and is_known(decoder, model, budget_percent=percent, profiles=profiles)
    prompts: PromptTuning | None = PromptTuning.later(percent)
    of_prompts, speculation = None, drafts
    if known or not prompts_later:
        prompts, of_prompts = _prompts(lend, 0 if known else PROMPT_TOKENS, model, percent, common)
    if tuning is not None and tuning.budget_percent and not drafts:
        with lend() as decoder:
            tuning, pays = take(decoder, model, tuning, profiles=profiles, drafts=drafts is not False)
            speculation = Speculate() if pays else drafts
    if of_prompts is not None and not of_prompts.failure:
        of_prompts = None  # already reported for decoding
    problems = tuple(each for each in (problem, of_prompts) if each is not None)
    return AppliedBudgets(tuning=tuning, prompts=prompts, speculation=speculation, problems=problems)


def spend_on_prompts(
    lend: Borrow,
    model: StoredModel,
    pending: PromptTuning,
    *,
    profiles: ProfileStore,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> tuple[PromptTuning | None, Problem | None]:
    """Apply the budget of prompts that `spend` left; arguments as of `spend`.

    Returns:
        The result, or the problem that makes the budget ineffective.

    Raises:
        Cancelled: `cancelled` said so.
        BackendError: the device does not respond.
    """
    common: Any = {"profiles": profiles, "progress": progress, "cancelled": cancelled}
    return _prompts(lend, PROMPT_TOKENS, model, pending.budget_percent, common)


def _prompts(
    lend: Borrow, tokens: int, model: StoredModel, percent: float, common: Any
) -> tuple[PromptTuning | None, Problem | None]:
    with lend(tokens) as decoder:
        return or_problem(
            lambda: tune_prompts(decoder, model, budget_percent=percent, **common),
            lambda: decoder.set_prompt_k_chunk(0),
            instead=f"the prompts of {model.name} are read without error compensation",
            fix="run `lowbit-chat tune-device --force`",
        )


def or_problem(
    tuned: Callable[[], T], turn_off: Callable[[], None], *, instead: str, fix: str
) -> tuple[T | None, Problem | None]:
    """Run a tuning; on failure, turn compensation off and return the problem.

    Args:
        tuned: Runs the tuning.
        turn_off: Removes any remaining compensation after a failure.
        instead: The consequence of a failure, for the message.
        fix: Advice.

    Raises:
        Cancelled: `tuned` was stopped.
    """
    try:
        return tuned(), None
    except Cancelled:
        raise
    except NoTuningError as error:
        return None, error.problem
    except (RuntimeFailure, ModelError, TunerError, OSError) as error:
        turn_off()
        problem = Problem(what=f"tuning failed, so {instead}: {error}", fix=fix, failure=True)
        logger.warning("%s", problem.what)
        return None, problem
