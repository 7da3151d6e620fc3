"""Statistics of a linear layer's input over calibration tokens: what salient-channel selection needs to know.

Source: QDEC §4.3 (Fig. 9) for the rank maxima, §3.3 and Fig. 16 for the mean square; Frantar et al. 2023 (OPTQ) for the
Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.salience import FloatArray, without_salient

_CHUNK = 1 << 22


@dataclass(slots=True)
class InputStatistics:
    """Running statistics of the inputs x [T, K] of one linear layer."""

    rank_maximum: FloatArray
    """float32 [K]: for every rank r the maximum over tokens of the r-th largest |x|, descending."""
    square_sum: npt.NDArray[np.float64]
    """float64 [K]: sum of x² over tokens."""
    magnitude_sum: npt.NDArray[np.float64]
    """float64 [K]: sum of |x| over tokens."""
    hessian: FloatArray | None = None
    """float32 [K, K]: sum of x xᵀ over tokens, the Hessian of the layer's squared output error but for a factor; of x
    without its salient channels where compensation is expected."""
    expected_k_chunk: int = 0
    """Salient channels per 1024 that the Hessian leaves out, see `models.salience`."""
    tokens: int = 0
    """Tokens seen."""

    @classmethod
    def empty(cls, width: int, *, second_moments: bool = False, expected_k_chunk: int = 0) -> InputStatistics:
        """Statistics of no tokens.

        Args:
            width: K.
            second_moments: Whether to gather the Hessian too, 4 K² bytes.
            expected_k_chunk: Salient channels per 1024 that it leaves out.
        """
        hessian = np.zeros((width, width), np.float32) if second_moments else None
        return cls(
            rank_maximum=np.zeros(width, np.float32),
            square_sum=np.zeros(width, np.float64),
            magnitude_sum=np.zeros(width, np.float64),
            hessian=hessian,
            expected_k_chunk=expected_k_chunk,
        )

    def add(self, x: FloatArray, name: str) -> None:
        """Take in activations.

        Args:
            x: float32 [..., K].
            name: The linear layer, for the error.

        Raises:
            QuantizationError: an activation is NaN or infinite.
        """
        rows = x.reshape(-1, x.shape[-1])
        step = max(1, _CHUNK // max(1, x.shape[-1]))
        for start in range(0, rows.shape[0], step):
            part = np.abs(rows[start : start + step])
            magnitude = part.sum(0, dtype=np.float64)
            part.sort(axis=1)
            if not np.isfinite(part[:, -1]).all():  # NaN sorts behind everything
                raise QuantizationError(
                    f"the full-precision model computes NaN or infinity before {name}; the checkpoint is damaged, or "
                    "its numbers leave the range of its format"
                )
            self.rank_maximum = np.maximum(self.rank_maximum, part.max(0)[::-1])
            self.magnitude_sum += magnitude
            self.square_sum += np.square(rows[start : start + step]).sum(0, dtype=np.float64)
            if self.hessian is not None:
                left = without_salient(rows[start : start + step], self.expected_k_chunk)
                self.hessian += left.T @ left
            self.tokens += part.shape[0]

    def mean_square(self) -> FloatArray:
        """float32 [K]: mean of x² over tokens."""
        return (self.square_sum / max(1, self.tokens)).astype(np.float32)

    def mean_magnitude(self) -> FloatArray:
        """float32 [K]: mean of |x| over tokens."""
        return (self.magnitude_sum / max(1, self.tokens)).astype(np.float32)
