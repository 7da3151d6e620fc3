"""Exchanges that are written down: small talk, the program, facts, and questions to decline."""

from __future__ import annotations

import itertools
import re
import string
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from assets.demo_model.exchange import Exchange

_CONTENT = Path(__file__).with_name("content")
_VOWELS = "aeiou"
_MASS_WORDS = frozenset({"bread", "honey", "snow", "rain", "wind", "fire"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """An exchange that makes sense only right after its topic."""

    topic: str
    """The topic before it."""
    exchange: Exchange
    """The follow-up question and answer."""


@cache
def content(name: str) -> dict[str, Any]:
    """Parsed `content/<name>.toml`.

    Args:
        name: File name without its ending.

    Returns:
        The table of the file.
    """
    return tomllib.loads((_CONTENT / f"{name}.toml").read_text(encoding="utf-8"))


def words(name: str) -> tuple[str, ...]:
    """List of strings `name` of `content/frames.toml`."""
    return tuple(content("frames")[name])


def article(word: str) -> str:
    """The word with `a` or `an` before it, or alone where it takes none."""
    if word in _MASS_WORDS:
        return word
    return f"an {word}" if word[0].casefold() in _VOWELS else f"a {word}"


def fill(frame: str, choices: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Every way to fill a frame's slots, each slot from its choices, in order."""
    slots = [slot for _, slot, _, _ in string.Formatter().parse(frame) if slot is not None]
    for values in itertools.product(*(choices[slot] for slot in slots)):
        yield frame.format(**dict(zip(slots, values, strict=True)))


def _topic_exchanges(group: str, topic: dict[str, Any]) -> Iterator[Exchange]:
    unknown_keys = set(topic) - {"name", "ask", "subjects", "goals", "answer", "follow"}
    if unknown_keys:
        raise ValueError(f"{group}.toml: topic {topic['name']!r} has unknown keys {sorted(unknown_keys)}")
    asked = list(topic.get("ask", ()))
    asked += [text for frame in words("subject") for text in fill(frame, {"s": topic.get("subjects", ())})]
    asked += [text for frame in words("goal") for text in fill(frame, {"g": topic.get("goals", ())})]
    for answer in topic["answer"]:
        for ask in asked:
            yield Exchange(group=group, topic=topic["name"], ask=ask, answer=answer)


def talk() -> Iterator[Exchange]:
    """Greetings, small talk, and what the model says about itself."""
    for topic in content("talk")["topic"]:
        yield from _topic_exchanges("talk", topic)


def program() -> Iterator[Exchange]:
    """lowbit-chat: commands, settings, keys, ideas."""
    for topic in content("program")["topic"]:
        yield from _topic_exchanges("program", topic)


@cache
def follow_ups() -> dict[str, tuple[FollowUp, ...]]:
    """Follow-up exchanges by the topic that comes before them."""
    found: dict[str, list[FollowUp]] = {}
    for topic in content("program")["topic"]:
        for part in topic.get("follow", ()):
            for ask in part["ask"]:
                exchange = Exchange(
                    group="program",
                    topic=f"{topic['name']}_follow",
                    ask=ask,
                    answer=part["answer"][0],
                    key=f"{topic['name']}: {ask}",
                )
                found.setdefault(topic["name"], []).append(FollowUp(topic=topic["name"], exchange=exchange))
    return {name: tuple(items) for name, items in found.items()}


def facts() -> Iterator[Exchange]:
    """Short definitions, capitals, opposites, colours, sounds, legs."""
    table = content("knowledge")

    def ask(kind: str, topic: str, answer: str, **slots: str) -> Iterator[Exchange]:
        for frame in words(kind):
            yield Exchange(group="facts", topic=topic, ask=frame.format(**slots), answer=answer)

    for word, text in table["definitions"].items():
        yield from ask("definition", f"define {word}", text, w=word, a=article(word))
    for country, city in table["capitals"].items():
        yield from ask("capital", f"capital of {country}", f"The capital of {country} is {city}.", x=country)
    pairs = table["opposites"] | {second: first for first, second in table["opposites"].items()}
    for word, other in pairs.items():
        yield from ask("opposite", f"opposite of {word}", f"The opposite of {word} is {other}.", x=word)
    for thing, text in table["colours"].items():
        yield from ask("colour", f"colour of {thing}", text, x=thing)
    for kind, prefix in (("sounds", "sound of"), ("legs", "legs of")):
        for animal, text in table[kind].items():
            frames = "sound" if kind == "sounds" else "legs"
            yield from ask(frames, f"{prefix} {animal}", text, x=article(animal))


def unknown() -> Iterator[Exchange]:
    """Questions that the model declines."""
    for name, part in content("unknown").items():
        slots = {key: value for key, value in part.items() if key not in {"answer", "frames"}}
        for frame in part["frames"]:
            for ask in fill(frame, slots):
                yield Exchange(group="unknown", topic=name, ask=ask, answer=part["answer"][0])


def casual(text: str) -> str:
    """The question as a hurried person types it: lower case, no final mark."""
    return re.sub(r"[.?!]$", "", text).lower()
