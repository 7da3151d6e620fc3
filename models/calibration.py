"""Statistics of a linear layer's input over calibration tokens, for quantizers and the choice of salient channels.

Source: QDEC §4.3 (Fig. 9) for the rank maxima, §3.3 and Fig. 16 for the mean square; Frantar et al. 2023 (OPTQ) for the
Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.salience import FloatArray, levels, without_each
from models.threads import each

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 19
"""Activations processed at a time per thread."""
_HESSIAN_ROWS = 256
"""Rows of second moments computed at a time, right of the diagonal; the rest follows from symmetry."""
_RESTORED_FLOOR = np.float32(0.1)
"""Added to every channel's restored share, in units of the mean, because other texts restore other channels."""


@dataclass(slots=True)
class InputStatistics:
    """Running statistics of the inputs x [T, K] of one linear layer."""

    rank_maximum: FloatArray
    """float32 [K]: for every rank r the maximum over tokens of the r-th largest |x|, descending."""
    square_sum: npt.NDArray[np.float64]
    """float64 [K]: sum of x² over tokens."""
    restored_sum: npt.NDArray[np.float64]
    """float64 [K]: sum of x² over the tokens at which the channel is among those expected to be restored."""
    moments: FloatArray | None = None
    """float32 [K, K]: what `hessian` is right of the diagonal, and in blocks on it; None if it is not gathered."""
    products: torch.dtype | None = None
    """Of the products that are summed up there; None: float32."""
    expected_k_chunk: int = 0
    """Salient channels per 1024 that compensation is expected to restore."""
    shares: tuple[float, ...] | None = None
    """The weight of each level in the Hessian; found from the first tokens."""
    tokens: int = 0
    """Tokens seen."""

    @classmethod
    def empty(
        cls,
        width: int,
        *,
        second_moments: bool = False,
        products: torch.dtype | None = None,
        expected_k_chunk: int = 0,
    ) -> InputStatistics:
        """Statistics of no tokens.

        Args:
            width: K.
            second_moments: Whether to gather the Hessian too, 4 K² bytes.
            products: As the field.
            expected_k_chunk: Salient channels per 1024 that compensation is expected to restore.
        """
        return cls(
            rank_maximum=np.zeros(width, np.float32),
            square_sum=np.zeros(width, np.float64),
            restored_sum=np.zeros(width, np.float64),
            moments=np.zeros((width, width), np.float32) if second_moments else None,
            products=products,
            expected_k_chunk=expected_k_chunk,
        )

    def add(self, x: FloatArray, name: str, counts: FloatArray | None = None) -> None:
        """Add activations.

        Args:
            x: float32 [..., K].
            name: The linear layer, for the error.
            counts: float32 [...], not negative: the weight of a squared error at each token, for the Hessian and for
                restored channels; None for equal weights.

        Raises:
            QuantizationError: an activation is NaN or infinite.
        """
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
        step = max(1, _CHUNK // max(1, rows.shape[1]))
        parts = [slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]
        k_chunks = levels(self.expected_k_chunk)
        if self.moments is None:  # what is restored is all that is asked for
            k_chunks = tuple(sorted({0, self.expected_k_chunk}))
        weights = None if counts is None else np.sqrt(counts.reshape(-1))

        def look(part: slice) -> tuple[FloatArray, npt.NDArray[np.float64], list[FloatArray]]:
            own = rows[part]
            magnitudes = np.abs(own)
            magnitudes.sort(axis=1)
            squares = np.einsum("tk,tk->k", own, own).astype(np.float64)
            left = without_each(own, k_chunks, magnitudes) if self.expected_k_chunk or self.moments is not None else []
            if weights is not None:
                left = [level * weights[part, None] for level in left]
            return magnitudes.max(0)[::-1], squares, left

        pieces: list[list[FloatArray]] = []
        for part, (maximum, squares, left) in zip(parts, each(look, parts), strict=True):
            if not np.isfinite(maximum[0]):  # NaN sorts last
                raise QuantizationError(
                    f"the full-precision model computes NaN or infinity before {name}; the checkpoint is damaged, "
                    "or its values exceed the range of its format"
                )
            np.maximum(self.rank_maximum, maximum, out=self.rank_maximum)
            self.square_sum += squares
            pieces.append(left)
            self.tokens += part.stop - part.start
        if pieces and pieces[0]:
            # One level at a time, so that little more than one is in memory twice.
            self._add_left([np.concatenate([piece.pop(0) for piece in pieces]) for _ in k_chunks])

    def _add_left(self, left: list[FloatArray]) -> None:
        """Add the activations float32 [t, K] that remain at each level; the first level keeps all."""
        energies = [np.einsum("tk,tk->k", level, level).astype(np.float64) for level in left]
        self.restored_sum += energies[0] - energies[-1]
        if self.moments is None:
            return
        if self.shares is None:
            totals = [float(energy.sum()) for energy in energies]
            self.shares = tuple(totals[0] / total if total > 0 else 0.0 for total in totals)
        import torch

        moments = torch.from_numpy(self.moments)
        operands = [torch.from_numpy(level).to(self.products or torch.float32) for level in left]
        for start in range(0, len(moments), _HESSIAN_ROWS):
            rows = slice(start, start + _HESSIAN_ROWS)
            for x, share in zip(operands, self.shares, strict=True):
                moments[rows, start:].add_(x[:, rows].T @ x[:, start:], alpha=share)

    @property
    def hessian(self) -> FloatArray | None:
        """float32 [K, K]: second moments of x and of x without its salient channels, see `models.salience`.

        It is the Hessian of what base quantizers minimize, but for a factor.
        """
        if self.moments is not None:
            for start in range(0, len(self.moments), _HESSIAN_ROWS):
                end = start + _HESSIAN_ROWS
                self.moments[end:, start:end] = self.moments[start:end, end:].T
        return self.moments

    def mean_square(self) -> FloatArray:
        """float32 [K]: mean of x² over tokens."""
        return (self.square_sum / max(1, self.tokens)).astype(np.float32)

    def restored(self) -> FloatArray | None:
        """float32 [K]: expected restored share of each channel, 1 on average; None if nothing is restored."""
        mean = self.restored_sum.mean() if len(self.restored_sum) else 0.0
        if not mean > 0:
            return None
        found: FloatArray = (self.restored_sum / mean).astype(np.float32)
        return found + _RESTORED_FLOOR
