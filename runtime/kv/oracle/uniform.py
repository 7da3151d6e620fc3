"""Uniform quantization of vectors in groups, and the packing of codes."""

from __future__ import annotations

import torch


def split(vectors: torch.Tensor, group: int) -> torch.Tensor:
    """Split vectors into groups.

    Args:
        vectors: [..., n].
        group: Group size; 0 = n. A shorter last group is padded with its last number.

    Returns:
        [..., groups, group].
    """
    size = group or vectors.shape[-1]
    missing = -vectors.shape[-1] % size
    if missing:
        vectors = torch.cat([vectors, vectors[..., -1:].expand(*vectors.shape[:-1], missing)], dim=-1)
    return vectors.reshape(*vectors.shape[:-1], vectors.shape[-1] // size, size)


def scales_of(groups: torch.Tensor, bits: int, outliers: torch.Tensor | None = None) -> torch.Tensor:
    """Scale and zero of every group: zero = minimum, scale = (maximum - minimum) / (2^bits - 1).

    The numbers are float16 values, so the zero is exact; the scale is rounded to float16. A constant group has scale 0.

    Args:
        groups: float32 [..., groups, group], float16 values.
        bits: Bits of a code.
        outliers: bool [..., groups, group], numbers to ignore; None = use all.

    Returns:
        float16 [..., groups, 2]: scale and zero.
    """
    low, high = groups, groups
    if outliers is not None:
        low, high = groups.masked_fill(outliers, torch.inf), groups.masked_fill(outliers, -torch.inf)
    least, largest = low.amin(-1), high.amax(-1)
    nothing = least > largest  # a group of outliers only
    least, largest = least.masked_fill(nothing, 0), largest.masked_fill(nothing, 0)
    return torch.stack([(largest - least) / (2**bits - 1), least], dim=-1).to(torch.float16)


def encode(groups: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest code of every number, ties to even, by the stored scales.

    Args:
        groups: float32 [..., groups, group].
        scales: float16 [..., groups, 2].
        bits: Bits of a code.

    Returns:
        uint8 [..., groups, group], in [0, 2^bits - 1].
    """
    scale, zero = scales.float().unsqueeze(-2).unbind(-1)
    exact = torch.where(scale > 0, (groups - zero) / scale, torch.zeros_like(groups))
    return torch.round(exact).clamp(0, 2**bits - 1).to(torch.uint8)


def with_exact_means(groups: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scales with zeros refitted so that every group keeps its mean, up to rounding.

    Args:
        groups: float32 [..., groups, group], whole groups.
        codes: uint8 [..., groups, group].
        scales: float16 [..., groups, 2], used for encoding.

    Returns:
        float16 [..., groups, 2].
    """
    scale = scales[..., 0]
    zero = groups.mean(-1) - scale.float() * codes.float().mean(-1)
    largest = torch.finfo(torch.float16).max
    return torch.stack([scale, zero.clamp(-largest, largest).to(torch.float16)], dim=-1)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize: code * scale + zero. Returns float32 [..., groups, group]."""
    scale, zero = scales.float().unsqueeze(-2).unbind(-1)
    return codes.float() * scale + zero


def encode_lower(groups: torch.Tensor, upper: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The second four bits: the error of the first, in sixteenths of the scale.

    An error of half a scale upwards would be 8; it becomes 7, so both planes together are off by at most a sixteenth of
    the scale, and by at most half of that nearly everywhere.

    Args:
        groups: float32 [..., groups, group].
        upper: uint8 [..., groups, group], their 4-bit codes.
        scales: float16 [..., groups, 2].

    Returns:
        int8 [..., groups, group], in [-8, 7].

    Source: QuantSpec §4.2.
    """
    scale = scales[..., :1].float()
    error = groups - decode(upper, scales)
    exact = torch.where(scale > 0, error / (scale / 16), torch.zeros_like(error))
    return torch.round(exact).clamp(-8, 7).to(torch.int8)


def decode_both(upper: torch.Tensor, lower: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize both planes: (16 * upper + lower) * scale / 16 + zero. Returns float32 [..., groups, group]."""
    scale, zero = scales.float().unsqueeze(-2).unbind(-1)
    return (16 * upper.float() + lower.float()) * (scale / 16) + zero


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, first in the lowest bits of a byte; the last byte is padded with zeros.

    Args:
        codes: uint8 [..., n], below 2^bits.
        bits: 2, 4 or 8.

    Returns:
        uint8 [..., ceil(n * bits / 8)].
    """
    each = 8 // bits
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each))
    filled = filled.reshape(*codes.shape[:-1], filled.shape[-1] // each, each)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (filled << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of `pack`.

    Args:
        packed: uint8 [..., ceil(count * bits / 8)].
        bits: 2, 4 or 8.
        count: Codes of a row.

    Returns:
        uint8 [..., count].
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts).bitwise_and(2**bits - 1)
    return codes.flatten(-2)[..., :count]
