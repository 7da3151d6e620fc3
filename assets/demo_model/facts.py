"""Exchanges about the world: definitions, capitals, opposites, colours, sounds, legs, general knowledge."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from assets.demo_model.exchange import Exchange
from assets.demo_model.topics import content, words

NO_REASON = "I don't know the reason. I only learned the fact."
FOLLOWED = ("capital", "opposite", "colour", "sound", "legs", "define")
"""Topics after which `And X?` asks the same of another thing."""


def article(word: str) -> str:
    """The defined word as its definition begins: `a cat`, `the sun`, or `bread` where it takes no article."""
    first = content("knowledge")["definitions"][word].split(" ", 1)[0].casefold()
    return f"{first} {word}" if first in {"a", "an", "the"} else word


def indefinite(word: str) -> str:
    """The word with `a` or `an`."""
    return f"an {word}" if word[0].casefold() in "aeio" else f"a {word}"


def _asked(frames: str, topic: str, subject: str, answer: str, **slots: str) -> Iterator[Exchange]:
    for frame in words(frames):
        ask = frame.format(**slots)
        ask = ask[0].upper() + ask[1:]
        yield Exchange(group="facts", topic=f"{topic} {subject}", ask=ask, answer=answer, subject=subject)


def facts() -> Iterator[Exchange]:
    """Every exchange of this module that stands alone."""
    table = content("knowledge")
    for word, text in table["definitions"].items():
        yield from _asked("definition", "define", article(word), text, w=word, a=article(word))
    for country in table["capitals"]:
        yield from _asked("capital", "capital", country, capital(country), x=country)
    for word, other in opposites().items():
        yield from _asked("opposite", "opposite", word, f"The opposite of {word} is {other}.", x=word)
    for thing, text in table["colours"].items():
        yield from _asked("colour", "colour", thing, text, x=thing)
    for animal, text in table["sounds"].items():
        yield from _asked("sound", "sound", indefinite(animal), text, x=indefinite(animal))
    for animal, text in table["legs"].items():
        yield from _asked("legs", "legs", indefinite(animal), text, x=indefinite(animal))
    for topic in table["general"]:
        for ask in topic["ask"]:
            yield Exchange(group="facts", topic=topic["name"], ask=ask, answer=topic["answer"])


def capital(country: str) -> str:
    """The sentence about a country's capital."""
    return f"The capital of {country} is {content('knowledge')['capitals'][country]}."


@cache
def opposites() -> dict[str, str]:
    """Opposites in both directions; the first one written wins."""
    pairs: dict[str, str] = {}
    for first, second in content("knowledge")["opposites"].items():
        pairs.setdefault(first, second)
    for first, second in content("knowledge")["opposites"].items():
        pairs.setdefault(second, first)
    return pairs


@cache
def _answers() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for exchange in facts():
        if exchange.subject:
            kind = exchange.topic.split(" ", 1)[0]
            found.setdefault(kind, {})[exchange.subject] = exchange.answer
    return found


def same_of_another(rng: random.Random, before: Exchange) -> Exchange | None:
    """`And X?` after a fact, or None where that has no sense."""
    kind = before.topic.split(" ", 1)[0]
    if kind not in FOLLOWED or not before.subject:
        return None
    known = _answers()[kind]
    subject = rng.choice(list(known))
    frame = rng.choice(words("and_x"))
    return Exchange(
        group="facts",
        topic=f"{kind} {subject}",
        ask=frame.format(x=subject),
        answer=known[subject],
        subject=subject,
        key=f"and {kind} {subject}: {frame}",
    )
