"""Prompt tuning: finds the highest compensation of prompts within the budget for the time to the first token.

All rows of a prompt share their residuals, so the search is short: a backend offers a few levels, all residuals first,
and the first level within the budget is used. The measurement times a whole prefill, alternating with and without
compensation.

Cheap to import.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from runtime.backends import backend
from runtime.backends.decoder import Decoder, Step
from runtime.budget.profile_key import profile_key
from runtime.budget.tuning import NoTuningError, obstacle
from runtime.compensation import check_budget
from runtime.errors import Cancelled, OutOfMemoryError
from runtime.wire.device import PromptTuning
from tuner.errors import ProfileError
from tuner.profiles import Profile, ProfileStore, PromptProfile, PromptReading

if TYPE_CHECKING:
    from models.store import StoredModel

MARGIN = 0.9
"""Share of the budget that a level may take: the next measurement may be a little higher."""
PROMPT_TOKENS = 512
"""Length of the timed prompt in tokens, if context and time allow."""
_PASS_S = 1.5
"""Time limit of one prefill in seconds; for a slow model the prompt is shortened to whole steps, at least one."""
_LEAST_ROUNDS, _MOST_ROUNDS, _ROUNDS_S = 4, 15, 3.0
"""Rounds of one measurement, each with and without compensation, and the time limit in seconds after which no further
round begins."""
_CLEAR_PERCENT = 5.0
"""A slowdown this far from the limit is not measured in more than the fewest rounds."""
logger = logging.getLogger(__name__)


class PromptTimer:
    """Times a prompt with and without compensation. Overwrites the first positions of slot 0.

    Args:
        decoder: A loaded model, with a context of at least two tokens.
        cancelled: Polled between steps.
    """

    def __init__(self, decoder: Decoder, *, cancelled: Callable[[], bool] = never_cancelled) -> None:
        self._decoder, self._cancelled = decoder, cancelled
        self.tokens = min(PROMPT_TOKENS, decoder.options.context)
        """Of the prompt."""
        self._sized = False

    def slowdown(self, k_chunk: Mapping[str, int] | int, limit: float | None = None) -> float:
        """Slowdown of the prompt in percent; noise can make it negative.

        Restores the decoder's `prompt_k_chunk` afterwards.

        Args:
            k_chunk: Channels per 1024, as in `DecoderOptions.prompt_k_chunk`.
            limit: The slowdown in percent that it is compared with; far from it a few rounds do.

        Raises:
            OutOfMemoryError: the device has no room for it.
            Cancelled: `cancelled` said so.
        """
        before = self._decoder.options.prompt_k_chunk
        try:
            self._decoder.set_prompt_k_chunk(k_chunk)
            with self._decoder.session():
                self._size()
                for compensate in (True, False):
                    self.seconds(compensate=compensate)  # compiles new kernels
                return self._percent(limit)
        finally:
            self._decoder.set_prompt_k_chunk(before)

    def seconds(self, *, compensate: bool) -> float:
        """Seconds of one prefill, with the decoder's current setting or without compensation."""
        rows, began = self._decoder.options.max_rows, time.perf_counter()
        for start in range(0, self.tokens, rows):
            self._step(start, min(start + rows, self.tokens), compensate=compensate)
        return time.perf_counter() - began

    def _percent(self, limit: float | None) -> float:
        """What the fastest prefill with compensation takes longer than the fastest without, in percent.

        Disturbances only slow one down.
        """
        found = math.inf
        times: dict[bool, list[float]] = {False: [], True: []}
        end = time.perf_counter() + _ROUNDS_S
        while len(times[True]) < _LEAST_ROUNDS or (time.perf_counter() < end and len(times[True]) < _MOST_ROUNDS):
            for compensate in (False, True) if len(times[True]) % 2 else (True, False):
                times[compensate].append(self.seconds(compensate=compensate))
            found = 100 * (min(times[True]) / min(times[False]) - 1)
            if limit is not None and len(times[True]) >= _LEAST_ROUNDS and abs(found - limit) > _CLEAR_PERCENT:
                break
        return found

    def _size(self) -> None:
        """Shorten the prompt to as many whole steps as fit the time limit."""
        if self._sized:
            return
        rows, seconds = min(self._decoder.options.max_rows, self.tokens), []
        for _ in range(2):
            began = time.perf_counter()
            self._step(0, rows, compensate=False)
            seconds.append(time.perf_counter() - began)
        steps = max(1, int(_PASS_S / min(seconds)))
        self.tokens, self._sized = min(self.tokens, steps * rows), True

    def _step(self, start: int, end: int, *, compensate: bool) -> None:
        if self._cancelled():
            raise Cancelled("the measurement was stopped")
        positions = np.arange(start, end, dtype=np.int32)
        wanted = [end - start - 1] if end == self.tokens else []
        self._decoder.forward(
            Step(
                tokens=(7919 * positions + 17) % self._decoder.spec.vocab_size,
                slots=np.zeros(end - start, np.int32),
                positions=positions,
                logit_rows=np.array(wanted, np.int32),
                compensate=compensate,
                prefill=True,
            )
        )


def tune_prompts(
    decoder: Decoder,
    model: StoredModel,
    *,
    budget_percent: float,
    profiles: ProfileStore,
    force: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> PromptTuning:
    """Compensate the prompts of a loaded model as far as a budget allows. Overwrites slot 0 of its cache.

    Args:
        decoder: The loaded model; it gets the resulting setting, or keeps its own on failure.
        model: What was loaded.
        budget_percent: Allowed slowdown of a prompt, in [0, 100]; 0 is no compensation.
        profiles: Folder of profiles.
        force: Whether to measure again.
        progress: Receives reports of the phase `tune`.
        cancelled: Polled before every step.

    Raises:
        NoTuningError: a budget has no effect on this model or backend.
        RequestError: the budget is out of range.
        Cancelled: `cancelled` said so.
        BackendError: the device does not respond.
    """
    check_budget(budget_percent)
    runner = backend(decoder.backend)
    if budget_percent == 0:
        decoder.set_prompt_k_chunk(0)
        return PromptTuning(budget_percent=0.0, k_chunk=0, measured_slowdown_percent=0.0, tokens=0)
    problem = obstacle(runner, model, decoder.options.context)
    if problem is not None:
        decoder.set_prompt_k_chunk(0)
        raise NoTuningError(problem)
    key = profile_key(runner.device(decoder.options), decoder.backend, model)
    found = None if force else known_prompts(profiles.find(key), budget_percent)
    cached = found is not None
    if found is None:
        work = f"finding the compensation that {budget_percent:g} % more time to the first word allows; done once"
        progress(Progress(phase="tune", done=0, total=None, unit="prompts", message=f"tuning {model.name}: {work}"))
        found = _search(decoder, budget_percent, cancelled)
        try:
            profiles.update(key, lambda stored: _with(stored, found))
        except ProfileError as error:
            logger.warning("%s; it will be tuned again next time", error)
    decoder.set_prompt_k_chunk(found.k_chunk)
    return prompt_tuning_of(found, cached=cached)


def known_prompts(profile: Profile, budget_percent: float) -> PromptProfile | None:
    """What a profile says of a budget of prompts; None if that was not measured."""
    return next((own for own in profile.prompts if own.budget_percent == budget_percent), None)


def _with(profile: Profile, found: PromptProfile) -> Profile:
    others = [own for own in profile.prompts if own.budget_percent != found.budget_percent]
    return replace(profile, prompts=(*others, found))


def is_known(decoder: Decoder, model: StoredModel, *, budget_percent: float, profiles: ProfileStore) -> bool:
    """Whether the result of tuning a model's prompts is already stored."""
    runner = backend(decoder.backend)
    if not budget_percent or obstacle(runner, model, decoder.options.context) is not None:
        return True
    key = profile_key(runner.device(decoder.options), decoder.backend, model)
    return known_prompts(profiles.find(key), budget_percent) is not None


def prompt_tuning_of(profile: PromptProfile, *, cached: bool) -> PromptTuning:
    """A profile as a wire record."""
    return PromptTuning(
        budget_percent=profile.budget_percent,
        k_chunk=profile.k_chunk,
        measured_slowdown_percent=profile.measured_slowdown_percent,
        tokens=profile.tokens,
        seconds=profile.seconds,
        date=profile.date,
        cached=cached,
    )


def _search(decoder: Decoder, budget_percent: float, cancelled: Callable[[], bool]) -> PromptProfile:
    """The first level within the budget, starting from the largest."""
    began, timer = time.perf_counter(), PromptTimer(decoder, cancelled=cancelled)
    readings: list[PromptReading] = []
    k_chunk, limit = 0, MARGIN * budget_percent
    for level in backend(decoder.backend).prompt_levels:
        try:
            slowdown = timer.slowdown(level, limit)
        except OutOfMemoryError as error:
            logger.warning("prompts are not compensated by %d channels per 1024: %s", level, error)
            continue
        readings.append(PromptReading(k_chunk=level, slowdown_percent=slowdown))
        if slowdown <= limit:
            k_chunk = level
            break
    return PromptProfile(
        budget_percent=budget_percent,
        k_chunk=k_chunk,
        readings=tuple(readings),
        tokens=timer.tokens,
        seconds=time.perf_counter() - began,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
