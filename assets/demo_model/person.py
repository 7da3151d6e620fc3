"""Exchanges in which a person tells something about themselves and asks for it later."""

from __future__ import annotations

import random
from dataclasses import dataclass

from assets.demo_model.exchange import Exchange
from assets.demo_model.topics import content, words
from assets.demo_model.unknown import syllables
from assets.demo_model.variety import filled, written


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Something told, and the question that later asks for it."""

    tell: Exchange
    """What the person says, and the model's reply."""
    recall: Exchange
    """The question and what was told."""


def kinds() -> tuple[str, ...]:
    """What can be told, such as `name` and `age`."""
    return tuple(content("person"))


def value(rng: random.Random, kind: str) -> str:
    """Something of a kind that can be told; names and places are invented half of the time."""
    if kind == "age":
        return str(rng.randrange(5, 100))
    known = words("names") if kind in {"name", "dog", "cat", "sister", "brother"} else content("person")[kind]["values"]
    if kind in {"name", "dog", "cat", "sister", "brother", "city"} and rng.random() < 0.5:
        return syllables(rng, 1, 3).capitalize()
    chosen: str = rng.choice(known)
    return chosen


def told(rng: random.Random, kind: str) -> Told:
    """Something drawn that a person tells and asks for."""
    part = content("person")[kind]
    thing = value(rng, kind)
    tell_frame, ask_frame = rng.choice(part["tell"]), rng.choice(part["ask"])
    if kind == "name" and rng.random() < 0.5:
        tell_frame, ask_frame = _drawn(rng, "name_tell"), _drawn(rng, "name_ask")
    slots = {"x": thing, "X": thing[0].upper() + thing[1:]}
    return Told(
        tell=Exchange(
            group="person",
            topic=f"{kind} told",
            ask=tell_frame.format(**slots),
            answer=part["reply"].format(**slots),
            key=f"told {kind} {thing}",
        ),
        recall=Exchange(
            group="person",
            topic=f"{kind} recalled",
            ask=ask_frame,
            answer=part["recall"].format(**slots),
            key=f"told {kind} {thing}",
        ),
    )


def _drawn(rng: random.Random, kind: str) -> str:
    return written(rng, filled(rng, rng.choice(content("variety")["person"][kind])))


def name_not_told(rng: random.Random) -> Exchange:
    """The question for a name that was never told."""
    part = content("person")["name"]
    ask = rng.choice(part["ask"]) if rng.random() < 0.5 else _drawn(rng, "name_ask")
    return Exchange(
        group="person", topic="name not told", ask=ask, answer=part["untold"], key=f"untold {ask.casefold()}"
    )
