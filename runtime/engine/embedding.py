"""Text embeddings: the mean of a chat model's final hidden states.

Chat models are not trained for this; their vectors separate texts by subject, but coarsely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime.backends.decoder import Decoder, Float32Array, Step
from runtime.errors import Cancelled


def embed(decoder: Decoder, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Float32Array:
    """The embedding of a text.

    Args:
        decoder: The model; slot 0 is overwritten.
        tokens: At least one, at most the context.
        cancelled: Polled between steps.

    Returns:
        float32 [C], normalized: the mean over all tokens of the rows after the final norm.

    Raises:
        Cancelled: `cancelled` said so.
        InvalidActivationError: the model computed NaN or infinity.
    """
    total = np.zeros(decoder.spec.hidden_size, np.float64)
    for at in range(0, len(tokens), decoder.options.max_rows):
        if cancelled():
            raise Cancelled("the embedding was cancelled")
        part = tokens[at : at + decoder.options.max_rows]
        step = Step(
            tokens=np.array(part, np.int32),
            slots=np.zeros(len(part), np.int32),
            positions=np.arange(at, at + len(part), dtype=np.int32),
            logit_rows=np.empty(0, np.int32),
            prefill=True,
        )
        total += decoder.hidden(step).sum(axis=0, dtype=np.float64)
    return (total / np.linalg.norm(total)).astype(np.float32)
