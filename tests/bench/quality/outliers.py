"""Large input channels, token by token, and how many of them statistics predict (QDEC Fig. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.checkpoint import Checkpoint
from models.oracle import Oracle
from models.spec import LAYER_TYPES

STEPS = 100
"""Consecutive positions of the picture."""
SHARES = (0.01, 0.05)
"""Shares of the channels that count as outliers."""
_PICTURE = SHARES[1]
_CONTEXT = 200
_WINDOWS = 16
_STATISTICS_TOKENS = 8192

FloatArray = npt.NDArray[np.float32]


def mean_squares(checkpoint: Checkpoint, calibration: Sequence[int]) -> dict[str, FloatArray]:
    """Mean of x² of every linear layer's inputs over a calibration text, float32 [K] by layer.

    Args:
        checkpoint: The model.
        calibration: Tokens; 8192 of them are used, in sequences of 256.
    """
    sums: dict[str, npt.NDArray[np.float64]] = {}

    def observe(name: str, x: torch.Tensor) -> None:
        sums[name] = sums.get(name, 0.0) + np.square(x[0].float().numpy()).sum(0, dtype=np.float64)

    oracle = Oracle(checkpoint, observe=observe)
    length = min(256, checkpoint.spec.max_context)
    tokens = np.asarray(calibration[: min(_STATISTICS_TOKENS, len(calibration)) // length * length], np.int64)
    for start in range(0, tokens.size, length):
        oracle.logits(torch.from_numpy(tokens[None, start : start + length]))
    return {name: (found / tokens.size).astype(np.float32) for name, found in sums.items()}


def outliers(checkpoint: Checkpoint, text: Sequence[int], squares: dict[str, FloatArray]) -> dict[str, Any]:
    """The outliers of a text.

    Args:
        checkpoint: The model.
        text: Tokens of the evaluation text.
        squares: Result of `mean_squares` on the calibration text.

    Returns:
        JSON object: `layer` and `width` of the picture (a middle block's down projection), `channels` of the largest
        5 % by step, and `recall`: by layer type and share, how many of a step's outliers are among the channels of the
        largest mean squares, on average over steps and blocks.
    """
    layers = checkpoint.spec.num_layers
    layer = f"layers.{layers // 2}.down"
    steps: list[FloatArray] = []
    shares: dict[tuple[str, float], list[float]] = {}

    def observe(name: str, x: torch.Tensor) -> None:
        rows, kind = np.abs(x[0].float().numpy()), name.rsplit(".", 1)[-1]
        if name == layer and not steps:
            steps.append(rows[-STEPS:])
        for share in SHARES if kind in LAYER_TYPES else ():
            shares.setdefault((kind, share), []).append(_recall(rows, squares[name], share))

    oracle = Oracle(checkpoint, observe=observe)
    length = min(_CONTEXT, checkpoint.spec.max_context)
    tokens = np.asarray(text[: _WINDOWS * length], np.int64)
    for start in range(0, tokens.size - length + 1, length):
        oracle.logits(torch.from_numpy(tokens[None, start : start + length]), rows=[-1])
    recall = {
        kind: {f"{share:g}": round(float(np.mean(shares[kind, share])), 4) for share in SHARES} for kind in LAYER_TYPES
    }
    return {
        "layer": layer,
        "width": steps[0].shape[1],
        "channels": [sorted(map(int, row)) for row in _largest(steps[0], _PICTURE)],
        "recall": recall,
    }


def _largest(rows: FloatArray, share: float) -> npt.NDArray[np.int64]:
    """Channels of the largest entries of each row, [T, max(1, share of K)]."""
    count = max(1, round(share * rows.shape[-1]))
    return np.argpartition(-rows, count - 1, axis=-1)[..., :count]


def _recall(rows: FloatArray, squares: FloatArray, share: float) -> float:
    """Part of the outliers of all steps that are among the channels of the largest mean squares."""
    static = _largest(squares[None], share)[0]
    return float(np.isin(_largest(rows, share), static).mean())
