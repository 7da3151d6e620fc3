"""Speculation settings. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.errors import RequestError

LARGEST_GAMMA = 15
"""Most draft tokens per round: a CPU verifies up to 16 rows bit for bit as it would one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculate:
    """A request that the model drafts for itself.

    Raises:
        RequestError: a number is out of range.
    """

    gamma: int | None = None
    """Tokens to draft in each round, without copying; None: chosen by measured costs and adapted during answers, along
    with copied drafts."""
    sensitive_layers: int = 0
    """Layers whose cache drafts read at 8 bits instead of 4 (QuantSpec, Algorithm 1: L_S): those in which 4 bits change
    drafts most, which is measured when the model is loaded."""

    def __post_init__(self) -> None:
        if self.gamma is not None and not 1 <= self.gamma <= LARGEST_GAMMA:
            raise RequestError(f"gamma is {self.gamma}; it must be from 1 to {LARGEST_GAMMA}")
        if self.sensitive_layers < 0:
            raise RequestError(f"sensitive_layers is {self.sensitive_layers}; it must be 0 or more")


Drafts = Speculate | Literal[False] | None
"""Drafting mode. None copies drafts from the text, and lets the model draft if that was measured to pay; a `Speculate`
always lets it draft; False disables both."""
