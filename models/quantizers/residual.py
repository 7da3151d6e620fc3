"""The residual quantizer: symmetric, one scale for each output channel, found by a grid search.

A column counts by what compensation is expected to restore of it: a few large residuals in columns that are never
chosen would otherwise widen the scale of those that are chosen always.

Source: QDEC §4.2. The residual R = W - Ŵ of a fused matrix (q/k/v, gate/up) is quantized as one matrix; because a scale
belongs to one output channel, the result equals that of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.quantizers.groups import LARGEST_SCALE, FloatArray
from models.threads import each_chunk

GRID = 32
"""Scales tried for each output channel, absmax / top / 32 to absmax / top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualCodes:
    """R[n, k] = (codes[n, k] - 2^(bits - 1)) * scales[n]."""

    codes: npt.NDArray[np.uint8]
    """uint8 [N, K], from 1 to 2^bits - 1."""
    scales: npt.NDArray[np.float16]
    """float16 [N], positive."""
    bits: int
    """2, 4 or 8."""

    def dequantize(self) -> FloatArray:
        """R as float32 [N, K]."""
        values = self.codes.astype(np.float32)
        values -= 2 ** (self.bits - 1)
        values *= self.scales[:, None].astype(np.float32)
        return values


def quantize_residual(residual: FloatArray, bits: int, importance: FloatArray | None = None) -> ResidualCodes:
    """Quantize R to [-(2^(bits-1) - 1), 2^(bits-1) - 1] with the scale of least weighted squared error in each row.

    Args:
        residual: float32 [N, K].
        bits: 2, 4 or 8. (Half precision needs no quantizer.)
        importance: float32 [K]: what a squared error of each column counts; None: all alike.
    """
    from models.quantizers.compiled import search_rows

    rows, width = residual.shape
    top = 2 ** (bits - 1) - 1
    counts = np.ones(width, np.float32) if importance is None else importance
    codes, scales = np.empty((rows, width), np.uint8), np.empty(rows, np.float32)

    def work(chunk: slice) -> None:
        part = np.ascontiguousarray(residual[chunk])
        _check_range(part, top)
        search_rows(part, counts, np.float32(top), GRID, scales[chunk], codes[chunk])

    each_chunk(rows, width, work)
    return ResidualCodes(codes=codes, scales=scales.astype(np.float16), bits=bits)


def _check_range(rows: FloatArray, top: int) -> None:
    """Raise a `QuantizationError` where a residual is NaN or infinite, or a scale would leave fp16's range."""
    largest = max(float(rows.max(initial=0.0)), -float(rows.min(initial=0.0)))
    if not np.isfinite(largest):
        raise QuantizationError("the residuals hold NaN or infinity; the checkpoint is damaged")
    if largest / top > LARGEST_SCALE:
        raise QuantizationError(f"residuals reach {largest:.3g}, too far for fp16 scales")
