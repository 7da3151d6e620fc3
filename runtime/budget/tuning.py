"""Tuning: finds the most compensation within a slowdown budget, once per model and device.

Cheap to import: timers, and with them a backend, are imported when something is measured.

Source: QDEC §4.4.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from models.errors import ModelError
from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from models.spec import LAYER_KINDS
from runtime.backends import AnyBackend, Device, backend
from runtime.backends.decoder import Decoder
from runtime.budget.clocks import NOISE_PERCENT, Decided, Ratios, Readings, clocks
from runtime.budget.profile_key import TunedModel, profile_key
from runtime.compensation import check_budget, k_chunk_by_type
from runtime.errors import BackendError, Cancelled, Problem, RuntimeFailure
from runtime.wire.device import Offer, Tuning
from tuner.curve import Curve

if TYPE_CHECKING:
    from tuner.profiles import Profile, ProfileKey, ProfileStore
    from tuner.shapes import LayerShape

PROFILES = "profiles"
"""Folder of profiles and timings in the program's home folder."""
MARGIN = 0.9
"""Share of the budget that the final check accepts: the next measurement may be a little higher."""
_QUIET_S = 0.4
"""Seconds between two progress reports, so that reporting does not disturb the readings."""
LEAST_CONTEXT = 16
"""Positions a decoder needs for the timings."""
_READINGS_A_KIND = 10
"""Approximate readings per layer type, for the progress bar."""
_BLOCK_COUNTS = 5
"""Factor for GPUs, where thread blocks are searched too."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class NoTuningError(RuntimeFailure):
    """A budget has no effect on this model or backend. Its message says why; `fix` says what to do."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.what}; {problem.fix}")
        self.problem = problem


def within_budget(
    decoder: Decoder,
    model: TunedModel,
    *,
    budget_percent: float,
    profiles: ProfileStore,
    force: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> tuple[Tuning | None, Problem | None]:
    """As `tune`, but failures are returned, and leave the model uncompensated.

    Returns:
        The result, or the problem.

    Raises:
        Cancelled: `cancelled` said so.
    """

    def found() -> Tuning:
        return tune(
            decoder,
            model,
            budget_percent=budget_percent,
            profiles=profiles,
            force=force,
            progress=progress,
            cancelled=cancelled,
        )

    instead = f"{model.name} runs without error compensation"
    fix = "run `lowbit-chat tune-device --force`, or choose a fixed k_chunk"
    return or_problem(found, lambda: decoder.set_k_chunk(0), instead=instead, fix=fix)


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
    from tuner.errors import TunerError

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


def tune(
    decoder: Decoder,
    model: TunedModel,
    *,
    budget_percent: float,
    profiles: ProfileStore,
    force: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Tuning:
    """Tune a loaded model to a budget on this device. Overwrites slot 0 of its cache.

    A stored profile is applied at once. Otherwise the layers are timed, k_chunk is searched, and whole steps are timed
    with and without compensation until the slowdown is within the budget. Every timing of a layer is stored: an
    interrupted tuning resumes, and another budget needs few new timings.

    Args:
        decoder: The loaded model; it gets the resulting setting, or keeps its own on failure.
        model: What was loaded.
        budget_percent: Allowed slowdown of decoding, in [0, 100]; 0 is no compensation.
        profiles: Folder of profiles and timings.
        force: Whether to measure everything again.
        progress: Receives reports of the phase `tune`.
        cancelled: Polled before every measurement.

    Raises:
        NoTuningError: a budget has no effect on this model or backend.
        RequestError: the budget is out of range.
        Cancelled: `cancelled` said so.
        TunerError: the device could not be timed.
        BackendError: the device does not respond.

    Source: QDEC §4.4.
    """
    check_budget(budget_percent)
    problem = obstacle(backend(decoder.backend), model, decoder.options.context)
    if budget_percent == 0:
        decoder.set_k_chunk(0)
        return _off(decoder.backend if problem else str(backend(decoder.backend).device(decoder.options)))
    if problem is not None:
        decoder.set_k_chunk(0)
        raise NoTuningError(problem)
    device = backend(decoder.backend).device(decoder.options)
    key = profile_key(device, decoder.backend, model, budget_percent)
    profile = None if force else profiles.find(key)
    if profile is None:
        before = decoder.options
        try:
            profile = _measure(decoder, model, device, key, profiles, force, progress, cancelled)
        except BaseException:
            decoder.set_k_chunk(before.k_chunk, before.n_tb)
            raise
        _keep(profiles, profile)
        cached = False
    else:
        cached = True
    decoder.set_k_chunk(profile.configuration.k_chunk, profile.configuration.n_tb)
    return replace(
        tuning_of(profile, cached=cached),
        bought=_bought(profile, decoder, model),
        offer=_offer(decoder.backend, model, budget_percent, profiles),
    )


def _bought(profile: Profile, decoder: Decoder, model: TunedModel) -> tuple[tuple[float, float], ...]:
    """Recovered loss at other slowdowns; empty if the model's losses were not measured."""
    from tuner.tradeoff import tradeoff

    losses = model.losses
    return () if losses is None else tradeoff(profile.configuration, profile.curve, layers_of(decoder), losses)


def _offer(name: str, model: TunedModel, budget_percent: float, profiles: ProfileStore) -> Offer | None:
    """The best way to decode within the budget, if measured."""
    from runtime.budget.offering import known

    found = known(name, model, budget_percent=budget_percent, profiles=profiles)
    if found is None:
        return None
    return Offer(words=found.words(found.chosen), target=found.chosen.target, gamma=found.chosen.gamma)


def obstacle(runner: AnyBackend, model: TunedModel, context: int) -> Problem | None:
    """The reason why a budget has no effect on a model; None if it has.

    Args:
        runner: Its backend.
        model: The stored model.
        context: Its context.
    """
    if model.recipe.residual_bits == 0:
        return Problem(
            what=f"{model.name} was stored without residuals, so there is nothing to compensate with",
            fix="quantize it again with --residual-bits 4",
        )
    if runner.untuned is not None:
        return runner.untuned
    if context < LEAST_CONTEXT:
        return Problem(
            what=f"a context of {context} tokens is too short to time decoding in",
            fix=f"choose one of at least {LEAST_CONTEXT} tokens, or a fixed k_chunk",
        )
    return None


def tuning_of(profile: Profile, *, cached: bool) -> Tuning:
    """A profile as a wire record."""
    found = profile.configuration
    return Tuning(
        device=f"{profile.key.device} ({profile.key.capability})",
        budget_percent=profile.key.budget_percent,
        n_tb_max=found.n_tb_max,
        n_tb={kind: found.n_tb[kind] for kind in LAYER_KINDS if kind in found.n_tb},
        k_chunk={kind: found.k_chunk[kind] for kind in LAYER_KINDS if kind in found.k_chunk},
        predicted_slowdown_percent=found.predicted_slowdown_percent,
        measured_slowdown_percent=profile.measured_slowdown_percent,
        seconds=profile.seconds,
        date=profile.date,
        cached=cached,
        curve=profile.curve,
        predicted_loss_won=found.predicted_loss_won,
        loss_without=found.loss_without,
    )


def layers_of(decoder: Decoder) -> list[LayerShape]:
    """The layer types of a loaded model."""
    from tuner.shapes import LayerShape

    spec = decoder.spec
    return [LayerShape(kind, *spec.linear_shape(kind), spec.products(kind)) for kind in LAYER_KINDS]


def _keep(profiles: ProfileStore, profile: Profile) -> None:
    """Save a profile. If that fails, or its numbers are implausible, the model is tuned again next time."""
    from tuner.errors import ProfileError

    if profile.measured_slowdown_percent < -NOISE_PERCENT:
        profiles.journal(profile.key).unlink(missing_ok=True)
        logger.warning("another program kept this machine busy during tuning, so it will be tuned again next time")
        return
    try:
        profiles.save(profile)
    except ProfileError as error:
        logger.warning("%s; it will be tuned again next time", error)


def _off(device: str) -> Tuning:
    """The result for a budget of 0."""
    return Tuning(
        device=device,
        budget_percent=0.0,
        n_tb_max=None,
        n_tb={},
        k_chunk=k_chunk_by_type(0),
        predicted_slowdown_percent=0.0,
        measured_slowdown_percent=0.0,
        seconds=0.0,
        date="",
        cached=False,
    )


class _Work:
    """Progress of a tuning."""

    def __init__(self, model: TunedModel, device: Device, budget_percent: float, progress: ProgressCallback) -> None:
        self._progress = progress
        self._about = f"{budget_percent:g} %"
        self._done = 0
        self._total = 0
        self._quiet_until = 0.0
        self.tell(
            f"tuning {model.name} for {device}: finding the compensation that {self._about} slowdown allows; done once"
        )

    def tell(self, message: str) -> None:
        """Report."""
        self._quiet_until = time.monotonic() + _QUIET_S
        done = min(self._done, max(0, self._total - 1))
        self._progress(Progress(phase="tune", done=done, total=self._total or None, unit="timings", message=message))

    def expect(self, kinds: int) -> None:
        """Estimate the duration from the number of layer types to search."""
        self._total = (kinds + 1) * _READINGS_A_KIND

    def reading(self, kind: str, k_chunk: int) -> None:
        """Report that a layer type is about to be timed; rarely, since displaying it takes processor time."""
        if time.monotonic() >= self._quiet_until:
            self.tell(f"timing {kind} with {k_chunk} channels per 1024 compensated")
        self._done += 1

    def verifying(self, k_chunk: Mapping[str, int]) -> None:
        """Report that decoding is about to be timed."""
        self._done = max(self._done, self._total - _READINGS_A_KIND) + 1
        low, high = min(k_chunk.values()), max(k_chunk.values())
        self.tell(f"decoding with k_chunk {low} to {high} and without, to verify the limit of {self._about}")


def _measure(
    decoder: Decoder,
    model: TunedModel,
    device: Device,
    key: ProfileKey,
    profiles: ProfileStore,
    force: bool,
    progress: ProgressCallback,
    cancelled: Callable[[], bool],
) -> Profile:
    """Tune. Raises as `tune`."""
    from tuner import errors, search, verify
    from tuner.profiles import JournalTimer, Profile

    began = time.perf_counter()
    work = _Work(model, device, key.budget_percent, progress)
    layers = layers_of(decoder)
    work.expect(len(layers) * (1 if device.sm_count is None else _BLOCK_COUNTS))
    journal = profiles.journal(key)
    if force:
        journal.unlink(missing_ok=True)
    try:
        measuring = clocks(decoder, cancelled)
        readings = Readings(JournalTimer(Ratios(measuring.layers), journal), work.reading)
        searching = search.Search(
            layers,
            readings,
            sm_count=device.sm_count,
            limit=device.shared_bytes,
            losses=model.losses,
            cancelled=cancelled,
        )
        found = searching.within(key.budget_percent)
        allowed = MARGIN * key.budget_percent
        slowdown = Decided(measuring.slowdown, allowed, work.verifying)
        held, measured = verify.hold(found, slowdown, allowed, searching.smaller, cancelled=cancelled)
    except errors.Cancelled as error:
        raise Cancelled(str(error)) from error
    except RuntimeFailure:
        raise
    except RuntimeError as error:  # torch's, if a card stops responding
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendError(f"{device} failed while it was measured ({reason}); is it still there?") from error
    if 2 * sum(held.k_chunk.values()) < sum(found.k_chunk.values()):
        journal.unlink(missing_ok=True)  # whole steps contradict these timings, so they are useless for other budgets
    curve = tuple(
        Curve(kind=layer.kind, n_tb=held.n_tb[layer.kind], points=readings.curve(layer.kind, held.n_tb[layer.kind]))
        for layer in layers
    )
    return Profile(
        key=key,
        configuration=held,
        measured_slowdown_percent=measured,
        curve=curve,
        seconds=time.perf_counter() - began,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
