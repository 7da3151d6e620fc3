"""Constants of GEAR's low-rank power iteration, shared by all backends. Does not import torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ITERATIONS = 12
"""Rounds of the power iteration. Rounding errors have a flat spectrum: with 64 channels, 4 rounds come within 2 % of
the SVD's error and 8 within 1 %; with 8 channels, within 9 % and 6 %, 4 % and 1 % on average."""


def start(head_dim: int, rank: int) -> npt.NDArray[np.float32]:
    """The start matrix of the iteration: normally distributed, always the same.

    Args:
        head_dim: D.
        rank: r.

    Returns:
        float32 [D, r].
    """
    return np.random.RandomState(0).standard_normal((head_dim, rank)).astype(np.float32)
