"""Expected sums of pieces of activations."""

from __future__ import annotations

import torch

from tests.close import Tolerance

SUMS = Tolerance(spread=1e-6, why="32 halves summed in float32, in another order")


def sums_of(x: torch.Tensor) -> torch.Tensor:
    """Sums of the pieces of x float16 [M, K], in float64."""
    M, K = x.shape
    padded = torch.nn.functional.pad(x.cpu().double(), (0, -K % 32))
    return padded.view(M, -1, 32).sum(dim=2)
