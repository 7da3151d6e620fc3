"""Drawn wordings of written questions: patterns whose parts are chosen at random, as hurried people put them."""

from __future__ import annotations

import random
import re
from functools import cache

from assets.demo_model.topics import content

_PART = re.compile(r"<(\w+)>")
_ASKS = re.compile(r"(what|how|which|who|where|why|when|can|could|do|does|is|are|will|should|may|must)\b")
_FRAMES = {"goal": "goals", "subject": "subjects"}

Pattern = tuple["str | tuple[Pattern, ...]", ...]
"""Pieces in order: a text, or alternatives of which one is taken."""


def parse(text: str) -> Pattern:
    """A pattern: `[a|b|]` is one of its alternatives, which may hold patterns themselves; `<name>` a named part.

    Args:
        text: The pattern as written in `content/variety.toml`.

    Returns:
        Its pieces.

    Raises:
        ValueError: A bracket that is not closed or not opened.
    """
    whole = text
    while _PART.search(whole):
        whole = _PART.sub(lambda found: str(content("variety")["parts"][found[1]]), whole)
    pieces, end = _sequence(whole, 0)
    if end != len(whole):
        raise ValueError(f"pattern {text!r} has a bracket too many")
    return pieces


def _sequence(text: str, start: int) -> tuple[Pattern, int]:
    pieces: list[str | tuple[Pattern, ...]] = []
    at = start
    while at < len(text) and text[at] not in "|]":
        if text[at] == "[":
            choices: list[Pattern] = []
            while at < len(text) and text[at] in "[|":
                choice, at = _sequence(text, at + 1)
                choices.append(choice)
            if at >= len(text):
                raise ValueError(f"pattern {text!r} has a bracket that is not closed")
            pieces.append(tuple(choices))
            at += 1
        else:
            end = next((i for i in range(at, len(text)) if text[i] in "[|]"), len(text))
            pieces.append(text[at:end])
            at = end
    return tuple(pieces), at


@cache
def _parsed(text: str) -> Pattern:
    return parse(text)


def filled(rng: random.Random, text: str, **slots: str) -> str:
    """One wording of a pattern.

    Returns:
        The wording, single spaces between words.
    """

    def chosen(pieces: Pattern) -> str:
        return "".join(piece if isinstance(piece, str) else chosen(rng.choice(piece)) for piece in pieces)

    said = chosen(_parsed(text))
    for name, value in slots.items():
        said = said.replace("{" + name + "}", value)
    return re.sub(r" +", " ", said).replace(" ,", ",").strip()


def topics_of(group: str) -> frozenset[str]:
    """Names of the topics of a group (`talk` or `program`) that have patterns."""
    return frozenset(content("variety")[group])


def draw(rng: random.Random, group: str, topic: str) -> str:
    """A question about a topic in drawn words, now and then with capitals and a question mark.

    Returns:
        The question.
    """
    patterns: dict[str, list[str]] = content("variety")[group][topic]
    kind = rng.choice(list(patterns))
    said = filled(rng, rng.choice(patterns[kind]))
    if kind in _FRAMES:
        frame = rng.choice(content("variety")["frames"][kind])
        said = filled(rng, frame, **{kind[0]: said})
    return written(rng, said)


def written(rng: random.Random, said: str) -> str:
    """The words as some write them with care: a capital in front, `I`, a question mark; others leave them."""
    if said[-1].isalnum() and _ASKS.match(said) and rng.random() < 0.35:
        said += "?"
    if rng.random() < 0.5:
        said = re.sub(r"\bi\b", "I", said)
        said = said[0].upper() + said[1:]
    return said
