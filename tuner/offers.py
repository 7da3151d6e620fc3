"""What a slowdown budget buys in quality: ways to decode a model, and which of them is the best that the budget allows.

A way is what verifies (or decodes alone), and how many tokens are drafted for it. Its loss and its time are measured;
a loss that nothing is known to compare with stays unknown, and more compensation then counts as better.
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
    "residual": "low bits with every residual",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to decode."""

    target: Target
    """`plain`: low bits without compensation; `compensated`: with what the budget buys; `residual`: with everything."""
    gamma: int
    """Tokens drafted a round; 0: each token is decoded by itself."""
    seconds: float
    """Of a token, on average."""
    perplexity: float
    """Of the target on the evaluation text, as a chat gets it."""
    acceptance_rate: float | None = None
    """Part of the drafted tokens that stayed; None where nothing is drafted."""


def best(ways: Sequence[Way], budget_percent: float, *, drafts: bool = True) -> Way:
    """The way of least loss whose tokens take at most so much longer than those of low bits alone.

    Of ways of the same target the fastest counts. Perplexities within a thousandth are alike: then the faster one.
    What is compensated within the budget and drafts nothing is within it, whatever its time was here: the tuner held it
    to the budget, with far more readings.

    Args:
        ways: Measured in one run; that of low bits alone among them.
        budget_percent: Slowdown that is allowed.
        drafts: Whether ways that draft count.
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
    """The ways of a model on a device, and what a budget chooses of them."""

    key: ProfileKey
    """What they were measured for, with the budget."""
    ways: tuple[Way, ...]
    """All that were measured."""
    full: float | None
    """Perplexity of the full-precision model on the same text; None where it is not known."""
    seconds: float
    """How long that took."""
    date: str
    """When it ended, in ISO format."""

    @property
    def chosen(self) -> Way:
        """The best within the budget."""
        return self.best()

    def best(self, *, drafts: bool = True, residual: bool = True) -> Way:
        """The best within the budget, of those that may be taken.

        Args:
            drafts: Whether tokens may be drafted.
            residual: Whether every residual may be read.
        """
        ways = [way for way in self.ways if residual or way.target != "residual"]
        return best(ways, self.key.budget_percent, drafts=drafts)

    def slowdown_percent(self, way: Way) -> float:
        """How much longer a token takes than with low bits alone; negative where drafts make it faster."""
        return 100 * (way.seconds / _plain(self.ways).seconds - 1)

    def words(self, way: Way) -> str:
        """For a person: `within 0.3 % of full precision at 0.9 x the low-bit speed (...)`."""
        speed = f"{_plain(self.ways).seconds / way.seconds:.2g} x the low-bit speed"
        if self.full is None:
            quality = f"perplexity {way.perplexity:.2f}, that of full precision unknown,"
        else:
            more = 100 * (way.perplexity / self.full - 1)
            quality = "as good as full precision" if more < 0.05 else f"within {_rounded_up(more)} % of full precision"
        drafted = "no drafts"
        if way.gamma:
            drafted = f"{way.gamma} tokens drafted a round, {way.acceptance_rate or 0:.0%} accepted"
        return f"{quality} at {speed} ({_IN_WORDS[way.target]}; {drafted})"


def _rounded_up(percent: float) -> str:
    """With one digit behind the point below 10, and never less than it is."""
    return f"{math.ceil(10 * percent) / 10:g}" if percent < 10 else f"{math.ceil(percent)}"


class OfferStore(KeyedStore[Offers]):
    """Offers in a folder, one file each, beside the profiles of decoding.

    Args:
        folder: Where; made when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _offers, form=_FORMAT, suffix=".offers.json")


def _offers(key: ProfileKey, data: Mapping[str, Any]) -> Offers:
    """Read what was saved.

    Raises:
        KeyError, TypeError, ValueError: it is not that.
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
