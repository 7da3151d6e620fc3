"""Which input channels are large, token by token, and how many of them statistics know beforehand (QDEC Fig. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.calibration import InputStatistics
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
    found: dict[str, InputStatistics] = {}

    def observe(name: str, x: torch.Tensor) -> None:
        if name not in found:
            found[name] = InputStatistics.empty(x.shape[-1])
        found[name].add(x.float().numpy(), name)

    oracle = Oracle(checkpoint, observe=observe)
    length = min(256, checkpoint.spec.max_context)
    tokens = np.asarray(calibration[: _STATISTICS_TOKENS // length * length], np.int64)
    for start in range(0, tokens.size - length + 1, length):
        oracle.logits(torch.from_numpy(tokens[None, start : start + length]))
    return {name: statistics.mean_square() for name, statistics in found.items()}


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
    seen: dict[str, list[FloatArray]] = {}
    oracle = Oracle(checkpoint, observe=lambda name, x: seen.setdefault(name, []).append(np.abs(x[0].float().numpy())))
    length = min(_CONTEXT, checkpoint.spec.max_context)
    tokens = np.asarray(text[: _WINDOWS * length], np.int64)
    for start in range(0, tokens.size - length + 1, length):
        oracle.logits(torch.from_numpy(tokens[None, start : start + length]))
    layers = checkpoint.spec.num_layers
    layer = f"layers.{layers // 2}.down"
    picture = seen[layer][0][-STEPS:]
    recall = {
        kind: {
            f"{share:g}": round(
                float(
                    np.mean(
                        [
                            _recall(seen[f"layers.{i}.{kind}"], squares[f"layers.{i}.{kind}"], share)
                            for i in range(layers)
                        ]
                    )
                ),
                4,
            )
            for share in SHARES
        }
        for kind in LAYER_TYPES
    }
    return {
        "layer": layer,
        "width": picture.shape[1],
        "channels": [sorted(map(int, row)) for row in _largest(picture, _PICTURE)],
        "recall": recall,
    }


def _largest(rows: FloatArray, share: float) -> npt.NDArray[np.int64]:
    """Channels of the largest entries of each row, [T, max(1, share of K)]."""
    count = max(1, round(share * rows.shape[-1]))
    return np.argpartition(-rows, count - 1, axis=-1)[..., :count]


def _recall(rows: list[FloatArray], squares: FloatArray, share: float) -> float:
    """Part of the outliers of all steps that are among the channels of the largest mean squares."""
    static = _largest(squares[None], share)[0]
    return float(np.isin(_largest(np.concatenate(rows), share), static).mean())
