"""Sensitivity of a layer's cache: what drafts lose when they read its pages at 4 bits and those of all others at 8.

Source: QuantSpec, Algorithm 1 (L_S sensitive layers, whose cache the draft reads as the target does; the paper does not
say how they are found).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from models.progress import never_cancelled
from runtime.backends.decoder import Decoder, Step
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
    found = sensitivities(decoder, tokens, cancelled=cancelled)
    order = sorted(range(layers), key=lambda layer: (-found[layer], layer))
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
