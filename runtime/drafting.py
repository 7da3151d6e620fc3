"""Whether and how speculation is asked for. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.errors import RequestError

LARGEST_GAMMA = 15
"""The most tokens of a round that can be asked for: 16 rows are the most that a CPU verifies bit for bit as one by
one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculate:
    """A wish that the model drafts for itself.

    Raises:
        RequestError: gamma is out of range.
    """

    gamma: int | None = None
    """Tokens to draft in each round, none of them copied; None: found from what steps cost, and adapted while answers
    go on, beside copied drafts."""

    def __post_init__(self) -> None:
        if self.gamma is not None and not 1 <= self.gamma <= LARGEST_GAMMA:
            raise RequestError(f"gamma is {self.gamma}; it must be from 1 to {LARGEST_GAMMA}")


Drafts = Speculate | Literal[False] | None
"""How drafts are asked for: None copies them from the text, and lets the model draft where that was measured to pay; a
`Speculate` lets it draft in any case; False forbids both."""
