"""Packed matrix products in plain torch: dequantize, then multiply; and the CPU's integer arithmetic."""

from __future__ import annotations

import numpy as np
import torch

from models import trellis
from models.packed import E4M3_STEPS, HALF_STEPS, PackedLinear
from models.packing import unpack

_EXACT = 1024
"""Channels whose products, at most 127 * 127, float32 sums exactly in any order."""


def _codes(linear: PackedLinear) -> torch.Tensor:
    """Unsigned codes of a packed matrix, int32 [N, K]; of floating-point numbers, these times 2 or 1024."""
    codes = unpack(np.ascontiguousarray(linear.codes), linear.bits, linear.shape[1])
    if linear.floats:
        return torch.from_numpy(HALF_STEPS[codes].astype(np.int32))
    if linear.floats_8:
        return torch.from_numpy(E4M3_STEPS[codes])
    return torch.from_numpy(codes.astype(np.int32))


def _levels(linear: PackedLinear) -> torch.Tensor:
    """Levels of a trellis, in the rotated basis, int8 [N, K filled up to a multiple of 32]."""
    states = trellis.states(trellis.unpack(linear.codes, linear.bits), linear.bits)
    return torch.from_numpy(trellis.levels(linear.bits)[states])


def _spread(per_group: np.ndarray[tuple[int, ...], np.dtype[np.generic]], linear: PackedLinear) -> torch.Tensor:
    """Repeat one value per group [N, G] for the channels of the group: float32 [N, K]."""
    values = torch.from_numpy(np.ascontiguousarray(per_group).astype(np.float32))
    return values.repeat_interleave(linear.group_size, dim=1)[:, : linear.shape[1]]


def _zeros(linear: PackedLinear) -> float:
    """The zero-point of all groups of a matrix that stores none."""
    return 0.0 if linear.minimums is not None or linear.floats or linear.floats_8 else 2.0 ** (linear.bits - 1)


def dequantize(linear: PackedLinear) -> torch.Tensor:
    """Dequantize a packed matrix: uniform codes, the codebook's entry times the row's scale, or a trellis's levels.

    Args:
        linear: Packed matrix of shape (N, K).

    Returns:
        float32 [N, K].
    """
    if linear.trellis:
        return torch.from_numpy(trellis.dequantize(linear.codes, linear.scales, linear.bits, linear.shape[1]))
    if linear.codebook is not None:
        values = linear.codebook.astype(np.float32) * linear.scales.astype(np.float32)
        return torch.from_numpy(values).gather(1, _codes(linear).long())
    if linear.zeros is None:
        scales, minimums = linear.factors
        weights = _codes(linear) - _zeros(linear)
        weights *= _spread(scales, linear)
        return weights if minimums is None else weights + _spread(minimums, linear)
    if linear.per_token:
        return integer_weights(linear) * torch.from_numpy(linear.scales.astype(np.float32))
    return (_codes(linear) - _spread(linear.zeros, linear)) * _spread(linear.scales, linear)


def integer_weights(linear: PackedLinear) -> torch.Tensor:
    """The integers of a W4A8 matrix: (code - zero) * group scale, or code - zero without groups.

    Args:
        linear: Packed matrix of shape (N, K) with `per_token`.

    Returns:
        float32 [N, K], whole numbers in [-127, 127].
    """
    assert linear.zeros is not None
    weights = _codes(linear) - _spread(linear.zeros, linear)
    return weights if linear.group_scales is None else weights * _spread(linear.group_scales, linear)


def gemm_w4a8(codes: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
    """Product of INT8 tokens with a W4A8 matrix: an exact integer sum, then two products in float32.

    y[m, n] = float32(sum_k a[m, k] w[n, k]) * (scale[n] * scales[m]) + bias[n]. The sum is exact, so kernels get
    identical bits in any order of summation.

    Args:
        codes: int8 [M, K], from `models.per_token.quantize`.
        scales: float32 [M, 1].
        weights: float32 [N, K], from `integer_weights`.
        linear: The packed matrix.

    Returns:
        float32 [M, N].

    Source: QServe §3.1, App. C; the zero-point's sum is that of the rounded activations, which makes it exact.
    """
    total = torch.zeros(codes.shape[0], weights.shape[0], dtype=torch.float64)
    for start in range(0, codes.shape[1], _EXACT):
        own = slice(start, start + _EXACT)
        total += codes[:, own].float() @ weights[:, own].T
    factors = torch.from_numpy(linear.scales.astype(np.float32))[:, 0] * scales
    y = total.float() * factors
    return y if linear.bias is None else y + torch.from_numpy(np.array(linear.bias, np.float32))


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product x @ weight.T + bias.

    Args:
        x: float32 [M, K].
        weight: float32 [N, K], from `dequantize`.
        bias: float32 [N] or None.

    Returns:
        float32 [M, N].
    """
    return torch.nn.functional.linear(x, weight, bias)


def gemv_int8(codes: torch.Tensor, scales: torch.Tensor, linear: PackedLinear) -> torch.Tensor:
    """The same product with INT8 activations: integer sums within a group, scaled and added in floating point.

    y[m, n] = bias[n] + sum over groups g of scales[m, g] * s[n, g] * (sum_k a[m, k] w[n, k] - zero[n, g] sum_k a[m, k])
    with k over the channels of g; with a codebook, w is the code's entry, s the row's scale, and zero is 0; with a
    trellis, w is the state's level, s and zero likewise, and activations are those of rotated tokens. The integer
    sums are exact; the rest is float64, as a reference for float32 kernels.

    Args:
        codes: int8 [M, K], from `runtime.backends.operations.linear.quantize` with the matrix' group size.
        scales: float32 [M, G].
        linear: Packed matrix of shape (N, K).

    Returns:
        float64 [M, N].

    Source: design decision 5 (W4A8); QServe §5.2 for the zero-point outside the integer sum.
    """
    weights = (_levels if linear.trellis else _codes)(linear).to(torch.int64)
    activations = codes.to(torch.int64)
    own_scales, minimums = linear.factors
    weight_scales = torch.from_numpy(own_scales.astype(np.float64))
    groups = scales.shape[1]
    if linear.trellis:
        weight_scales = weight_scales.expand(-1, groups)
    if linear.codebook is not None:
        weights = torch.from_numpy(linear.codebook.astype(np.int64)).gather(1, weights)
        weight_scales = weight_scales.expand(-1, groups)
    zeros = torch.zeros(linear.shape[0], groups, dtype=torch.int64)
    if linear.zeros is not None:
        zeros = torch.from_numpy(linear.zeros.astype(np.int64))
    elif linear.codebook is None and not linear.trellis:
        zeros += int(_zeros(linear))
    y = torch.zeros(codes.shape[0], linear.shape[0], dtype=torch.float64)
    for g in range(groups):
        group = slice(g * linear.group_size, (g + 1) * linear.group_size)
        dots = activations[:, group] @ weights[:, group].T
        sums = activations[:, group].sum(dim=1, keepdim=True)
        y += (dots - sums * zeros[:, g]) * scales[:, g : g + 1].double() * weight_scales[:, g]
        if minimums is not None:
            y += sums * scales[:, g : g + 1].double() * torch.from_numpy(minimums[:, g].astype(np.float64))
    return y if linear.bias is None else y + torch.from_numpy(linear.bias.astype(np.float64))


def quantize_groups(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT8 with one scale for each group of input channels: scale = max |x| / 127, ties round to even.

    Args:
        x: float32 [M, K], finite.
        group_size: Channels of a group; the last group of a row may be shorter.

    Returns:
        Codes int8 [M, K] in [-127, 127] and scales float32 [M, G], G = ceil(K / group_size). A group of zeros has
        scale 0 and codes 0.
    """
    M, K = x.shape
    G = -(-K // group_size)
    padded = torch.nn.functional.pad(x, (0, G * group_size - K)).view(M, G, group_size)
    scales = padded.abs().amax(dim=-1) / 127
    inverse = torch.where(scales > torch.finfo(x.dtype).tiny, 1 / scales, torch.zeros_like(scales))
    codes = torch.round(padded * inverse.unsqueeze(-1)).clamp(-127, 127)
    return codes.to(torch.int8).view(M, -1)[:, :K], scales


def dequantize_groups(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Multiply the codes by the scales of their groups.

    Args:
        codes: int8 [M, K].
        scales: float32 [M, G].
        group_size: Channels of a group.

    Returns:
        float32 [M, K].
    """
    return codes.float() * scales.repeat_interleave(group_size, dim=1)[:, : codes.shape[1]]
