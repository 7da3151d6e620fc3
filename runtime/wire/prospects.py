"""Records on models that can be downloaded, and how they would run here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.catalogue import Form

Fits = Literal["yes", "tight", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A downloadable model, and how it would run on this machine now."""

    title: str
    """Display name."""
    source: str
    """Name to request: a short name, or `owner/name` on the hub."""
    maker: str
    """Publisher."""
    license: str
    """Short name of its licence."""
    gated: bool
    """Whether downloading requires a hub account that accepted the licence."""
    verified: bool
    """Whether the source was checked; the catalogue's other entries are as published."""
    form: Form
    """Form of the download."""
    download_bytes: int
    """Size of the download in bytes."""
    parameters: int
    """Its weights."""
    active_share: float
    """Share of its device memory that a token reads: 1 but for mixtures of experts."""
    max_context: int
    """Longest context in tokens."""
    sizes: Sequence[int]
    """Device memory in bytes at 3, 3.5 and 4 bits per weight."""
    residual_bytes: int
    """Main memory of the residuals in bytes, the same for all bits."""
    bits: float | None
    """The highest bits that fit with a usable context; None if none do."""
    fits: Fits
    """`tight`: only with fewer than 4 bits, or with less context than usual."""
    needed_bytes: int
    """Memory required at these bits, or at 3."""
    context: int
    """Tokens of context that fit at these bits, up to the default."""
    tokens_per_s: float | None
    """Expected decode speed at these bits; None if the device's speed is unknown."""
    making_s: float
    """Estimated time to quantize it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProspectList:
    """`GET /runtime/prospects`."""

    prospects: Sequence[Prospect]
    """All known models, smallest first."""
