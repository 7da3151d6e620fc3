"""Symmetric INT8 quantization of activations with one scale per token, for the products of W4A8 models.

Source: QServe §4.1, §5.1.
"""

from __future__ import annotations

import torch

TOP = 127
"""Largest magnitude of a code."""


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize tokens: scale = max |x| / 127, codes rounded to nearest, ties to even.

    Args:
        x: float32 [..., K], finite.

    Returns:
        Codes int8 [..., K] in [-127, 127], and scales float32 [..., 1]. A token of zeros has scale 0 and codes 0.
    """
    scales = x.abs().amax(dim=-1, keepdim=True) / TOP
    inverse = torch.where(scales > torch.finfo(x.dtype).tiny, 1 / scales, torch.zeros_like(scales))
    return torch.round(x * inverse).clamp(-TOP, TOP).to(torch.int8), scales


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The values that the tokens' codes represent, float32 [..., K]."""
    codes, scales = quantize(x)
    return codes.to(torch.float32) * scales
