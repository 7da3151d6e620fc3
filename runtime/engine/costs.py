"""Costs of speculation, measured when a model starts it: step durations, and the layers that drafts are sensitive to.

The sensitivity of a layer's cache is what drafts lose when they read its pages at 4 bits and those of all others at 8.

Source: QuantSpec, Algorithm 1 (L_S sensitive layers, whose cache the draft reads as the target does; the paper does not
say how they are found).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from models.progress import never_cancelled
from runtime.backends.decoder import Decoder, PredictsFurther, Step
from runtime.drafting import Drafts, Speculate
from runtime.engine.engine import Engine
from runtime.engine.gamma import MAX_SEARCHED, Costs, break_even
from runtime.errors import Cancelled, RequestError
from runtime.kv.kinds import KINDS
from runtime.text.divergence import Outline

TOKENS = 640
"""Tokens of the text at most; all but the last `ROWS` are read before the drafts, and lie in pages as far as the kind
allows."""
ROWS = 64
"""Draft rows whose distributions are compared, at most."""
OUTLINED = 256
"""Tokens of a distribution that are told apart."""
_FIRST = 8
"""Position of the timed rows."""
MIN_CONTEXT = _FIRST + MAX_SEARCHED + 1
"""Positions a decoder needs for the timings."""
_REPEATS, _SECONDS = 7, 1.5
"""Rounds of timings, and the time limit in seconds after which no further round begins."""
logger = logging.getLogger(__name__)


def most_sensitive(
    decoder: Decoder, tokens: Sequence[int], count: int, *, cancelled: Callable[[], bool] = never_cancelled
) -> tuple[int, ...]:
    """The layers whose cache matters most to drafts, in ascending order.

    Args:
        decoder: A loaded model; slot 0 of its cache is overwritten. Its sensitive layers are left as they are.
        tokens: A text.
        count: Number of layers; all of them, or none, are not measured.
        cancelled: Polled between steps.

    Raises:
        RequestError: the kind of cache has no draft, the model has fewer layers, or text or context are too short.
        Cancelled: `cancelled` said so.
    """
    layers = decoder.spec.num_layers
    if count > layers:
        raise RequestError(f"{count} sensitive layers were asked for, but the model has {layers}")
    if count in (0, layers):
        return tuple(range(count))
    losses = sensitivities(decoder, tokens, cancelled=cancelled)
    order = sorted(range(layers), key=lambda layer: (-losses[layer], layer))
    return tuple(sorted(order[:count]))


def sensitivities(
    decoder: Decoder, tokens: Sequence[int], *, cancelled: Callable[[], bool] = never_cancelled
) -> list[float]:
    """Divergence of drafts that read one layer's pages at 4 bits from drafts that read all at 8, by layer.

    Args:
        decoder: A loaded model; slot 0 of its cache is overwritten. Its sensitive layers are left as they are.
        tokens: A text.
        cancelled: Polled between steps.

    Returns:
        Kullback-Leibler divergence in nats per token, for each layer.

    Raises:
        RequestError: the kind of cache has no draft, or text or context are too short to fill a page.
        Cancelled: `cancelled` said so.
    """
    kind, options = KINDS[decoder.options.kv], decoder.options
    text = list(tokens[: min(TOKENS, options.context)])
    rows = min(ROWS, options.max_rows)
    before = len(text) - rows
    if not kind.has_draft:
        raise RequestError(f"the cache {kind.name} has one precision only, so no layer is sensitive to the draft's")
    if kind.stored_pages(before) < 1:
        raise RequestError(
            f"sensitive layers are found on {kind.unpaged + kind.page + rows} tokens of text at least, and there are "
            f"{len(text)}: use a longer context, or no sensitive layers"
        )

    def drafted(exact: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        if cancelled():
            raise Cancelled("the measurement was stopped")
        decoder.set_sensitive_layers(exact)
        return decoder.forward(Step.of(text[before:], before, draft=True))

    layers = range(decoder.spec.num_layers)
    try:
        with decoder.session():
            for start in range(0, before, options.max_rows):
                if cancelled():
                    raise Cancelled("the measurement was stopped")
                decoder.forward(Step.of(text[start : min(start + options.max_rows, before)], start, [], prefill=True))
            reference = Outline.of(drafted(layers), OUTLINED)
            return [reference.divergence(drafted([i for i in layers if i != one])) / rows for one in layers]
    finally:
        decoder.set_sensitive_layers(options.sensitive_layers)


def start(
    engine: Engine,
    wanted: Drafts,
    *,
    text: Callable[[], Sequence[int]] = list,
    cancelled: Callable[[], bool] = never_cancelled,
) -> None:
    """Turn an engine's speculation on or off. Call again whenever its compensation changes.

    Args:
        engine: A loaded model.
        wanted: The request. None: drafts are only copied, as for a `Speculate` with a cache that has no draft; or made
            by the block that predicts further tokens, if it is loaded and can pay; or by low-bit weights where the
            target has the source's own.
        text: Gives the tokens on which sensitive layers are found, if there are to be any.
        cancelled: Polled between timings.

    Raises:
        RequestError: the context is too short to time steps in, or text or context to find sensitive layers.
        Cancelled: `cancelled` said so.
    """
    costs: int | Costs | None = None
    exact = engine.decoder.options.exact is not None
    if wanted is None and exact:
        wanted = Speculate()
    block = engine.decoder.mtp if isinstance(engine.decoder, PredictsFurther) else None
    if wanted is not False and block is not None:
        with engine.borrow(MIN_CONTEXT) as decoder:
            costs = (wanted and wanted.gamma) or measure_costs(decoder, block=block, cancelled=cancelled)
        if isinstance(costs, int) or break_even(costs) is not None:
            engine.speculate(costs, mtp=True)
            return
        costs = None
    if wanted:
        with engine.borrow(TOKENS if wanted.sensitive_layers else MIN_CONTEXT) as decoder:
            has_draft = KINDS[decoder.options.kv].has_draft
            if has_draft:
                _read_exactly(decoder, wanted.sensitive_layers, text, cancelled)
            if has_draft or exact:
                costs = wanted.gamma or measure_costs(decoder, cancelled=cancelled)
    engine.speculate(costs, copied=wanted is not False)


def _read_exactly(
    decoder: Decoder, count: int, text: Callable[[], Sequence[int]], cancelled: Callable[[], bool]
) -> None:
    """Let drafts read so many layers as the target does: the most sensitive ones."""
    if len(decoder.options.sensitive_layers) != count:
        layers = most_sensitive(decoder, text() if count else (), count, cancelled=cancelled)
        decoder.set_sensitive_layers(layers)
        logger.info("drafts read the cache of layers %s as the target does", ", ".join(map(str, layers)) or "(none)")


def measure_costs(
    decoder: Decoder,
    *,
    position: int = _FIRST,
    block: Decoder | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Costs:
    """Time a plain step, a draft step, and verifications, interleaved; the fastest of each counts.

    Args:
        decoder: A loaded model; slot 0 is overwritten from the position on.
        position: Position of the first row. The tokens before it are in the cache, or are written there if it is the
            default.
        block: What drafts in place of the decoder, from position 0 of its slot 0 on.
        cancelled: Polled between timings.

    Raises:
        RequestError: the context is too short.
        Cancelled: `cancelled` said so.
    """
    most = min(MAX_SEARCHED + 1, decoder.options.max_rows)
    if position + most > decoder.options.context or most < 2:
        raise RequestError(
            f"speculation needs a context of {position + most} tokens at least and steps of 2 rows, and this model has "
            f"{decoder.options.context} and {decoder.options.max_rows}: use a longer context, or no speculation"
        )
    rows = range(2, most + 1)
    seconds: dict[int, list[float]] = {count: [] for count in (0, 1, *rows)}
    with decoder.session():
        if position == _FIRST:
            _timed(decoder, 0, _FIRST, prefill=True)
        end = time.perf_counter() + _SECONDS
        for repeat in range(_REPEATS):
            for count in seconds:
                if cancelled():
                    raise Cancelled("the measurement was stopped")
                if count == 0 and block is not None:
                    seconds[count].append(_timed(block, 0, 1, draft=True))
                else:
                    seconds[count].append(_timed(decoder, position, max(1, count), draft=count == 0))
            if repeat and time.perf_counter() > end:
                break
    fastest = {count: min(times) for count, times in seconds.items()}
    return Costs(plain=fastest[1], draft=fastest[0], verify=[fastest[count] for count in rows])


def _timed(decoder: Decoder, start: int, count: int, *, draft: bool = False, prefill: bool = False) -> float:
    """Seconds of a step of `count` rows from a position on, computing all their logits."""
    positions = np.arange(start, start + count, dtype=np.int32)
    C, joins = decoder.spec.hidden_size, decoder.spec.joins
    stream = np.ones((count, C), np.float32) if joins else None
    tokens = (7919 * positions + 17) % decoder.spec.vocab_size
    step = Step.of(tokens, start, stream=stream, draft=draft, prefill=prefill)
    began = time.perf_counter()
    decoder.forward(step)
    return time.perf_counter() - began
