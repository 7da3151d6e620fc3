"""Statistics of a linear layer's input over calibration tokens: what salient-channel selection needs to know.

Source: QDEC §4.3 (Fig. 9) for the rank maxima, §3.3 and Fig. 16 for the mean square.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models.errors import QuantizationError

_CHUNK = 1 << 22


@dataclass(slots=True)
class InputStatistics:
    """Running statistics of the inputs x [T, K] of one linear layer."""

    rank_maximum: torch.Tensor
    """float32 [K]: for every rank r the maximum over tokens of the r-th largest |x|, descending."""
    square_sum: torch.Tensor
    """float64 [K]: sum of x² over tokens."""
    tokens: int = 0
    """Tokens seen."""

    @classmethod
    def empty(cls, width: int) -> InputStatistics:
        """Statistics of no tokens, for K = width channels."""
        return cls(torch.zeros(width, dtype=torch.float32), torch.zeros(width, dtype=torch.float64))

    def add(self, x: torch.Tensor, name: str) -> None:
        """Take in activations.

        Args:
            x: [..., K], any floating-point dtype.
            name: The linear layer, for the error.

        Raises:
            QuantizationError: an activation is NaN or infinite.
        """
        rows = x.reshape(-1, x.shape[-1])
        step = max(1, _CHUNK // max(1, x.shape[-1]))
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step].to(torch.float32).abs()
            if not torch.isfinite(part).all():
                raise QuantizationError(
                    f"the full-precision model computes NaN or infinity before {name}; the checkpoint is damaged, or "
                    "its numbers leave the range of its format"
                )
            ranked = part.sort(dim=1, descending=True).values.amax(0)
            self.rank_maximum = torch.maximum(self.rank_maximum, ranked)
            self.square_sum += part.square_().sum(0, dtype=torch.float64)
            self.tokens += part.shape[0]

    def mean_square(self) -> npt.NDArray[np.float32]:
        """float32 [K]: mean of x² over tokens."""
        mean: npt.NDArray[np.float32] = (self.square_sum / max(1, self.tokens)).to(torch.float32).numpy()
        return mean

    def ranks(self) -> npt.NDArray[np.float32]:
        """`rank_maximum` as an array."""
        ranks: npt.NDArray[np.float32] = self.rank_maximum.numpy()
        return ranks
