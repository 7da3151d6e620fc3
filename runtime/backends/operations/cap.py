"""Soft caps of attention scores and logits in plain torch."""

from __future__ import annotations

import torch


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Soft cap c * tanh(x / c), float32 of any shape: nearly x where that is small, and never beyond c.

    Source: Gemma 2's report (2024), §2.
    """
    return cap * torch.tanh(x / cap)
