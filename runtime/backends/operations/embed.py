"""Rows of the embedding table in plain torch."""

from __future__ import annotations

import torch


def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up tokens, in float32.

    Args:
        tokens: int32 or int64 [M], token ids in [0, V).
        table: float16 [V, C].

    Returns:
        float32 [M, C].
    """
    return table[tokens.long()].float()
