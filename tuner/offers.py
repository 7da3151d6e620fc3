"""The offers within a slowdown budget: the measured ways to decode a model, and the best one that the budget allows.

A way is a target (which verifies drafts, or decodes alone) and the number of tokens drafted per round. Its loss and
time are measured. Without a full-precision loss to compare with, more compensation counts as better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from tuner.profiles import KeyedStore, ProfileKey, count_of

Target = Literal["plain", "compensated", "residual"]
_TARGETS: tuple[Target, ...] = get_args(Target)
"""By rising quality."""
_FORMAT = 1
_IN_WORDS: dict[Target, str] = {
    "plain": "low bits alone",
    "compensated": "low bits, compensated within the budget",
    "residual": "low bits with all residuals",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
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


def best(ways: Sequence[Way], budget_percent: float, *, drafts: bool = True) -> Way:
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


def _plain(ways: Sequence[Way]) -> Way:
    return next(way for way in ways if way.target == "plain" and not way.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """The ways to decode a model on a device, and the budget that chooses among them."""

    key: ProfileKey
    """The key of the measurement, with the budget."""
    ways: tuple[Way, ...]
    """All measured ways."""
    full: float | None
    """Perplexity of the full-precision model on the same text; None where it is not known."""
    seconds: float
    """Duration of the measurement in seconds."""
    date: str
    """Time of its end in ISO format."""

    @property
    def chosen(self) -> Way:
        """The best within the budget."""
        return self.best()

    def best(self, *, drafts: bool = True, residual: bool = True) -> Way:
        """The best allowed way within the budget.

        Args:
            drafts: Whether ways that draft tokens are allowed.
            residual: Whether ways that read every residual are allowed.
        """
        ways = [way for way in self.ways if residual or way.target != "residual"]
        return best(ways, self.key.budget_percent, drafts=drafts)

    def slowdown_percent(self, way: Way) -> float:
        """Slowdown of a token against low bits alone; negative where drafts make it faster."""
        return 100 * (way.seconds / _plain(self.ways).seconds - 1)

    def words(self, way: Way) -> str:
        """A description: `within 0.3 % of full precision at 0.9 x the low-bit speed (...)`."""
        speed = f"{_plain(self.ways).seconds / way.seconds:.2g} x the low-bit speed"
        if self.full is None:
            quality = f"perplexity {way.perplexity:.2f} (full precision unknown)"
        else:
            more = 100 * (way.perplexity / self.full - 1)
            quality = "as good as full precision" if more < 0.05 else f"within {_rounded_up(more)} % of full precision"
        drafted = "no drafts"
        if way.gamma:
            drafted = f"{way.gamma} tokens drafted per round, {way.acceptance_rate or 0:.0%} accepted"
        return f"{quality} at {speed} ({_IN_WORDS[way.target]}; {drafted})"


def _rounded_up(percent: float) -> str:
    """Rounded up, with one decimal below 10."""
    return f"{math.ceil(10 * percent) / 10:g}" if percent < 10 else f"{math.ceil(percent)}"


class OfferStore(KeyedStore[Offers]):
    """Offers in a folder, one file each, next to the profiles of decoding.

    Args:
        folder: The folder; created when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _offers, form=_FORMAT, suffix=".offers.json")


def _offers(key: ProfileKey, data: Mapping[str, Any]) -> Offers:
    """Read what was saved.

    Raises:
        KeyError, TypeError, ValueError: it is malformed.
    """
    if data.keys() != {field.name for field in fields(Offers)} - {"key"}:
        raise ValueError("not the fields of offers")
    ways = tuple(_way(own) for own in data["ways"])
    if not any(way.target == "plain" and not way.gamma for way in ways):
        raise ValueError("nothing to compare with")
    full = None if data["full"] is None else _positive(data["full"])
    return Offers(key=key, ways=ways, full=full, seconds=float(data["seconds"]), date=str(data["date"]))


def _way(data: Mapping[str, Any]) -> Way:
    if data["target"] not in _TARGETS:
        raise ValueError("not a target")
    rate = data["acceptance_rate"]
    way = Way(
        target=cast("Target", data["target"]),
        gamma=count_of(data["gamma"]),
        seconds=_positive(data["seconds"]),
        perplexity=_positive(data["perplexity"]),
        acceptance_rate=None if rate is None else float(rate),
    )
    if asdict(way) != dict(data):
        raise ValueError("not a way")
    return way


def _positive(value: object) -> float:
    number = float(cast("float", value))
    if not 0 < number < math.inf:
        raise ValueError(f"{value!r} is not a positive number")
    return number
