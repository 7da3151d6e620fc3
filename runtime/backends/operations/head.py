"""The logits of a step in plain torch."""

from __future__ import annotations

import torch


def finish(logits: torch.Tensor, dec: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """The logits with their compensation, and whether one of them is a NaN or infinity.

    Args:
        logits: float32 [R, V], output of the head.
        dec: float32 [R, V], its compensation, or None.

    Returns:
        float32 [R, V], and True where the numbers can't be used.
    """
    total = logits if dec is None else logits + dec
    return total, not bool(torch.isfinite(total).all())
