"""Short stories put together from parts, told on request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from assets.demo_model.exchange import Exchange
from assets.demo_model.topics import content, fill

_BEATS = ("open", "find", "meet", "act", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a story."""

    ask: str
    """The request in words."""
    who: str | None = None
    """The hero asked for, or None for any."""
    place: str | None = None
    """The place asked for, or None for any."""

    def told(self, rng: random.Random) -> Exchange:
        """The request answered with a story drawn with `rng`."""
        return Exchange(group="story", topic="story", ask=self.ask, answer=tell(rng, who=self.who, place=self.place))


def tell(rng: random.Random, *, who: str | None = None, place: str | None = None) -> str:
    """A story of five sentences.

    Args:
        rng: Source of the choices.
        who: The hero, or None to draw one.
        place: The place, or None to draw one.

    Returns:
        The story.
    """
    parts = content("stories")
    slots = {name: rng.choice(parts[name]) for name in ("who", "place", "trait", "thing", "friend", "moral")}
    slots |= {"who": who or slots["who"], "place": place or slots["place"]}
    return " ".join(_correct(_upper(rng.choice(parts[beat]).format(**slots))) for beat in _BEATS)


def requests() -> Iterator[Request]:
    """Every request for a first story."""
    parts = content("stories")
    for ask in parts["ask_any"]:
        yield Request(ask=ask)
    for who in parts["who"]:
        for frame in parts["ask_who"]:
            yield Request(ask=_correct(frame.format(who=who)), who=who)
        for place in parts["place"]:
            for frame in parts["ask_place"]:
                for ask in fill(frame, {"who": (who,), "place": (place,)}):
                    yield Request(ask=_correct(ask), who=who, place=place)


def more_requests() -> tuple[Request, ...]:
    """Requests for one more story, which follow a story."""
    return tuple(Request(ask=ask) for ask in content("stories")["ask_more"])


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _correct(text: str) -> str:
    """`a owl` becomes `an owl`."""
    for article in ("a", "A"):
        for vowel in "aeio":
            text = text.replace(f" {article} {vowel}", f" {article}n {vowel}")
    return text
