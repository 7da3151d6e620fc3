"""A linear layer of the reference backend whose input is rounded to 8 bits with one scale a token."""

from __future__ import annotations

import torch

from models import per_token
from runtime.backends.decoder import Way
from runtime.backends.reference.linear import ReferenceLinear


class RoundedInput:
    """The layer, as the decoder calls it.

    Args:
        linear: The layer itself.
    """

    recall_sum = 0.0
    selections = 0

    def __init__(self, linear: ReferenceLinear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, *, way: Way, draft: bool = False) -> torch.Tensor:
        """See `ReferenceLinear`."""
        codes, scales = per_token.quantize(x)
        return self._linear(codes.float() * scales, positions, way=way, draft=draft)
