"""Final logits of a step in plain torch."""

from __future__ import annotations

import torch


def finish(logits: torch.Tensor, dec: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """The logits with their compensation, and whether any is NaN or infinite.

    Args:
        logits: float32 [R, V], output of the head.
        dec: float32 [R, V], its compensation, or None.

    Returns:
        float32 [R, V], and True if the logits are unusable.
    """
    total = logits if dec is None else logits + dec
    return total, not bool(torch.isfinite(total).all())
