"""What the KV cache keeps of keys and values, in plain torch."""

from __future__ import annotations

import torch


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric INT8 of every token and head on its own: scale = max |x| / 127 rounded to half precision.

    Codes are computed with the rounded scale, so that reading back is one product. A zero vector has scale 0, codes 0.

    Args:
        x: float32 [M, H_kv, D], keys or values.

    Returns:
        Codes int8 [M, H_kv, D] in [-127, 127] and scales float16 [M, H_kv].
    """
    scales = (x.abs().amax(dim=-1) / 127).to(torch.float16)
    divisor = scales.float().unsqueeze(-1)
    codes = torch.where(divisor > 0, torch.round(x / divisor), torch.zeros_like(x)).clamp(-127, 127)
    return codes.to(torch.int8), scales


def dequantize_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Product of codes and scales.

    Args:
        codes: int8 [T, H_kv, D].
        scales: float16 [T, H_kv].

    Returns:
        float32 [T, H_kv, D].
    """
    return codes.float() * scales.float().unsqueeze(-1)
