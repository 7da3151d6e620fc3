"""The residual quantizer: symmetric, one scale for each output channel, found by a grid search.

Source: QDEC §4.2. The residual R = W - Ŵ of a fused matrix (q/k/v, gate/up) is quantized as one matrix; because a scale
belongs to one output channel, the result equals that of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.errors import QuantizationError
from models.quantizers.groups import SMALLEST_SCALE

GRID = 32
"""Scales tried for each output channel, absmax / top / 32 to absmax / top."""
_CHUNK = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualCodes:
    """R[n, k] = (codes[n, k] - 2^(bits - 1)) * scales[n]."""

    codes: torch.Tensor
    """uint8 [N, K], from 1 to 2^bits - 1."""
    scales: torch.Tensor
    """float16 [N], positive."""
    bits: int
    """2, 4 or 8."""

    def dequantize(self) -> torch.Tensor:
        """R as float32 [N, K]."""
        values = self.codes.to(torch.float32).sub_(2 ** (self.bits - 1))
        return values.mul_(self.scales[:, None].to(torch.float32))


def quantize_residual(residual: torch.Tensor, bits: int) -> ResidualCodes:
    """Quantize R to [-(2^(bits-1) - 1), 2^(bits-1) - 1] with the scale of least squared error in each row.

    Args:
        residual: float32 [N, K].
        bits: 2, 4 or 8. (Half precision needs no quantizer.)

    Raises:
        QuantizationError: a residual is NaN or infinite, or a scale would leave fp16's range.
    """
    rows, width = residual.shape
    half = 2 ** (bits - 1)
    codes = torch.empty(rows, width, dtype=torch.uint8)
    scales = torch.empty(rows, dtype=torch.float16)
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        part = residual[chunk]
        best = _search(part, half - 1)
        whole = (part / best[:, None]).round_().clamp_(1 - half, half - 1)
        codes[chunk] = (whole + half).to(torch.uint8)
        scales[chunk] = best.to(torch.float16)
    return ResidualCodes(codes=codes, scales=scales, bits=bits)


def _search(rows: torch.Tensor, top: int) -> torch.Tensor:
    """Best scale of each row, float32 [N] holding fp16 numbers."""
    largest = rows.abs().amax(-1) if rows.numel() else rows.new_zeros(rows.shape[0])
    if not torch.isfinite(largest).all():
        raise QuantizationError("the residuals hold NaN or infinity; the checkpoint is damaged")
    if largest.numel() and float(largest.max()) / top > torch.finfo(torch.float16).max:
        raise QuantizationError(f"residuals reach {float(largest.max()):.3g}, too far for fp16 scales")
    best_scale, best_error = torch.empty_like(largest), torch.full_like(largest, torch.inf)
    trial = torch.empty_like(rows)
    for point in range(GRID, 0, -1):
        scale = (largest * (point / GRID / top)).to(torch.float16).to(torch.float32).clamp_(min=SMALLEST_SCALE)
        torch.div(rows, scale[:, None], out=trial).round_()
        error = trial.clamp_(-top, top).mul_(scale[:, None]).sub_(rows).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale
