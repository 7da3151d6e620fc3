"""Descriptions of models that can be downloaded, and the recommendation among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.amounts import byte_count, duration

if TYPE_CHECKING:
    from runtime.wire.prospects import Prospect

READABLE = 10.0
"""Tokens per second of reading speed; slower models are not recommended."""
_MAX_MAKING_S = 45 * 60
"""Maximum time in seconds to quantize a recommended model."""


def recommended(found: Sequence[Prospect]) -> Prospect | None:
    """The best model that fits well, needs no login, reaches reading speed and is quickly quantized.

    The best is the largest; a mixture of experts counts as the geometric mean of its weights and those that a token
    reads. None if there is none, or if speeds are not known yet.
    """
    good = [one for one in found if one.fits == "yes" and not one.gated and one.making_s <= _MAX_MAKING_S]
    fast = [one for one in good if one.tokens_per_s is not None and one.tokens_per_s >= READABLE]
    return max(fast, key=lambda one: one.parameters * math.sqrt(one.active_share), default=None)


def words(one: Prospect) -> str:
    """A model's origin, licence and requirements."""
    effort = f"{byte_count(one.download_bytes)} to download, about {duration(one.making_s)} to quantize"
    parts = [f"{one.source} by {one.maker}", one.license, f"{one.form}, {effort}", room(one)]
    if one.active_share < 1:
        parts.append(f"a token reads {one.active_share:.0%} of its weights")
    if not one.verified:
        parts.append("not verified")
    if one.gated:
        parts.append("needs a login: accept the licence on the hub, then run `hf auth login`")
    return " · ".join(parts)


def room(one: Prospect) -> str:
    """A model's memory needs, and whether they are met."""
    if one.bits is None:
        return f"needs {byte_count(one.needed_bytes)}, more than is free now"
    return f"takes {byte_count(one.needed_bytes)} at {one.bits:g} bits with {one.context:,} tokens of context"
