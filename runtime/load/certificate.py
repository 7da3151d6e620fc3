"""Measuring a stored model's certificate: the program's own decoder beside the distributions that its source had.

Prompts and decoded tokens are run as in a chat, but that many decoded tokens share a step, each compensated by its own
activations. What the default cache loses is measured likewise, beside an exact cache over the same weights: on answers
that the model gives over that one. Cheap to import.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np

from models.errors import ModelError, StoreError
from models.progress import Progress, ProgressCallback, ignore_progress, never_cancelled
from models.store import StoredModel
from models.store.certificate import CACHE_LIMIT, Certificate, Way
from models.store.layout import RECIPE, REFERENCE
from models.store.tensors import MappedTensors
from runtime.backends import AUTO
from runtime.backends.decoder import Decoder, DecoderOptions, KVKind, Step
from runtime.budget.profile_key import content_id
from runtime.compensation import Compensation
from runtime.errors import Cancelled, RequestError, RuntimeFailure
from runtime.kv.kinds import DEFAULT_KV, KINDS
from runtime.load.plan import LoadOptions, plan_load
from runtime.measure.evaluate import Int64Array, Window, negative_log_likelihood, scores
from runtime.text.divergence import Outline
from runtime.text.sampling import Sampler, SamplingOptions
from runtime.text.tokenizer import Tokenizer

_TENSORS = ("tokens", "lengths", "leaders", "log_probabilities")
_ROWS = 32
"""Most decoded tokens that share a step."""
_OUTLINED = 256
"""Most likely tokens of exact distributions that are compared; all others count as one."""
_ANSWERS, _LENGTH = 3, 384
"""Answers over which caches are compared, and their tokens, prompts included: what a window holds without its pages."""
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

    @classmethod
    def answers(
        cls, decoder: Decoder, text: Sequence[int], cancelled: Callable[[], bool] = never_cancelled
    ) -> Reference:
        """Answers to parts of a text, one in each slot, as long as the context allows, sampled from fixed seeds.

        Args:
            decoder: Its cache has a window, which holds all tokens: none is quantized.
            text: At least one token.
            cancelled: Polled between steps.

        Raises:
            InvalidActivationError: the model computed NaN or infinity.
            Cancelled: `cancelled` said so.
        """
        length, slots = decoder.options.context, np.arange(decoder.options.slots, dtype=np.int32)
        half, outlines = length // 2, list[Outline]()
        texts = np.zeros((len(slots), length), np.int64)
        texts[:, :half] = np.resize(np.asarray(text), len(slots) * half).reshape(len(slots), half)
        if text[0] == decoder.spec.bos_token_id:
            texts[:, 0] = text[0]
        samplers = [Sampler(SamplingOptions(temperature=1.0, top_p=1.0, seed=int(slot))) for slot in slots]
        with decoder.session():
            prompts = []
            for slot in range(len(slots)):
                decoder.cache.clear(slot)
                step = Step.of(texts[slot, :half], wanted=[half - 1], slot=slot, prefill=True, flush=False)
                prompts.append(decoder.forward(step).copy())
            logits = np.concatenate(prompts)
            for at in range(half, length):
                if cancelled():
                    raise Cancelled("the check of the cache was stopped")
                outlines.append(Outline.of(logits, _OUTLINED))
                texts[:, at] = [sampler.draw(row) for sampler, row in zip(samplers, logits, strict=True)]
                tokens, positions = texts[:, at].astype(np.int32), np.full(len(slots), at, np.int32)
                logits = decoder.forward(
                    Step(tokens=tokens, slots=slots, positions=positions, logit_rows=slots, flush=False)
                )
        of_slots = [Outline.joined([one.rows(slot, slot + 1) for one in outlines]) for slot in range(len(slots))]
        return cls(tuple(texts), Outline.joined(of_slots))

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
                message = f"measuring what {model.name} loses: {way.name}, {kv} cache"
                progress(Progress(phase="certify", done=len(found), total=len(ways), unit="ways", message=message))
                found.append(reference.measure(decoder, way, cancelled))
        finally:
            decoder.close()
    return tuple(found)


def cache_losses(
    model: StoredModel,
    text: str,
    *,
    backend: str = AUTO,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> tuple[Way, ...]:
    """What the default cache does to a model's answers, one of 8 bits if that is too much, and then one of 16.

    Exact answers are those over the default cache while its window holds all tokens: one decoder gives both.

    Returns:
        Empty where the model's context is too short for any page.

    Raises:
        RuntimeFailure: nothing can run it here, or it computes NaN.
        Cancelled: `cancelled` said so.
    """
    context = min(model.spec.max_context, _LENGTH)
    if not KINDS[DEFAULT_KV].max_pages(context):
        return ()
    message = f"comparing answers of {model.name} over the {DEFAULT_KV} cache with exact ones"
    report = partial(replace, phase="certify", message=message)
    asked = LoadOptions(kv=DEFAULT_KV, context=context, compensation=Compensation(k_chunk=0), backend=backend)
    plan = plan_load(model, asked)
    rows = _LENGTH - KINDS[DEFAULT_KV].window_capacity(0)
    plan = replace(plan, options=replace(plan.options, slots=_ANSWERS, pages=None, max_rows=rows))
    plan.prepare(lambda step: progress(report(step)))
    decoder = plan.open_decoder(lambda step: progress(report(step)))
    try:
        answers = Reference.answers(decoder, Tokenizer(model.tokenizer_path).encode(text), cancelled)
        found = [answers.measure(decoder, Way(kv=DEFAULT_KV, k_chunk=0), cancelled)]
    finally:
        decoder.close()
    for kv in ("int8", "fp16"):
        if found[-1].kl > CACHE_LIMIT:
            way = Way(kv=kv, k_chunk=0)
            found += measured(model, answers, [way], backend=backend, progress=progress, cancelled=cancelled)
    return tuple(found)


def certify(
    model: StoredModel,
    text: str | None = None,
    *,
    backend: str = AUTO,
    progress: ProgressCallback = ignore_progress,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Certificate | None:
    """Measure a new model's certificate and write it.

    Without compensation, with about what the default budget buys, and what its cache loses; of kept weights only that.

    Args:
        model: The stored model.
        text: What it continues to check its cache; None: that is not checked.
        backend: As in `LoadOptions`.
        progress: Receives reports.
        cancelled: Polled between steps.

    Returns:
        None where nothing can be measured, or `cancelled` said so; the log says why.
    """
    from models.quantize.quality import usual

    reference, before = Reference.of(model), model.info.summary.perplexity_before
    how: dict[str, Any] = {"backend": backend, "progress": progress, "cancelled": cancelled}
    own = Certificate(model=content_id(model), seed=DecoderOptions().seed, kept=model.recipe.kept)
    try:
        if reference is not None and before is not None:
            ways = [Way(kv="fp16", k_chunk=k_chunk) for k_chunk in sorted({0, usual(model.recipe)})]
            own = replace(
                own,
                text=json.loads((model.path / RECIPE).read_bytes())["texts"]["evaluation"]["sha256"],
                tokens=len(reference.outline.tokens),
                source_perplexity=round(before, 5),
                ways=measured(model, reference, ways, **how),
            )
        if text is not None:
            own = replace(own, caches=cache_losses(model, text, **how))
        if not (own.ways or own.caches or own.kept):
            return None
        own.write(model.path)
    except (ModelError, RuntimeFailure) as error:  # a model that was made is kept, also if it was stopped here
        logger.warning("%s has no certificate: %s", model.name, error)
        return None
    return own


def certify_budget(
    decoder: Decoder, model: StoredModel, budget_percent: float, cancelled: Callable[[], bool] = never_cancelled
) -> Certificate | None:
    """Add what a budget buys to a model's certificate.

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
