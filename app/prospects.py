"""What a person is told of models that can be fetched, and which of them is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.amounts import byte_count, duration

if TYPE_CHECKING:
    from runtime.wire.prospects import Prospect

READABLE = 10.0
"""Tokens a second that are as fast as people read; a model that is slower is not recommended."""
_LONGEST_MAKING_S = 45 * 60
"""Nor is one that takes longer to be made."""


def recommended(found: Sequence[Prospect]) -> Prospect | None:
    """The largest that fits well, needs no login, answers as fast as people read and is made soon.

    None where there is none, or where speeds are not known (yet).
    """
    good = [one for one in found if one.fits == "yes" and not one.gated and one.making_s <= _LONGEST_MAKING_S]
    fast = [one for one in good if one.tokens_per_s is not None and one.tokens_per_s >= READABLE]
    return max(fast, key=lambda one: one.parameters, default=None)


def words(one: Prospect) -> str:
    """Where a model comes from, under which licence, and what it needs."""
    effort = f"{byte_count(one.download_bytes)} to fetch, about {duration(one.making_s)} to make"
    parts = [f"{one.source} by {one.maker}", one.license, f"{one.form}, {effort}", room(one)]
    if one.gated:
        parts.append("needs a login: agree on the hub, then `hf auth login`")
    return " · ".join(parts)


def room(one: Prospect) -> str:
    """Whether a model fits, and why not."""
    if one.bits is None:
        return f"needs {byte_count(one.needed_bytes)}, which are not free now"
    return f"takes {byte_count(one.needed_bytes)} at {one.bits:g} bits with {one.context:,} tokens of context"
