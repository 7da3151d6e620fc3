"""Measuring a stored model's certificate: the program's own decoder beside the distributions that its source had.

Prompts and decoded tokens are run as in a chat, but that many decoded tokens share a step, each compensated by its own
activations. Cheap to import.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np

from models.errors import ModelError, StoreError
from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from models.store import StoredModel
from models.store.certificate import Certificate, Way
from models.store.layout import RECIPE, REFERENCE
from models.store.tensors import MappedTensors
from runtime.backends import AUTO
from runtime.backends.decoder import Decoder, DecoderOptions, KVKind
from runtime.budget.profile_key import content_id
from runtime.compensation import Compensation
from runtime.errors import RequestError, RuntimeFailure
from runtime.kv.kinds import KINDS
from runtime.load.plan import LoadOptions, plan_load
from runtime.measure.evaluate import Int64Array, Window, negative_log_likelihood, scores
from runtime.text.divergence import Outline

_TENSORS = ("tokens", "lengths", "leaders", "log_probabilities")
_ROWS = 32
"""Most decoded tokens that share a step."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reference:
    """A text and the source's next-token distributions on it."""

    windows: tuple[Int64Array, ...]
    """int64 [S] each; the first half is a prompt."""
    outline: Outline
    """Of the tokens that are scored, window after window; most likely tokens first."""

    @classmethod
    def of(cls, model: StoredModel) -> Reference | None:
        """A stored model's; None where it has none.

        Raises:
            StoreError: it is damaged, or that of another model.
        """
        path = model.path / REFERENCE
        if not path.is_file():
            return None
        found = MappedTensors(path)
        try:
            tokens, lengths, leaders, logarithms = (np.asarray(found[name]) for name in _TENSORS)
            own = np.exp(logarithms, dtype=np.float32)
            rest = np.maximum(0, 1 - own.sum(1, keepdims=True, dtype=np.float64)).astype(np.float32)
            outline = Outline(leaders, np.concatenate((own, rest), 1))
            ids, scored = np.concatenate((tokens, leaders.ravel())), int((lengths - lengths // 2).sum())
            fits = own.shape == leaders.shape == (scored, leaders.shape[1]) and lengths.min() > 1
            if not (fits and lengths.sum() == tokens.size and 0 <= ids.min() <= ids.max() < model.spec.vocab_size):
                raise ValueError("sizes or tokens of another model")
            return cls(tuple(np.split(tokens.astype(np.int64), np.cumsum(lengths)[:-1])), outline)
        except (ValueError, IndexError) as error:
            raise StoreError(f"{path} is damaged ({error}); quantize the model again") from error

    def measure(self, decoder: Decoder, way: Way, cancelled: Callable[[], bool] = never_cancelled) -> Way:
        """What a decoder with this way's cache loses. Slot 0 is overwritten, compensation is restored.

        Raises:
            RequestError: the way does not fit the model.
            InvalidActivationError: the model computed NaN or infinity.
            Cancelled: `cancelled` said so.
        """
        before = decoder.options
        try:
            with decoder.session():
                decoder.set_k_chunk(way.k_chunk, before.n_tb)
                decoder.set_prompt_k_chunk(way.prompt_k_chunk)
                found = np.sum(list(self._steps(decoder, cancelled)), axis=0) / len(self.outline.tokens)
        finally:
            decoder.set_k_chunk(before.k_chunk, before.n_tb)
            decoder.set_prompt_k_chunk(before.prompt_k_chunk)
        kl, same, nll = map(float, found)
        return replace(
            way, kl=round(kl, 5), same_percent=round(100 * same, 2), perplexity=round(math.exp(min(nll, 700)), 5)
        )

    def _steps(self, decoder: Decoder, cancelled: Callable[[], bool]) -> Iterator[tuple[float, int, float]]:
        """Of each step: its divergence, how many leaders are the source's, and its negative log-likelihood."""
        at = 0
        for text in self.windows:
            half = len(text) // 2
            part = Window(0, len(text), half, half)
            for logits, targets in scores(decoder, text, part, _ROWS, cancelled):
                own = self.outline.rows(at, at + len(logits))
                at += len(logits)
                same = int((logits.argmax(1) == own.tokens[:, 0]).sum())
                yield own.divergence(logits), same, negative_log_likelihood(logits, targets)


def measured(
    model: StoredModel,
    reference: Reference,
    ways: Sequence[Way],
    *,
    backend: str = AUTO,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> tuple[Way, ...]:
    """Measure ways of running a model, by opening it once for each kind of cache, as a load would.

    Raises:
        RuntimeFailure: nothing can run it here, or it computes NaN.
        Cancelled: `cancelled` said so.
    """

    def report(step: Progress) -> None:
        progress(replace(step, phase="certify"))  # what is compiled and opened is no load that was asked for

    found: list[Way] = []
    for kv, alike in groupby(ways, lambda way: way.kv):
        if kv not in KINDS:
            raise RequestError(
                f"the certificate of {model.name} names a cache {kv!r}, which this program does not know"
            )
        context = max(map(len, reference.windows))
        compensation = Compensation(k_chunk=0, prompt_budget_percent=100 if model.recipe.residual_bits else 0)
        asked = LoadOptions(kv=cast("KVKind", kv), context=context, compensation=compensation, backend=backend)
        plan = plan_load(model, asked)
        plan.prepare(report)
        decoder = plan.open_decoder(report)
        try:
            for way in alike:
                message = f"comparing {model.name} with its source: {way.name}, {kv} cache"
                progress(Progress(phase="certify", done=len(found), total=len(ways), unit="ways", message=message))
                found.append(reference.measure(decoder, way, cancelled))
        finally:
            decoder.close()
    return tuple(found)


def certify(
    model: StoredModel,
    *,
    backend: str = AUTO,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Certificate | None:
    """Measure a new model's certificate and write it.

    Without compensation, with about what the default budget buys, and that with a cache of 4 bits.

    Args:
        model: The stored model.
        backend: As in `LoadOptions`.
        progress: Receives reports.
        cancelled: Polled between steps.

    Returns:
        None where it can't be measured, or `cancelled` said so; the log says why.
    """
    from models.quantize.quality import usual

    reference, before = Reference.of(model), model.info.summary.perplexity_before
    if reference is None or before is None:
        return None
    k_chunk = usual(model.recipe)
    ways = [Way(kv="fp16", k_chunk=own) for own in sorted({0, k_chunk})] + [Way(kv="int4", k_chunk=k_chunk)]
    try:
        found = measured(model, reference, ways, backend=backend, progress=progress, cancelled=cancelled)
        own = Certificate(
            model=content_id(model),
            text=json.loads((model.path / RECIPE).read_bytes())["texts"]["evaluation"]["sha256"],
            tokens=len(reference.outline.tokens),
            seed=DecoderOptions().seed,
            source_perplexity=round(before, 5),
            ways=found,
        )
        own.write(model.path)
    except (ModelError, RuntimeFailure) as error:  # a model that was made is kept, also if it was stopped here
        logger.warning("%s has no certificate: %s", model.name, error)
        return None
    return own


def certify_budget(
    decoder: Decoder, model: StoredModel, budget_percent: float, cancelled: Callable[[], bool] = never_cancelled
) -> Certificate | None:
    """Add what a budget buys to a model's certificate.

    Args:
        decoder: The loaded model, tuned to the budget.
        model: What was loaded.
        budget_percent: The slowdown budget.
        cancelled: Polled between steps.

    Returns:
        None where the model has no certificate, or its folder can't be written.

    Raises:
        Cancelled: `cancelled` said so.
    """
    reference, own, options = Reference.of(model), Certificate.read(model.path), decoder.options
    if reference is None or own is None or options.context < max(map(len, reference.windows)):
        return None
    prompts = options.prompt_k_chunk
    way = Way(kv=options.kv, k_chunk=options.k_chunk, prompt_k_chunk=prompts, budget_percent=budget_percent)
    own = own.bought(reference.measure(decoder, way, cancelled))
    try:
        own.write(model.path)
    except StoreError as error:
        logger.warning("%s", error)
        return None
    return own
