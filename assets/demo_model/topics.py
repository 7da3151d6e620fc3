"""Exchanges that are written down: small talk and the program, with what can follow them."""

from __future__ import annotations

import itertools
import string
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from assets.demo_model.exchange import Exchange

_CONTENT = Path(__file__).with_name("content")
_PROGRAM_FILES = ("program", "methods", "options", "interface")
FOLLOWING = ("short", "why", "how", "example")
"""What can be asked after an answer about the program; frames of these names ask it."""


@cache
def content(name: str) -> dict[str, Any]:
    """Parsed `content/<name>.toml`.

    Returns:
        The table of the file.
    """
    return tomllib.loads((_CONTENT / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def words(name: str) -> tuple[str, ...]:
    """List of strings `name` of `content/frames.toml`, without repetitions."""
    return tuple(dict.fromkeys(content("frames")[name]))


def fill(frame: str, choices: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Every way to fill a frame's slots, each slot from its choices, in order."""
    slots = [slot for _, slot, _, _ in string.Formatter().parse(frame) if slot is not None]
    for values in itertools.product(*(choices[slot] for slot in slots)):
        yield frame.format(**dict(zip(slots, values, strict=True)))


def with_articles(text: str) -> str:
    """`a owl` becomes `an owl`."""
    for article in ("a", "A"):
        for vowel in "aeio":
            text = text.replace(f" {article} {vowel}", f" {article}n {vowel}")
    return text


def _topic_exchanges(group: str, topic: dict[str, Any]) -> Iterator[Exchange]:
    unknown_keys = set(topic) - {"name", "ask", "subjects", "goals", "answer"}
    if unknown_keys:
        raise ValueError(f"{group}.toml: topic {topic['name']!r} has unknown keys {sorted(unknown_keys)}")
    asked = list(topic.get("ask", ()))
    asked += [text for frame in words("subject") for text in fill(frame, {"s": topic.get("subjects", ())})]
    asked += [text for frame in words("goal") for text in fill(frame, {"g": topic.get("goals", ())})]
    for answer in topic["answer"]:
        for ask in asked:
            yield Exchange(group=group, topic=topic["name"], ask=ask[0].upper() + ask[1:], answer=answer)


def talk() -> Iterator[Exchange]:
    """Greetings, small talk, and what the model says about itself."""
    for topic in content("talk")["topic"]:
        yield from _topic_exchanges("talk", topic)


def program() -> Iterator[Exchange]:
    """lowbit-chat: commands, settings, keys, ideas."""
    for name in _PROGRAM_FILES:
        for topic in content(name)["topic"]:
            yield from _topic_exchanges("program", topic)


@cache
def _answers(group: str = "program") -> dict[str, str]:
    files = _PROGRAM_FILES if group == "program" else (group,)
    return {topic["name"]: topic["answer"][0] for name in files for topic in content(name)["topic"]}


def answer_of(group: str, topic: str) -> str:
    """What is answered about a topic of `talk` or `program`."""
    return _answers(group)[topic]


@cache
def free_words() -> tuple[str, ...]:
    """Questions in words of their own that are only for scoring."""
    parts = (*content("free_words")["question"], *content("free_more")["sloppy"], *content("free_more")["small_talk"])
    return tuple(ask for part in parts for ask in part["ask"])


def following(topic: str) -> tuple[str, ...]:
    """The kinds of `FOLLOWING` for which there is an answer after a topic of the program."""
    written = content("follow").get(topic, {})
    told = _answers()[topic].startswith(("Use ", "Press ", "Type ", "Add ")) and bool(written)
    return tuple(kind for kind in FOLLOWING if kind in written or (kind == "how" and told))


def follow_up(topic: str, kind: str, frame: str) -> Exchange:
    """A follow-up after a topic of the program; topic, kind and words together decide the split."""
    answer = content("follow")[topic].get(kind) or _answers()[topic]
    key = f"{topic} {kind}: {frame}"
    return Exchange(group="program", topic=f"{topic}_{kind}", ask=frame, answer=answer, key=key)
