"""Embeddings: a text as a vector, the mean of what the model makes of its tokens.

Chat models are not trained for it; their vectors tell texts of one subject from others, coarsely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime.backends.decoder import Decoder, Float32Array, Step
from runtime.errors import Cancelled


def embed(decoder: Decoder, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Float32Array:
    """The embedding of a text.

    Args:
        decoder: Whose slot 0 may be overwritten.
        tokens: At least one, and no more than the context holds.
        cancelled: Asked between steps.

    Returns:
        float32 [C] of length 1: the mean over all tokens of the rows behind the final norm.

    Raises:
        Cancelled: `cancelled` said so.
        InvalidActivationError: the model's numbers broke down.
    """
    total = np.zeros(decoder.spec.hidden_size, np.float64)
    for at in range(0, len(tokens), decoder.options.max_rows):
        if cancelled():
            raise Cancelled("the embedding was asked to stop")
        part = tokens[at : at + decoder.options.max_rows]
        total += decoder.hidden(Step.of(part, at, [], prefill=True)).sum(axis=0, dtype=np.float64)
    return (total / np.linalg.norm(total)).astype(np.float32)
