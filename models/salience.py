"""Which channels error compensation is expected to restore: what base quantizers leave out of their errors.

Compensation adds the residuals of the salient channels of every token, so what is left of a layer's output error is
that of the other channels: with x̃ = x where channel k is not selected and 0 where it is, (W - Ŵ) x̃ instead of
(W - Ŵ) x. A base quantizer that minimizes the error over x spends its freedom on channels that need none, and what it
takes from others for their sake (GPTQ's feedback) is in the way once they are restored. Minimizing it over x̃ gives the
best base for compensated inference; the statistics differ, nothing else does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

CHUNK = 1024
"""Input channels of one search for salient ones (QDEC §4.3); the last chunk of a matrix may be narrower."""


def without_salient(x: FloatArray, k_chunk: int) -> FloatArray:
    """Activations without those that compensation would take care of.

    Args:
        x: float32 [T, K].
        k_chunk: Salient channels per 1024: so many of the largest magnitudes of each chunk become 0, a narrower chunk
            giving its share, rounded up. Equal magnitudes go together.

    Returns:
        float32 [T, K]; `x` itself where k_chunk is 0.
    """
    if k_chunk == 0:
        return x
    left = x.copy()
    for start in range(0, x.shape[1], CHUNK):
        part = np.abs(x[:, start : start + CHUNK])
        width = part.shape[1]
        count = -(-width * k_chunk // CHUNK)
        border = np.partition(part, width - count, axis=1)[:, width - count, None]
        left[:, start : start + CHUNK][part >= border] = 0
    return left
