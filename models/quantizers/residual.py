"""The residual quantizer: symmetric, one scale for each output channel, found by a grid search.

Source: QDEC §4.2. The residual R = W - Ŵ of a fused matrix (q/k/v, gate/up) is quantized as one matrix; because a scale
belongs to one output channel, the result equals that of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.quantizers.groups import LARGEST_SCALE, FloatArray, to_fp16_scale
from models.quantizers.rows import each_chunk

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


def quantize_residual(residual: FloatArray, bits: int) -> ResidualCodes:
    """Quantize R to [-(2^(bits-1) - 1), 2^(bits-1) - 1] with the scale of least squared error in each row.

    Args:
        residual: float32 [N, K].
        bits: 2, 4 or 8. (Half precision needs no quantizer.)

    Raises:
        QuantizationError: a residual is NaN or infinite, or a scale would leave fp16's range.
    """
    rows, width = residual.shape
    half = 2 ** (bits - 1)
    result = ResidualCodes(codes=np.empty((rows, width), np.uint8), scales=np.empty(rows, np.float16), bits=bits)

    def work(chunk: slice) -> None:
        part = residual[chunk]
        scales = _search(part, half - 1)
        whole = _round(part, scales, half - 1, np.empty_like(part))
        whole += half
        result.codes[chunk] = whole
        result.scales[chunk] = scales

    each_chunk(rows, width, work)
    return result


def _search(rows: FloatArray, top: int) -> FloatArray:
    """Best scale of each row, float32 [N] holding fp16 numbers."""
    largest: FloatArray = np.abs(rows).max(1, initial=0.0)
    if not np.isfinite(largest).all():
        raise QuantizationError("the residuals hold NaN or infinity; the checkpoint is damaged")
    if largest.max(initial=0.0) / top > LARGEST_SCALE:
        raise QuantizationError(f"residuals reach {largest.max():.3g}, too far for fp16 scales")
    best_scale, best_error = np.empty_like(largest), np.full_like(largest, np.inf)
    trial = np.empty_like(rows)
    for point in range(GRID, 0, -1):
        scale = to_fp16_scale(largest * np.float32(point / GRID / top))
        _round(rows, scale, top, trial)
        trial *= scale[:, None]
        trial -= rows
        error = np.einsum("nk,nk->n", trial, trial)
        better = error < best_error
        best_error[better] = error[better]
        best_scale[better] = scale[better]
    return best_scale


def _round(rows: FloatArray, scale: FloatArray, top: int, out: FloatArray) -> FloatArray:
    """Whole multiples of each row's scale in [-top, top], into `out`."""
    np.multiply(rows, (1 / scale)[:, None], out=out)
    np.rint(out, out=out)
    np.maximum(out, -top, out=out)
    np.minimum(out, top, out=out)
    return out
