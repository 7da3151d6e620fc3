"""Dynamic selection of salient channels, and error compensation, in plain torch."""

from __future__ import annotations

import numpy as np
import torch

from models.packed import PackedResidual
from models.packing import unpack
from runtime.backends.operations.channels import BUCKETS, CHUNK, HALF, Buckets, chunk_budget
from runtime.errors import InvalidActivationError


def _check_finite(x: torch.Tensor) -> None:
    """Raise InvalidActivationError if x contains NaN or infinity, which would match no bucket."""
    if not bool(torch.isfinite(x).all()):
        row, channel = torch.nonzero(~torch.isfinite(x))[0].tolist()
        raise InvalidActivationError(
            f"an activation is {x[row, channel].item()} (row {row}, channel {channel}); the model is damaged or its "
            "numbers left the range of its format: verify it, or quantize it again"
        )


def _chunk_top(order: torch.Tensor, k_chunk: int) -> torch.Tensor:
    """Indices [M, k] of the smallest `order` [M, K] of every chunk, ascending; ties go to the lowest index. int64."""
    chosen = [torch.empty(order.shape[0], 0, dtype=torch.int64)]
    for start in range(0, order.shape[1], CHUNK):
        part = order[:, start : start + CHUNK]
        best = torch.argsort(part, dim=1, stable=True)[:, : chunk_budget(part.shape[1], k_chunk)]
        chosen.append(best.sort(dim=1).values + start)
    return torch.cat(chosen, dim=1)


def exact(x: torch.Tensor, k_chunk: int) -> torch.Tensor:
    """The largest magnitudes of every chunk; ties go to the lowest channel.

    Args:
        x: float32 [M, K], activations.
        k_chunk: Salient channels per 1024.

    Returns:
        int64 [M, k], ascending, with k = `budget.total_budget(K, k_chunk)`.

    Raises:
        InvalidActivationError: x holds a NaN or infinity.

    Source: QDEC §4.3, Fig. 8(a) with exact local searches.
    """
    _check_finite(x)
    return _chunk_top(-x.abs(), k_chunk)


def bucket_of(x: torch.Tensor, buckets: Buckets) -> torch.Tensor:
    """Bucket of every magnitude, 0 for the largest.

    Args:
        x: float32 [M, K], finite.
        buckets: Boundaries.

    Returns:
        int64 [M, K] in [0, 32).

    Source: QDEC §4.3, Fig. 9.
    """
    magnitude = x.abs()
    above = torch.floor((magnitude - buckets.b15) * buckets.upper_scale).clamp(0, HALF - 1)
    below = torch.floor(magnitude * buckets.lower_scale).clamp(0, HALF - 1)
    bucket = torch.where(magnitude >= buckets.b15, HALF - 1 - above, BUCKETS - 1 - below)
    return bucket.to(torch.int64)


def approximate(x: torch.Tensor, k_chunk: int, buckets: Buckets) -> torch.Tensor:
    """Bucketed approximate top-k: takes each chunk's channels bucket by bucket from 0 on, until its share is full.

    The overflowing bucket contributes its lowest channels, where the paper draws at random: this is reproducible, and
    equally arbitrary, because a channel's index says nothing about its magnitude.

    Args:
        x: float32 [M, K], activations.
        k_chunk: Salient channels per 1024.
        buckets: Boundaries from the calibration (`budget.buckets`).

    Returns:
        int64 [M, k], ascending.

    Raises:
        InvalidActivationError: x holds a NaN or infinity.

    Source: QDEC §4.3, Fig. 8(b).
    """
    _check_finite(x)
    return _chunk_top(bucket_of(x, buckets), k_chunk)


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
