"""Round-to-nearest with clip search: the plainest base quantizer.

For every group the range [min(w, 0), max(w, 0)] is shrunk by each ratio of a grid; the ratio with the smallest squared
error wins. Errors are measured with the scale as it will be stored, rounded to fp16, and with an integer zero-point.
"""

from __future__ import annotations

import torch

from models.errors import QuantizationError
from models.quantizers.groups import SMALLEST_SCALE, GroupCodes, group_slices, split_groups

RATIOS = tuple(1.0 - 0.025 * step for step in range(24))
"""Shrink ratios tried, 1 down to 0.425."""
_CHUNK = 1 << 17
"""Weights handled at a time, so that the search stays in the processor's cache."""


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> GroupCodes:
    """Quantize a matrix in groups along its input channels.

    Args:
        weight: [N, K], any floating-point dtype.
        bits: width of a code, 2 to 8.
        group_size: input channels that share a scale.

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    rows, width = weight.shape
    num_groups = -(-width // group_size)
    result = GroupCodes(
        codes=torch.empty(rows, width, dtype=torch.uint8),
        scales=torch.empty(rows, num_groups, dtype=torch.float16),
        zeros=torch.empty(rows, num_groups, dtype=torch.uint8),
        group_size=group_size,
    )
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        for columns, groups in group_slices(width, group_size):
            part = split_groups(weight[chunk, columns].to(torch.float32), groups)
            scales, zeros = search(part, bits)
            codes = (part / scales[:, :, None]).round_().add_(zeros[:, :, None]).clamp_(0, 2**bits - 1)
            result.codes[chunk, columns] = codes.to(torch.uint8).flatten(1)
            result.scales[chunk, groups] = scales.to(torch.float16)
            result.zeros[chunk, groups] = zeros.to(torch.uint8)
    return result


def search(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find scale and zero-point of every group.

    Args:
        groups: float32 [..., g].
        bits: width of a code.

    Returns:
        Scales and zero-points, float32 [...]: scales are fp16 numbers, zero-points whole numbers in [0, 2^bits).

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    top = 2**bits - 1
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    _check_range(low, high, top)
    best_scale, best_zero = torch.empty_like(low), torch.empty_like(low)
    best_error = torch.full_like(low, torch.inf)
    trial = torch.empty_like(groups)
    for ratio in RATIOS:
        scale = ((high - low) * (ratio / top)).to(torch.float16).to(torch.float32).clamp_(min=SMALLEST_SCALE)
        zero = (low * -ratio / scale).round_().clamp_(0, top)
        torch.div(groups, scale[..., None], out=trial).round_()
        trial.clamp_(-zero[..., None], (top - zero)[..., None]).mul_(scale[..., None]).sub_(groups)
        error = trial.square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _check_range(low: torch.Tensor, high: torch.Tensor, top: int) -> None:
    span = high - low
    if not torch.isfinite(span).all():
        raise QuantizationError("the weights hold NaN or infinity; the checkpoint is damaged")
    if span.numel() and float(span.max()) / top > torch.finfo(torch.float16).max:
        raise QuantizationError(f"weights spread over {float(span.max()):.3g}, too far for fp16 scales")
