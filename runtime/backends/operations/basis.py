"""Transformation of queries and keys into the basis of a low-bit cache (`runtime.kv.basis`), in plain torch."""

from __future__ import annotations

import torch

from runtime.kv.basis import hadamard_block


def to_basis(x: torch.Tensor, reflection: torch.Tensor) -> torch.Tensor:
    """Multiply every head by the Hadamard matrix, then reflect it: x -> H x -> H x - u (u . H x).

    Args:
        x: float32 [M, heads, D], rotated queries or keys.
        reflection: float32 [heads, D] or broadcastable, u.

    Returns:
        float32 [M, heads, D].
    """
    M, heads, D = x.shape
    block, width = hadamard_block(D), 1
    while width < block:
        first, second = x.reshape(M, heads, D // (2 * width), 2, width).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).reshape(M, heads, D)
        width *= 2
    x = x * block**-0.5
    return x - reflection * (reflection * x).sum(-1, keepdim=True)
