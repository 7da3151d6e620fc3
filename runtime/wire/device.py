"""What a runtime tells of its device, and of how the loaded model was tuned to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.compensation import CHUNK
from runtime.errors import Problem
from tuner.curve import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The best way to decode within a budget, of those that were measured."""

    words: str
    """For a person: what it loses, how fast it is, how it decodes."""
    target: str
    """What verifies or decodes: `plain`, `compensated` or `residual`."""
    gamma: int
    """Tokens drafted a round; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was found for one model, device and budget."""

    device: str
    """The device, in words."""
    budget_percent: float
    """Slowdown that was allowed."""
    n_tb_max: int | None
    """Most thread blocks of any layer type; None on a CPU."""
    n_tb: Mapping[str, int]
    """Thread blocks by layer type; 0 on a CPU."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type."""
    predicted_slowdown_percent: float
    """From the times of the layers alone."""
    measured_slowdown_percent: float
    """Of whole decoding steps; at most the budget."""
    seconds: float
    """How long tuning took."""
    date: str
    """When, in UTC: `2026-11-21T16:40:00+00:00`; empty where nothing was tuned."""
    cached: bool
    """Whether a saved profile had it."""
    curve: Sequence[Curve] = ()
    """Time against k_chunk, as far as it was measured."""
    source: str = "measured"
    """How it was found."""
    predicted_loss_won: float | None = None
    """Nats a token that compensation wins back, by the losses of the layer types; None where these are not known."""
    loss_without: float | None = None
    """Nats a token that the low-bit model loses without compensation, by the same."""
    bought: Sequence[tuple[float, float]] = ()
    """What other slowdowns would buy: (percent, share of that loss won back), ascending."""
    offer: Offer | None = None
    """The best way to decode within the budget; None where `tune-device` did not measure any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTuning:
    """How far prompts are compensated, for one model, device and budget."""

    budget_percent: float
    """How much longer a prompt may take."""
    k_chunk: int
    """Channels per 1024 that the rows of a prompt share; 1024 is all, 0 none."""
    measured_slowdown_percent: float
    """How much longer the prompt took that was timed."""
    tokens: int
    """Tokens of that; 0 where none was timed."""
    seconds: float = 0.0
    """How long tuning took."""
    date: str = ""
    """When, in UTC; empty where nothing was tuned."""
    cached: bool = False
    """Whether a saved profile had it."""

    @property
    def words(self) -> str:
        """For a person: what is compensated, and what it costs."""
        if not self.k_chunk:
            return "prompts are not compensated"
        much = "fully" if self.k_chunk == CHUNK else f"by {self.k_chunk} of {CHUNK} channels"
        cost = f"{self.measured_slowdown_percent:.1f} % of {self.budget_percent:g} % more time to the first word"
        return f"prompts are compensated {much}; {cost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """`GET /runtime/device`."""

    machine: Mapping[str, Any]
    """`cpu`, `memory`, `gpu`, `pcie` as `lowbit-chat doctor --json` has them; `backend` and `reason` of what runs."""
    bandwidth_gb_s: float | None = None
    """Measured read bandwidth of the memory in 10^9 bytes per second; None where it was not measured yet."""
    tuning: Tuning | None = None
    """How the loaded model was tuned; None where it was not."""
    prompts: PromptTuning | None = None
    """How far its prompts are compensated; None where no budget decides that."""
    problems: Sequence[Problem] = ()
    """What is wrong, of the device and of the loaded model."""
