"""The offers within a slowdown budget: the measured ways to decode a model, and the best one that the budget allows.

A way is a target (which verifies drafts, or decodes alone) and the number of tokens drafted per round. Its loss and
time are measured. Without a full-precision loss to compare with, more compensation counts as better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Target = Literal["plain", "compensated", "residual"]
"""By rising quality."""
_IN_WORDS: dict[Target, str] = {
    "plain": "low bits alone",
    "compensated": "low bits, compensated within the budget",
    "residual": "low bits with all residuals",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingMode:
    """One way to decode."""

    target: Target
    """`plain`: low bits without compensation; `compensated`: with what the budget buys; `residual`: with everything."""
    gamma: int
    """Tokens drafted per round; 0 for plain decoding."""
    seconds: float
    """Mean time per token."""
    perplexity: float
    """The target's perplexity on the evaluation text, formatted as a chat."""
    acceptance_rate: float | None = None
    """Share of the drafted tokens that were accepted; None without drafts."""

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.perplexity > 0:
            raise ValueError(f"not a measured way to decode: {self}")


def best(ways: Sequence[DecodingMode], budget_percent: float, *, drafts: bool = True) -> DecodingMode:
    """The way with the lowest loss within the budget, relative to low bits alone.

    Of several ways with the same target, only the fastest counts. Perplexities within 0.1 % count as equal; the faster
    way then wins. The way that is compensated within the budget and drafts nothing always counts as within the budget,
    because the tuner verified that with far more readings.

    Args:
        ways: The ways measured in one run, including low bits alone.
        budget_percent: Allowed slowdown.
        drafts: Whether to consider ways that draft.
    """
    plain = _plain(ways)
    allowed = plain.seconds * (1 + budget_percent / 100)
    usual = [way for way in ways if drafts or not way.gamma]
    within = [way for way in usual if way.seconds <= allowed or (way.target == "compensated" and not way.gamma)]
    least = min(way.perplexity for way in within)
    return min((way for way in within if way.perplexity <= 1.001 * least), key=lambda way: way.seconds)


def _plain(ways: Sequence[DecodingMode]) -> DecodingMode:
    return next(way for way in ways if way.target == "plain" and not way.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """The ways to decode a model on a device, and the budget that chooses among them."""

    budget_percent: float
    """The budget."""
    ways: tuple[DecodingMode, ...]
    """All measured ways."""
    full: float | None
    """Perplexity of the full-precision model on the same text; None where it is not known."""
    seconds: float
    """Duration of the measurement in seconds."""
    date: str
    """Time of its end in ISO format."""

    def __post_init__(self) -> None:
        if not any(way.target == "plain" and not way.gamma for way in self.ways):
            raise ValueError("there is nothing to compare the ways to decode with")
        if self.full is not None and not self.full > 0:
            raise ValueError(f"{self.full} is not a perplexity")

    @property
    def chosen(self) -> DecodingMode:
        """The best within the budget."""
        return self.best()

    def best(self, *, drafts: bool = True, residual: bool = True) -> DecodingMode:
        """The best allowed way within the budget.

        Args:
            drafts: Whether ways that draft tokens are allowed.
            residual: Whether ways that read every residual are allowed.
        """
        ways = [way for way in self.ways if residual or way.target != "residual"]
        return best(ways, self.budget_percent, drafts=drafts)

    def slowdown_percent(self, way: DecodingMode) -> float:
        """Slowdown of a token against low bits alone; negative where drafts make it faster."""
        return 100 * (way.seconds / _plain(self.ways).seconds - 1)

    def words(self, way: DecodingMode) -> str:
        """A description: `within 0.3 % of full precision, 11 % slower than low bits alone (...)`."""
        slower = self.slowdown_percent(way)
        speed = f"{abs(slower):.0f} % {'slower' if slower > 0 else 'faster'}" if abs(slower) >= 0.5 else "no slower"
        if self.full is None:
            quality = f"perplexity {way.perplexity:.2f} (full precision unknown)"
        else:
            more = 100 * (way.perplexity / self.full - 1)
            quality = "as good as full precision" if more < 0.05 else f"within {_rounded_up(more)} % of full precision"
        drafted = "no drafts"
        if way.gamma:
            drafted = f"{way.gamma} tokens drafted per round, {way.acceptance_rate or 0:.0%} accepted"
        return f"{quality}, {speed} than low bits alone ({_IN_WORDS[way.target]}; {drafted})"


def _rounded_up(percent: float) -> str:
    """Rounded up, with one decimal below 10."""
    return f"{math.ceil(10 * percent) / 10:g}" if percent < 10 else f"{math.ceil(percent)}"
