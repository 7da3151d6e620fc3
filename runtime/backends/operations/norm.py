"""Root-mean-square normalization in plain torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The normalized x / sqrt(mean(x²) + eps) * weight, over the last axis.

    Args:
        x: float32 [..., C].
        weight: float32 [C].
        eps: `ModelSpec.norm_eps`.

    Returns:
        float32 [..., C].
    """
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
