"""Offers: quality and speed of the ways to decode a loaded model within a slowdown budget, measured once per device.

The loss of each way is measured on the evaluation text, read as a chat. Its speed follows from the times of steps with
a short context, and for ways with drafts from their acceptance when continuing the same text.

Cheap to import.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from models.foreign import read_json
from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from runtime.backends import backend
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.budget.profile_key import profile_key
from runtime.compensation import CHUNK, k_chunk_by_type
from runtime.errors import RequestError
from runtime.kv.kinds import KINDS
from runtime.text.sampling import SamplingOptions
from runtime.wire.device import Tuning
from tuner.detect import detect_memory
from tuner.errors import ProfileError
from tuner.offers import DecodingMode, Offers, Target
from tuner.profiles import ProfileStore

if TYPE_CHECKING:
    from models.store import StoredModel

WINDOW, TOKENS = 256, 1024
"""Window and text length of perplexity measurements in tokens, the same as when quantizing."""
_PROMPT, _CONTINUED, _TEXTS = 128, 64, 3
"""Tokens of a prompt and of its continuation, and the number of continuations, for measuring acceptance."""
_SPARE_BYTES = 256 << 20
"""Memory to leave free next to a second copy of the residuals."""
logger = logging.getLogger(__name__)


def full_precision(model: StoredModel, text: str) -> float | None:
    """Perplexity of the full-precision model on the evaluation text, as measured when it was quantized.

    Returns:
        None if it was measured on another text, or not at all.

    Raises:
        StoreError: the model's folder cannot be read.
    """
    from models.store import StoredModelInfo
    from models.store.layout import RECIPE

    before = StoredModelInfo.read(model.path, model.name).summary.perplexity_before
    texts = read_json(model.path / RECIPE).get("texts") or {}
    own = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "most_tokens": TOKENS}
    return before if (texts.get("window"), texts.get("evaluation")) == (WINDOW, own) else None


def known(name: str, model: StoredModel, *, budget_percent: float, profiles: ProfileStore) -> Offers | None:
    """The stored offers of a model; None if they were not measured.

    Args:
        name: The backend that runs it.
        model: The stored model.
        budget_percent: The slowdown budget.
        profiles: Folder of profiles.

    Raises:
        BackendError: the device does not respond.
    """
    profile = profiles.find(profile_key(backend(name).device(DecoderOptions()), name, model))
    return next((own for own in profile.offers if own.budget_percent == budget_percent), None)


def take(
    decoder: Decoder, model: StoredModel, tuning: Tuning, *, profiles: ProfileStore, drafts: bool
) -> tuple[Tuning, bool]:
    """Switch a loaded model to the best measured way to decode within its budget, if any was measured.

    Args:
        decoder: The loaded model, tuned to the budget.
        model: What was loaded.
        tuning: Result of tuning to the budget.
        profiles: Folder of profiles.
        drafts: Whether drafts are allowed; the cache must support them too.

    Returns:
        The resulting tuning, and whether that way drafts.

    Raises:
        BackendError: the device does not respond.
    """
    found = known(decoder.backend, model, budget_percent=tuning.budget_percent, profiles=profiles)
    if found is None:
        return tuning, False
    way = found.best(drafts=drafts and KINDS[decoder.options.kv].has_draft, residual=_has_room(model))
    if way.target != "compensated":
        decoder.set_k_chunk(CHUNK if way.target == "residual" else 0)
        k_chunk, slowdown = k_chunk_by_type(decoder.options.k_chunk), found.slowdown_percent(way)
        tuning = replace(
            tuning, k_chunk=k_chunk, predicted_slowdown_percent=slowdown, measured_slowdown_percent=slowdown
        )
    return tuning, way.gamma > 0


def _has_room(model: StoredModel) -> bool:
    """Whether main memory has room for the layout of residuals that are all read at every step."""
    from models.store import StoredModelInfo

    wanted = StoredModelInfo.read(model.path, model.name).summary.residual_bytes
    return detect_memory().available_bytes >= wanted + _SPARE_BYTES


def offers(
    decoder: Decoder,
    model: StoredModel,
    tokens: Sequence[int],
    *,
    budget_percent: float,
    full: float | None,
    profiles: ProfileStore,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Offers:
    """Measure and store the ways to decode a model. Overwrites slot 0 of its cache.

    Args:
        decoder: The loaded model, tuned to the budget; restored afterwards.
        model: What was loaded.
        tokens: The evaluation text, encoded.
        budget_percent: The slowdown budget, relative to the uncompensated low-bit model.
        full: Perplexity of the full-precision model on that text; None if unknown.
        profiles: Folder of profiles.
        progress: Receives reports of the phase `tune`.
        cancelled: Polled between measurements.

    Raises:
        RequestError: the kind of cache does not support drafts, or the context is too short.
        Cancelled: `cancelled` said so.
    """
    options = decoder.options
    if not KINDS[options.kv].has_draft or options.context < WINDOW:
        raise RequestError(
            f"the ways to decode are measured with a hierarchical cache of {WINDOW} tokens at least, not with "
            f"{options.kv} of {options.context}"
        )
    key = profile_key(backend(decoder.backend).device(DecoderOptions()), decoder.backend, model)
    began, own = time.perf_counter(), options.k_chunk
    try:
        ways = tuple(_ways(decoder, tokens[:TOKENS], model.name, progress, cancelled))
    finally:
        decoder.set_k_chunk(own)
    seconds, date = time.perf_counter() - began, datetime.now(UTC).isoformat(timespec="seconds")
    found = Offers(budget_percent=budget_percent, ways=ways, full=full, seconds=seconds, date=date)
    try:
        profiles.update(
            key,
            lambda stored: replace(
                stored, offers=(*(own for own in stored.offers if own.budget_percent != budget_percent), found)
            ),
        )
    except ProfileError as error:
        logger.warning("%s; it will be measured again next time", error)
    return found


def _ways(
    decoder: Decoder, tokens: Sequence[int], name: str, progress: ProgressCallback, cancelled: Callable[[], bool]
) -> Iterator[DecodingMode]:
    """Measure every way; those with drafts only if some draft length beats plain decoding."""
    targets: dict[Target, Mapping[str, int] | int] = {"plain": 0}
    tuned = k_chunk_by_type(decoder.options.k_chunk)
    if any(tuned.values()):
        targets["compensated"] = tuned
    targets["residual"] = CHUNK
    for done, (target, k_chunk) in enumerate(targets.items()):
        work = f"timing {target} decoding of {name} with drafts and without, and what it loses"
        progress(Progress(phase="tune", done=done, total=len(targets), unit="ways", message=work))
        decoder.set_k_chunk(k_chunk)
        yield from _measured(decoder, target, tokens, cancelled)


def _measured(
    decoder: Decoder, target: Target, tokens: Sequence[int], cancelled: Callable[[], bool]
) -> Iterator[DecodingMode]:
    """Measure the decoder's compensation by itself, and with the best draft length if that is faster."""
    from runtime.engine.costs import measure_costs
    from runtime.engine.gamma import best_gamma, expected_tokens
    from runtime.measure.evaluate import perplexity

    loses = perplexity(decoder, tokens, WINDOW, WINDOW, cancelled=cancelled, as_chat=True).perplexity
    costs = measure_costs(decoder, cancelled=cancelled)
    yield DecodingMode(target=target, gamma=0, seconds=costs.plain, perplexity=loses)
    accepted = _acceptance(decoder, tokens, cancelled)
    gamma = best_gamma(costs, accepted)
    if gamma:
        seconds = costs.round_s(gamma) / expected_tokens(gamma, accepted)
        yield DecodingMode(target=target, gamma=gamma, seconds=seconds, perplexity=loses, acceptance_rate=accepted)


def _acceptance(decoder: Decoder, tokens: Sequence[int], cancelled: Callable[[], bool]) -> float:
    """Acceptance of drafted tokens, from rounds of one draft at a chat's temperature."""
    from runtime.engine.gamma import FixedGamma
    from runtime.engine.measure import continued

    drafted = accepted = 0.0
    for text in range(_TEXTS):
        start = text * max(0, len(tokens) - _PROMPT) // _TEXTS
        prompt, sampling = tokens[start : start + _PROMPT], SamplingOptions(temperature=0.7, seed=text)
        did = continued(decoder, prompt, _CONTINUED, sampling, FixedGamma(1), cancelled=cancelled).speculation
        drafted, accepted = drafted + did.drafted, accepted + did.acceptance_rate * did.drafted
    return accepted / drafted
