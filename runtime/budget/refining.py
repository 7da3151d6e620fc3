"""Refining: makes a tuned budget's choice better with whole decoding steps and a text, without making anybody wait.

Tuning at load takes a few seconds and only times. What needs a text or many readings is done later, while the runtime
is idle (`ModelSlot.refine`), or at once by `tune-device`. Every measurement is stored, so an interrupted refinement
continues where it was.

Cheap to import.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from models.spec import LAYER_KINDS, MLP_TYPES
from runtime.backends import backend
from runtime.backends.decoder import Decoder
from runtime.budget.clocks import refined_slowdown
from runtime.budget.profile_key import TunedModel, profile_key
from runtime.budget.text import TOKENS, TextLoss, text_id
from runtime.budget.tuning import layers_of
from runtime.compensation import in_block, k_chunk_by_type
from runtime.errors import Cancelled
from runtime.wire.device import Tuning

if TYPE_CHECKING:
    from tuner.findings import Findings
    from tuner.profiles import ProfileKey, ProfileStore
    from tuner.progress import Report
    from tuner.shapes import LayerShape

MARGIN = 0.95
"""Share of the budget that a refined choice may use. Its slowdown is a median of up to nine readings."""
_FEWEST = 4
"""The last block's MLP is chosen by itself in a model of at least so many blocks."""
logger = logging.getLogger(__name__)


def refined(decoder: Decoder, model: TunedModel, tuning: Tuning, *, profiles: ProfileStore, text: str) -> Tuning:
    """Apply the best choice that refinements have found for a budget, if there is one.

    Args:
        decoder: The loaded model, tuned to the budget; its prompts too.
        model: What was loaded.
        tuning: Result of tuning to the budget.
        profiles: Folder of profiles.
        text: The text of refinements.

    Raises:
        BackendError: the device does not respond.
    """
    found = _told(tuning, _known(decoder, model, tuning, profiles, text))
    decoder.set_k_chunk(found.k_chunk, found.n_tb)
    return found


def as_stored(tuning: Tuning, key: ProfileKey, profiles: ProfileStore) -> Tuning:
    """A stored tuning with what refinements have found for it, without loading the model.

    Args:
        tuning: The tuning, from its profile.
        key: The profile's key.
        profiles: Folder of profiles.
    """
    from tuner.findings import FindingsStore

    findings = FindingsStore(profiles.folder).find(replace(key, budget_percent=0.0))
    return tuning if findings is None else _told(tuning, findings)


def refine(
    decoder: Decoder,
    model: TunedModel,
    tuning: Tuning,
    *,
    profiles: ProfileStore,
    text: str,
    encode: Callable[[str], Sequence[int]],
    force: bool = False,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Tuning:
    """Refine a budget's choice, and apply it. Overwrites slot 0 of the decoder's cache.

    Args:
        decoder: The loaded model, tuned to the budget; its prompts too.
        model: What was loaded.
        tuning: Result of tuning to the budget.
        profiles: Folder of profiles; completed measurements are stored there, whatever happens.
        text: The text on which choices are compared.
        encode: The model's tokenizer.
        force: Whether to measure everything again.
        progress: Receives reports of the phase `tune`.
        cancelled: Polled between steps; the decoder is then as it was.

    Returns:
        The refined result.

    Raises:
        Cancelled: `cancelled` said so.
        TunerError: the device could not be timed.
        BackendError: the device does not respond.
    """
    from tuner import errors
    from tuner.candidates import CHUNK, k_chunk_limit
    from tuner.refine import Refinement

    before = _known(decoder, model, tuning, profiles, text)
    if force:
        before = replace(before, measured=(), refined=())
    if tuning.budget_percent in before.refined:
        return refined(decoder, model, tuning, profiles=profiles, text=text)

    def tell(report: Report) -> None:
        progress(
            Progress(
                phase="tune",
                done=int(report.done),
                total=None if report.total is None else int(report.total),
                unit="measurements",
                message=f"refining {tuning.budget_percent:g} % for {model.name}: {report.message}",
            )
        )

    layers, shared = refined_layers(decoder), backend(decoder.backend).device(decoder.options).shared_bytes
    limits = {
        layer.kind: CHUNK if shared is None else k_chunk_limit(layer.n, layer.k, tuning.n_tb[layer.type], shared)
        for layer in layers
    }
    refinement = Refinement(
        layers,
        before,
        TextLoss(decoder, encode(text[: 8 * TOKENS]), cancelled),
        refined_slowdown(decoder, cancelled),
        n_tb=tuning.n_tb,
        limits=limits,
        progress=tell,
        cancelled=cancelled,
    )
    try:
        refinement.within(MARGIN * tuning.budget_percent, tuning.budget_percent, tuning.k_chunk)
    except errors.Cancelled as error:
        raise Cancelled(str(error)) from error
    finally:
        _keep(refinement.findings, profiles)
    found = _told(tuning, refinement.findings)
    decoder.set_k_chunk(found.k_chunk, found.n_tb)
    return found


def refined_layers(decoder: Decoder) -> list[LayerShape]:
    """The layer types of a loaded model; those of its last block's MLP stand apart, behind the others."""
    layers, spec, last = layers_of(decoder), decoder.spec, decoder.spec.num_layers - 1
    mixture = spec.mixture if spec.has_experts(last) else None
    count = 1 if mixture is None else mixture.read
    apart = [layer for layer in layers if layer.kind in MLP_TYPES and layer.count >= _FEWEST * count]
    others = [replace(layer, count=layer.count - count) if layer in apart else layer for layer in layers]
    return others + [replace(layer, kind=in_block(last, layer.kind), count=count) for layer in apart]


def _known(decoder: Decoder, model: TunedModel, tuning: Tuning, profiles: ProfileStore, text: str) -> Findings:
    from tuner.findings import FindingsStore

    device = backend(decoder.backend).device(decoder.options)
    key = profile_key(device, decoder.backend, model, tuning.budget_percent)
    return FindingsStore(profiles.folder).known(key, text_id(text, decoder.options))


def _told(tuning: Tuning, findings: Findings) -> Tuning:
    """A tuning with the best choice of the findings, if they have any."""
    found = findings.best(MARGIN * tuning.budget_percent)
    done = tuning.budget_percent in findings.refined
    if found is None or found.loss is None or findings.without is None or not (done or any(found.k_chunk.values())):
        return tuning
    return replace(
        tuning,
        k_chunk=k_chunk_by_type(found.k_chunk),
        n_tb={kind: found.n_tb[kind] for kind in LAYER_KINDS if kind in found.n_tb},
        predicted_slowdown_percent=found.slowdown_percent,
        measured_slowdown_percent=found.slowdown_percent,
        predicted_loss_won=findings.without - found.loss,
        loss_without=findings.without,
        bought=findings.front(),
        refined=done,
    )


def _keep(findings: Findings, profiles: ProfileStore) -> None:
    """Store findings. If that fails, they are measured again."""
    from tuner.errors import ProfileError
    from tuner.findings import FindingsStore

    try:
        FindingsStore(profiles.folder).save(findings)
    except ProfileError as error:
        logger.warning("%s; it will be refined again", error)
