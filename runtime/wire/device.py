"""Records on the runtime's device, and on tuning the loaded model to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from models.catalogue import Form
from runtime.errors import Problem
from tuner.curve import Curve
from tuner.placement import BlockPlacement, ExpertPlacement

Fits = Literal["yes", "tight", "no"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The best measured way to decode within a budget."""

    words: str
    """For the user: its loss, its speed, and how it decodes."""
    target: str
    """The target's compensation: `plain`, `compensated` or `residual`."""
    gamma: int
    """Tokens drafted per round; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Result of tuning a model to a device and a budget."""

    device: str
    """The device, as text."""
    budget_percent: float
    n_tb_max: int | None
    """Most thread blocks of any layer type; None on a CPU."""
    n_tb: Mapping[str, int]
    """Thread blocks by layer type; 0 on a CPU."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type; the last block may have its own, `layers.29.down`."""
    predicted_slowdown_percent: float
    """Predicted from the times of the layers; of a refined choice, as measured."""
    measured_slowdown_percent: float
    """Measured on whole decoding steps; at most the budget."""
    seconds: float
    date: str
    """Date in UTC, as in `2026-11-21T16:40:00+00:00`; empty if nothing was tuned."""
    cached: bool
    """Whether it came from a stored profile."""
    curve: Sequence[Curve] = ()
    """Time against k_chunk, as far as measured."""
    source: str = "measured"
    predicted_loss_won: float | None = None
    """Nats per token recovered by compensation, predicted from the losses of the layer types; None if these are
    unknown."""
    loss_without: float | None = None
    """Nats per token lost without compensation, likewise."""
    bought: Sequence[tuple[float, float]] = ()
    """Budgets from which on another setting is taken: (percent, recovered share of that loss), ascending."""
    offer: Offer | None = None
    """The best way to decode within the budget; None if `tune-device` has not measured any."""
    refined: bool = False
    """Whether the choice was refined on a text and by many readings; losses then are those on that text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTuning:
    """Result of tuning a model's prompts to a device and a budget."""

    budget_percent: float
    """The slowdown budget of prompts."""
    k_chunk: int
    """Channels per 1024 shared by the rows of a prompt; 1024 is all, 0 none."""
    measured_slowdown_percent: float
    """Measured slowdown of the timed prompt."""
    tokens: int
    """Tokens of the timed prompt; 0 if none was timed."""
    seconds: float = 0.0
    date: str = ""
    """Date in UTC; empty if nothing was tuned."""
    cached: bool = False
    """Whether it came from a stored profile."""
    pending: bool = False
    """Whether it is still to be tuned: a first answer does not wait for that."""

    @classmethod
    def later(cls, budget_percent: float) -> PromptTuning:
        """The tuning to a budget that is still to come; until then, prompts are not compensated."""
        return cls(budget_percent=budget_percent, k_chunk=0, measured_slowdown_percent=0.0, tokens=0, pending=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """`GET /runtime/device`."""

    machine: Mapping[str, Any]
    """`cpu`, `memory`, `gpu`, `pcie` as in `lowbit-chat doctor --json`; `backend` and `reason` of the loaded model."""
    bandwidth_gb_s: float | None = None
    """Measured read bandwidth of the memory in 10^9 bytes per second; None if not yet measured."""
    tuning: Tuning | None = None
    """Tuning of the loaded model; None if it was not tuned."""
    prompts: PromptTuning | None = None
    """Tuning of its prompts; None if they have no budget."""
    experts: ExpertPlacement | None = None
    """Where the loaded model's experts are; None if all are on the card, or there is none, or no card."""
    blocks: BlockPlacement | None = None
    """Where the loaded model's blocks are, if the card shares them with the processor."""
    lost_percent: float | None = None
    """By how many percent the loaded model's perplexity is above its source's within the budget; None: not measured."""
    cache: str = ""
    """The loaded model's kind of cache, and what is known of it; empty if there is none."""
    problems: Sequence[Problem] = ()
    """Problems of the device and of the loaded model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A downloadable model, and how it would run on this machine now."""

    title: str
    source: str
    """Name to request: a short name, or `owner/name` on the hub."""
    maker: str
    good_for: str
    """What people take it for, in three words."""
    leads: bool
    """Whether it may be the recommended one."""
    license: str
    """Short name of its licence."""
    gated: bool
    """Whether downloading requires a hub account that accepted the licence."""
    verified: bool
    """Whether the source was checked; the catalogue's other entries are as published."""
    form: Form
    download_bytes: int
    """Size of the download in bytes."""
    parameters: int
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
    blocks: BlockPlacement | None
    """Where its blocks would be, if the card shared them with the processor."""
    tokens_per_s: float | None
    """Expected decode speed at these bits; None if the device's speed is unknown."""
    making_s: float
    """Estimated time to quantize it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProspectList:
    """`GET /runtime/prospects`."""

    prospects: Sequence[Prospect]
    """All known models, smallest first."""
