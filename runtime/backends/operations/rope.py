"""Rotary position embedding in plain torch, half-split convention."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dimension i with dimension i + r / 2 of every head, i < r / 2; dimensions from r on pass through.

    Args:
        x: float32 [M, heads, D].
        cos: float32 [M, r / 2], of each row's position.
        sin: float32 [M, r / 2].

    Returns:
        float32 [M, heads, D].
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
