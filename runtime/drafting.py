"""Whether and how speculation is asked for. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.errors import RequestError
from runtime.kv.kinds import KINDS, KVKind

LARGEST_GAMMA = 15
"""The most tokens of a round that can be asked for: 16 rows are the most that a CPU verifies bit for bit as one by
one."""
SPECULATIVE_KV: KVKind = "hierarchical"
"""The kind of cache of which drafts read less than verification does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculate:
    """A wish to speculate.

    Raises:
        RequestError: gamma is out of range.
    """

    gamma: int | None = None
    """Tokens to draft in each round; None: found from what steps cost, and adapted while answers go on."""

    def __post_init__(self) -> None:
        if self.gamma is not None and not 1 <= self.gamma <= LARGEST_GAMMA:
            raise RequestError(f"gamma is {self.gamma}; it must be from 1 to {LARGEST_GAMMA}")


Drafts = Speculate | Literal[False] | None
"""How drafts are asked for: None leaves it to what was measured to be best, False forbids them."""


def cache_for(kv: KVKind | None, speculate: Speculate | None, default: KVKind = "fp16") -> KVKind:
    """The kind of cache that a model gets.

    Args:
        kv: What was asked for; None leaves it open.
        speculate: Whether tokens are to be drafted.
        default: What it is without speculation.

    Raises:
        RequestError: drafts would read as much of that cache as verification does.
    """
    if speculate is None:
        return kv or default
    if kv is not None and not KINDS[kv].has_draft:
        raise RequestError(f"speculation needs the {SPECULATIVE_KV} cache, not {kv}: leave out one of them")
    return kv or SPECULATIVE_KV
