"""What a runtime tells of models that are not here yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.catalogue import Form

Fits = Literal["yes", "tight", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A model that can be fetched, seen from this machine as it is now."""

    title: str
    """What people call it."""
    source: str
    """What to ask for: a short name, or `owner/name` on the hub."""
    maker: str
    """Who published it."""
    license: str
    """Its licence, in short."""
    gated: bool
    """Whether the hub wants a login that has agreed to the licence."""
    form: Form
    """What is fetched."""
    download_bytes: int
    """How much."""
    parameters: int
    """Its weights."""
    max_context: int
    """Longest context in tokens."""
    sizes: Sequence[int]
    """Bytes on the device at 3, 3.5 and 4 bits of a weight."""
    residual_bytes: int
    """Bytes of residuals in main memory, alike for all bits."""
    bits: float | None
    """The most bits that fit with a context to work with; None where none do."""
    fits: Fits
    """`tight`: only with fewer bits than 4, or with less context than usual."""
    needed_bytes: int
    """What has to be free at these bits, or at 3."""
    context: int
    """Tokens of context that fit at these bits, up to the usual number."""
    tokens_per_s: float | None
    """Expected speed of decoding at these bits; None where the device's speed is not known."""
    making_s: float
    """About how long it takes to make it low-bit here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProspectList:
    """`GET /runtime/prospects`."""

    prospects: Sequence[Prospect]
    """All models that are known, smallest first."""
