"""The channels that error compensation is expected to restore, and the error that base quantizers minimize for them.

Compensation adds the residuals of each token's salient channels. Let x̃_k be x with the k salient channels of every 1024
set to 0. The remaining output error of a layer is (W - Ŵ) x̃_k. There is no single k: a prompt has no channel
compensated (or all), a small budget allows a few channels, a large one many. A base quantizer that minimizes the error
for x alone moves errors into channels that are later restored. One that minimizes it for x̃_k alone leaves the largest
channels unprotected; their errors then affect every prompt and inflate the scales of all residuals in a row. So base
quantizers minimize the sum over a few k (`levels`) of the remaining error, each relative to that of plain rounding:
|(W - Ŵ) x̃_k|² summed over tokens and divided by |x̃_k|² summed over tokens, because the errors of plain rounding have
about the same size in every channel.

Tokens differ as well, most of all the first one of a text. Its activations are thousands of times larger than usual in
a few layers and small in others, and it receives most of the attention (an attention sink), so that its keys and values
affect every output. It is also rare. So a token's weight is 1 plus the attention that it receives. A layer's
contribution to the residual stream is weighted relative to the stream's size at that token, because the next norm
divides by it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

CHUNK = 1024
"""Input channels of one search for salient ones (QDEC §4.3); the last chunk of a matrix may be narrower."""


def levels(expected: int) -> tuple[int, ...]:
    """The k_chunk for which a model is optimized, ascending: 0, a quarter of the expected one, and all of it."""
    return tuple(sorted({0, -(-expected // 4), expected}))


def without_salient(x: FloatArray, k_chunk: int) -> FloatArray:
    """Activations with the channels set to 0 that compensation would restore.

    Args:
        x: float32 [T, K].
        k_chunk: Salient channels per 1024: this many of the largest magnitudes of each chunk become 0, and of a
            narrower chunk its share, rounded up. Equal magnitudes are treated alike.

    Returns:
        float32 [T, K]; `x` itself where k_chunk is 0.
    """
    (left,) = without_each(x, (k_chunk,))
    return left


def without_each(x: FloatArray, k_chunks: tuple[int, ...], ordered: FloatArray | None = None) -> list[FloatArray]:
    """`without_salient` for each of some k_chunk.

    Args:
        x: float32 [T, K].
        k_chunks: Salient channels per 1024, each as there.
        ordered: |x| float32 [T, K] with every row ascending, where that is known: a narrow matrix need not sort again.
    """
    if x.shape[1] > CHUNK:
        ordered = None
    found = [np.empty_like(x) if k_chunk else x for k_chunk in k_chunks]
    for start in range(0, x.shape[1], CHUNK):
        part = x[:, start : start + CHUNK]
        magnitudes = np.abs(part)
        width = part.shape[1]
        # Sorting is faster than numpy's partition at more than one place.
        sizes = np.sort(magnitudes, axis=1) if ordered is None else ordered
        for left, k_chunk in zip(found, k_chunks, strict=True):
            if k_chunk:
                place = width - -(-width * k_chunk // CHUNK)
                np.multiply(part, magnitudes < sizes[:, place, None], out=left[:, start : start + CHUNK])
    return found
