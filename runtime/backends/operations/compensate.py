"""Error compensation in plain torch."""

from __future__ import annotations

import numpy as np
import torch

from models.packed import PackedResidual
from models.packing import unpack


def dequantize_residual(residual: PackedResidual, width: int) -> torch.Tensor:
    """Dequantize residuals: (code - 2^(bits-1)) * scale[n], or the stored float16 values at 16 bits.

    Args:
        residual: Packed residuals of a matrix of shape (N, K).
        width: N.

    Returns:
        float32 [K, N], input-channel-major.

    Source: QDEC §4.2.
    """
    if residual.bits == 16 or residual.scales is None:
        return torch.from_numpy(np.ascontiguousarray(residual.codes).astype(np.float32))
    codes = unpack(np.ascontiguousarray(residual.codes), residual.bits, width)
    centred = codes.astype(np.float32) - 2.0 ** (residual.bits - 1)
    return torch.from_numpy((centred * residual.scales.astype(np.float32)).astype(np.float32))


def compensate(base: torch.Tensor, x: torch.Tensor, channels: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """base[m] + sum over the selected channels c of row m of x[m, c] * residual[c].

    Args:
        base: float32 [M, N], output of the low-bit product.
        x: float32 [M, K], its input.
        channels: int64 [M, k], selected channels of every row, distinct.
        residual: float32 [K, N], from `dequantize_residual`.

    Returns:
        float32 [M, N].

    Source: QDEC §4.1, steps 2 to 4 of Fig. 6(b).
    """
    salient = torch.zeros_like(x).scatter(1, channels, x.gather(1, channels))
    return base + salient @ residual


def compensate_shared(
    base: torch.Tensor, x: torch.Tensor, channels: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    """base[m] + the sum over the given channels c, shared by all rows, of x[m, c] * residual[c].

    Args:
        base: float32 [M, N], output of the low-bit product.
        x: float32 [M, K], its input.
        channels: int64 [k], distinct.
        residual: float32 [K, N], from `dequantize_residual`.

    Returns:
        float32 [M, N].
    """
    return base + x[:, channels] @ residual[channels]
