"""Per-group INT8 quantization of activations in plain torch: the CPU path's arithmetic."""

from __future__ import annotations

import torch


def quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def dequantize(codes: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Multiply the codes by the scales of their groups.

    Args:
        codes: int8 [M, K].
        scales: float32 [M, G].
        group_size: Channels of a group.

    Returns:
        float32 [M, K].
    """
    return codes.float() * scales.repeat_interleave(group_size, dim=1)[:, : codes.shape[1]]
