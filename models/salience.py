"""Which channels error compensation is expected to restore, and what base quantizers minimize therefore.

Compensation adds the residuals of the salient channels of every token. With x̃_k = x where a channel is not among the k
salient ones of 1024 and 0 where it is, what is left of a layer's output error is (W - Ŵ) x̃_k. k is not one number: a
prompt has none compensated (or all), a small budget buys a few channels, a large one many. A base that looks at x alone
moves errors into channels that are then restored, so that others stand alone; one that looks at x̃_k alone leaves the
largest channels unprotected, whose errors then meet every prompt and inflate the scales of all residuals of a row. So
base quantizers minimize the sum over a few k (`levels`) of the error that is left, each in units of what plain rounding
would leave: |(W - Ŵ) x̃_k|² summed over tokens and divided by |x̃_k|² summed over tokens, for the errors of plain
rounding have about the same size in every channel.

Tokens differ as well, the first of a text most of all: it has activations thousands of times the usual ones in a few
layers, small ones in others, and receives most of the attention of all tokens (an attention sink), so that its keys and
values are in every output. It is also rare. So a token counts as often as it is looked at, once by itself and then by
the attention that it receives. And what a layer adds to the residual stream counts against the stream's size at that
token, for the next norm divides by it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

CHUNK = 1024
"""Input channels of one search for salient ones (QDEC §4.3); the last chunk of a matrix may be narrower."""


def levels(expected: int) -> tuple[int, ...]:
    """The k_chunk that a model is made for, ascending: none, a quarter of what is expected, and all of it."""
    return tuple(sorted({0, -(-expected // 4), expected}))


def without_salient(x: FloatArray, k_chunk: int) -> FloatArray:
    """Activations without those that compensation would take care of.

    Args:
        x: float32 [T, K].
        k_chunk: Salient channels per 1024: so many of the largest magnitudes of each chunk become 0, a narrower chunk
            giving its share, rounded up. Equal magnitudes go together.

    Returns:
        float32 [T, K]; `x` itself where k_chunk is 0.
    """
    (left,) = without_each(x, (k_chunk,))
    return left


def without_each(x: FloatArray, k_chunks: tuple[int, ...]) -> list[FloatArray]:
    """`without_salient` for each of some k_chunk."""
    found = [np.empty_like(x) if k_chunk else x for k_chunk in k_chunks]
    for start in range(0, x.shape[1], CHUNK):
        part = x[:, start : start + CHUNK]
        magnitudes = np.abs(part)
        width = part.shape[1]
        ordered = np.sort(magnitudes, axis=1)  # faster than numpy's partition at more than one place
        for left, k_chunk in zip(found, k_chunks, strict=True):
            if k_chunk:
                place = width - -(-width * k_chunk // CHUNK)
                np.multiply(part, magnitudes < ordered[:, place, None], out=left[:, start : start + CHUNK])
    return found
