"""Tuning: the compensation of a loaded model within a slowdown budget, from the ladder of measured settings.

The first tuning measures, in some seconds, the few settings of the ladder that a budget needs (`tune`). An idle server
or `tune-device` measures more: further readings of these settings, and what a text loses with them (`refine`). Either
way everything is kept in one file, and a budget's choice follows from that alone.

Cheap to import: timers, and with them a backend, are imported when something is measured.

Source: QDEC §4.4; the ladder is ours.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from math import isfinite, sqrt
from typing import TYPE_CHECKING

from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from models.spec import LAYER_KINDS, MLP_TYPES
from runtime.backends import AnyBackend, Device, backend
from runtime.backends.decoder import Decoder
from runtime.budget.clocks import Clocks, LayerTimes, clocks
from runtime.budget.profile_key import profile_key
from runtime.budget.text import TOKENS, TextLoss, text_id
from runtime.compensation import check_budget, in_block, k_chunk_by_type
from runtime.errors import BackendError, Cancelled, Problem, RuntimeFailure
from runtime.wire.device import Offer, Tuning
from tuner.errors import Cancelled as SearchCancelled
from tuner.errors import ProfileError, TimerError
from tuner.ladder import MOST_READINGS, READINGS, TARGETS, Maker, Setting, scatter
from tuner.offers import Offers
from tuner.profiles import Profile, ProfileStore
from tuner.search import Search
from tuner.shapes import LayerShape

if TYPE_CHECKING:
    from models.store import StoredModel

PROFILES = "profiles"
"""Folder of profiles in the program's home folder."""
NOISE_PERCENT = 2.0
"""A slowdown that is more negative says that something else slowed down the plain decoding."""
LEAST_CONTEXT = 16
"""Positions a decoder needs for the timings."""
_QUIET_S = 0.4
"""Seconds between two progress reports, so that reporting does not disturb the readings."""
_BEYOND = 4
"""Refining climbs the ladder up to so many times the budget, to tell what other budgets would buy."""
_SPENT, _APART = 0.75, 0.9
"""If the best setting is held to less than this share of the budget, one more is made for what is left, unless there is
one that takes as long but for the second."""
_FEWEST = 4
"""The last block's MLP is chosen by itself in a model of at least so many blocks."""
logger = logging.getLogger(__name__)


class NoTuningError(RuntimeFailure):
    """A budget has no effect on this model or backend. Its message says why; `fix` says what to do."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.what}; {problem.fix}")
        self.problem = problem


def tune(
    decoder: Decoder,
    model: StoredModel,
    *,
    budget_percent: float,
    profiles: ProfileStore,
    force: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Tuning:
    """Tune a loaded model to a budget on this device. Overwrites slot 0 of its cache.

    Args:
        decoder: The loaded model; it gets the resulting setting, or keeps its own on failure.
        model: What was loaded.
        budget_percent: Allowed slowdown of decoding, in [0, 100]; 0 is no compensation.
        profiles: Folder of profiles; every measurement is stored there, also of a tuning that is stopped.
        force: Whether to measure everything again.
        progress: Receives reports of the phase `tune`.
        cancelled: Polled before every measurement.

    Raises:
        NoTuningError: a budget has no effect on this model or backend.
        RequestError: the budget is out of range.
        Cancelled: `cancelled` said so.
        TunerError: the device could not be timed.
        BackendError: the device does not respond.
    """
    check_budget(budget_percent)
    problem = obstacle(backend(decoder.backend), model, decoder.options.context)
    if budget_percent == 0:
        decoder.set_k_chunk(0)
        return _off(decoder.backend if problem else str(backend(decoder.backend).device(decoder.options)))
    if problem is not None:
        decoder.set_k_chunk(0)
        raise NoTuningError(problem)
    key = profile_key(backend(decoder.backend).device(decoder.options), decoder.backend, model)
    profile = profiles.find(key)
    cached = budget_percent in profile.tuned and not force
    if not cached:
        if force:
            profile = Profile(key=key)
        about = f"tuning {model.name} for {{}}: finding the compensation that {{}} slowdown allows; done once"
        with _climbing(decoder, model, profile, profiles, about, budget_percent, progress, cancelled) as climb:
            climb.measure()
        profile = climb.profile
    return _applied(decoder, profile, budget_percent, cached=cached)


def refine(
    decoder: Decoder,
    model: StoredModel,
    tuning: Tuning,
    *,
    profiles: ProfileStore,
    text: str,
    encode: Callable[[str], Sequence[int]],
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Tuning:
    """Refine a budget's choice by more readings and by a text, and apply it. Overwrites slot 0 of the cache.

    Args:
        decoder: The loaded model, tuned to the budget; its prompts too.
        model: What was loaded.
        tuning: Result of tuning to the budget.
        profiles: Folder of profiles; completed measurements are stored there, whatever happens.
        text: The text on which settings are compared.
        encode: The model's tokenizer.
        progress: Receives reports of the phase `tune`.
        cancelled: Polled between steps; the decoder is then as it was.

    Raises:
        Cancelled: `cancelled` said so.
        TunerError: the device could not be timed.
        BackendError: the device does not respond.
    """
    budget = tuning.budget_percent
    key = profile_key(backend(decoder.backend).device(decoder.options), decoder.backend, model)
    profile, identity = profiles.find(key), text_id(text, decoder.options)
    if profile.text != identity:
        unread = tuple(replace(setting, loss=None) for setting in profile.settings)
        profile = replace(profile, text=identity, without=None, settings=unread, refined=())
    if budget not in profile.refined:
        about = f"refining {{1}} for {model.name}"
        with _climbing(decoder, model, profile, profiles, about, budget, progress, cancelled) as climb:
            climb.refine(TextLoss(decoder, encode(text[: 8 * TOKENS]), cancelled))
        profile = climb.profile
    return _applied(decoder, profile, budget, cached=tuning.cached)


def obstacle(runner: AnyBackend, model: StoredModel, context: int) -> Problem | None:
    """The reason why a budget has no effect on a model; None if it has."""
    if model.recipe.kept:
        return Problem(
            what=f"{model.name} has the weights of its file, so there is nothing to compensate",
            fix="a slowdown budget is for models that were rounded here; quantize a better source of it",
        )
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


def tuning_of(profile: Profile, budget_percent: float, *, cached: bool) -> Tuning:
    """The choice for a budget as a wire record."""
    setting = profile.best(budget_percent)
    known = setting or next(iter(profile.settings), None)
    n_tb = dict.fromkeys(LAYER_KINDS, 0) if known is None else known.n_tb
    offer = next((own for own in profile.offers if own.budget_percent == budget_percent), None)
    lost, won = profile.lost_and_won(setting)
    return Tuning(
        device=f"{profile.key.device} ({profile.key.capability})",
        budget_percent=budget_percent,
        n_tb_max=max(n_tb.values()) or None,
        n_tb={kind: n_tb[kind] for kind in LAYER_KINDS if kind in n_tb},
        k_chunk=k_chunk_by_type({} if setting is None else setting.k_chunk),
        predicted_slowdown_percent=0.0 if setting is None else setting.predicted_slowdown_percent,
        measured_slowdown_percent=0.0 if setting is None else setting.slowdown_percent,
        seconds=profile.seconds,
        date=profile.date,
        cached=cached,
        curve=tuple(profile.curve(kind, n_tb[kind]) for kind in LAYER_KINDS if kind in n_tb),
        predicted_loss_won=won,
        loss_without=lost,
        bought=profile.bought(),
        offer=None if offer is None else _offer(offer),
        refined=budget_percent in profile.refined,
    )


def layers_of(decoder: Decoder) -> list[LayerShape]:
    """The layer types of a loaded model."""
    spec = decoder.spec
    return [LayerShape(kind, *spec.linear_shape(kind), spec.products(kind)) for kind in LAYER_KINDS]


def layers_apart(decoder: Decoder) -> list[LayerShape]:
    """The layer types of a loaded model; those of its last MLP stand apart, behind the others."""
    layers, spec = layers_of(decoder), decoder.spec
    last = max(layer for layer in range(spec.num_layers) if layer not in spec.bare)
    mixture = spec.mixture if spec.has_experts(last) else None
    count = 1 if mixture is None else mixture.experts_per_token
    apart = [layer for layer in layers if layer.kind in MLP_TYPES and layer.count >= _FEWEST * count]
    others = [replace(layer, count=layer.count - count) if layer in apart else layer for layer in layers]
    return others + [replace(layer, kind=in_block(last, layer.kind), count=count) for layer in apart]


def _offer(offers: Offers) -> Offer:
    return Offer(words=offers.words(offers.chosen), target=offers.chosen.target, gamma=offers.chosen.gamma)


def _applied(decoder: Decoder, profile: Profile, budget_percent: float, *, cached: bool) -> Tuning:
    found = tuning_of(profile, budget_percent, cached=cached)
    decoder.set_k_chunk(found.k_chunk, found.n_tb)
    return found


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


@contextlib.contextmanager
def _climbing(
    decoder: Decoder,
    model: StoredModel,
    profile: Profile,
    profiles: ProfileStore,
    about: str,
    budget_percent: float,
    progress: ProgressCallback,
    cancelled: Callable[[], bool],
) -> Iterator[_Climb]:
    """Measure the ladder, and store what was measured; on failure, the decoder is as it was.

    `about` says what is done, with places for the device and the budget. Raises as `tune`.
    """
    device, before, began = backend(decoder.backend).device(decoder.options), decoder.options, time.perf_counter()
    climb = _Climb(decoder, model, device, profile, budget_percent, progress, cancelled)
    climb.tell(about.format(device, f"{budget_percent:g} %"))
    try:
        yield climb
    except BaseException as error:
        decoder.set_k_chunk(before.k_chunk, before.n_tb)
        if isinstance(error, SearchCancelled):
            raise Cancelled(str(error)) from error
        if isinstance(error, RuntimeError) and not isinstance(error, RuntimeFailure):  # torch's, of a failing card
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BackendError(f"{device} failed while it was measured ({reason}); is it still there?") from error
        raise
    finally:
        climb.finish(time.perf_counter() - began)
        _keep(profiles, climb.profile)


def _keep(profiles: ProfileStore, profile: Profile) -> None:
    """Save a ladder. If that fails, or its slowdowns are implausible, it is measured again next time."""
    if any(setting.slowdown_percent < -NOISE_PERCENT for setting in profile.settings):
        profile = Profile(key=profile.key)
        logger.warning("another program kept this machine busy during tuning, so it will be tuned again next time")
    try:
        profiles.update(profile.key, lambda stored: replace(profile, prompts=stored.prompts, offers=stored.offers))
    except ProfileError as error:
        logger.warning("%s; it will be tuned again next time", error)


@dataclass
class _Climb:
    """The measurements that a budget needs; `profile` has all of them at any time."""

    decoder: Decoder
    model: StoredModel
    device: Device
    profile: Profile
    budget: float
    progress: ProgressCallback
    cancelled: Callable[[], bool]
    _done: int = 0
    _quiet_until: float = 0.0
    _times: LayerTimes | None = field(default=None)

    def measure(self) -> None:
        """Time the settings of the ladder from the budget down to one that fits, and one for what that leaves."""
        for target in sorted((target for target in TARGETS if target <= self.budget), reverse=True):
            self._climb(target)
            if self.profile.best(self.budget) is not None:
                break
        self._spend()
        for count in range(READINGS + 1, MOST_READINGS + 1):  # on a busy machine, the first readings may say nothing
            for setting in self.profile.settings:
                if self.profile.best(self.budget) is None and setting.slowdown_percent < self.budget:
                    self._timed(setting, count)
        self.profile = replace(self.profile, tuned=tuple(sorted({*self.profile.tuned, self.budget})))

    def refine(self, loss: TextLoss) -> None:
        """Time the rest of the ladder, those near the budget more often, and read the text with all that fit."""
        for target in TARGETS:
            if target <= _BEYOND * self.budget:
                self._climb(target)
        for count in range(READINGS + 1, MOST_READINGS + 1):  # in turns: a slow minute of the machine affects all
            for setting in self.profile.settings:
                if self.budget / 2 < setting.slowdown_percent < 2 * self.budget:
                    self._timed(setting, count)
        self._spend()
        if self.profile.without is None:
            self.tell("reading a text without compensation")
            self.profile = replace(self.profile, without=loss(k_chunk_by_type(0)))
        for setting in self.profile.settings:
            if setting.loss is None and self.profile.bound(setting) <= self.budget:
                self.tell(f"reading a text with the setting for {setting.target:.3g} %")
                self._put(replace(setting, loss=loss(k_chunk_by_type(setting.k_chunk))))
        self.profile = replace(self.profile, refined=tuple(sorted({*self.profile.refined, self.budget})))

    def finish(self, seconds: float) -> None:
        """Complete the profile, whatever happened."""
        times = self.profile.times if self._times is None else self._times.times
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.profile = replace(self.profile, times=times, seconds=self.profile.seconds + seconds, date=date)

    def tell(self, message: str) -> None:
        """Report."""
        self._quiet_until = time.monotonic() + _QUIET_S
        self.progress(Progress(phase="tune", done=self._done, total=None, unit="measurements", message=message))

    @cached_property
    def _clocks(self) -> Clocks:
        return clocks(self.decoder, self.cancelled)

    @cached_property
    def _maker(self) -> Maker:
        """What makes settings; the times that it takes are kept."""
        sm_count, limit = self.device.sm_count, self.device.shared_bytes
        self._times = LayerTimes(self._clocks.layers, self.profile.times, self._reading)
        search = Search(layers_of(self.decoder), self._times, sm_count=sm_count, limit=limit, cancelled=self.cancelled)
        maker = Maker(layers_apart(self.decoder), search, self.model.losses, sm_count=sm_count, limit=limit)
        self.profile = replace(self.profile, lost=maker.lost)
        return maker

    def _climb(self, target: float) -> None:
        """Time the setting for a slowdown, if there is one that is new."""
        setting = self._setting(target)
        if setting is not None:
            self._timed(setting, READINGS)

    def _setting(self, target: float) -> Setting | None:
        """The setting for a slowdown of whole steps: a known one, or a new one; None if there is nothing new."""
        known = next((own for own in self.profile.settings if own.target == target), None)
        if known is not None:
            return known
        made = self._maker.setting(target, min(100.0, target / self._factor(target)))
        new = any(made.k_chunk.values()) and all(own.k_chunk != made.k_chunk for own in self.profile.settings)
        return made if new else None

    def _factor(self, target: float) -> float:
        """How much more whole steps slow down than the layers by their times, in the setting nearest to a target."""
        measured = [own for own in self.profile.settings if own.predicted_slowdown_percent > 0 and own.slowdowns]
        near = min(measured, key=lambda own: abs(own.target - target), default=None)
        if near is None:
            return 1.0
        return min(4.0, max(0.5, near.slowdown_percent / near.predicted_slowdown_percent))

    def _spend(self) -> None:
        """Make one more setting for what the best one leaves of the budget, below those that turned out too slow."""
        best, margin = self.profile.best(self.budget), 2 * scatter(self.profile.settings) / sqrt(READINGS)
        if best is not None and self.profile.bound(best) >= _SPENT * self.budget:
            return
        aim, least = max(self.budget / 2, self.budget - 1.25 * margin), self.budget / 2
        if best is not None:
            least = max(least, best.slowdown_percent / _APART)
        while any(_APART * aim < own.slowdown_percent <= aim / _APART for own in self.profile.settings):
            aim *= _APART
        if aim >= least:
            self._climb(aim)

    def _timed(self, setting: Setting, count: int) -> Setting:
        """The setting with at least so many readings."""
        while len(setting.slowdowns) < count:
            if self.cancelled():
                raise Cancelled("the tuning was stopped. Its measurements are kept; start it again to continue")
            self._done += 1
            self.tell(f"decoding with the setting for {setting.target:.3g} % and without")
            percent = self._clocks.slowdown(k_chunk_by_type(setting.k_chunk), setting.n_tb)
            if not isfinite(percent):
                raise TimerError(f"the measured slowdown of decoding is {percent} percent; tune again")
            setting = replace(setting, slowdowns=(*setting.slowdowns, percent))
            self._put(setting)
        return setting

    def _put(self, setting: Setting) -> None:
        others = [own for own in self.profile.settings if own.target != setting.target]
        settings = tuple(sorted([*others, setting], key=lambda own: own.target))
        self.profile = replace(self.profile, settings=settings)

    def _reading(self, kind: str, k_chunk: int) -> None:
        """Report that a layer type is about to be timed; rarely, since displaying it takes processor time."""
        self._done += 1
        if time.monotonic() >= self._quiet_until:
            self.tell(f"timing {kind} with {k_chunk} channels per 1024 compensated")
