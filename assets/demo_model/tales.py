"""Short stories put together from parts, told on request, and what can be asked about them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import cache

from assets.demo_model.exchange import Exchange, normalised
from assets.demo_model.topics import content, with_articles

_SLOTS = ("who", "name", "place", "trait", "thing", "friend", "work")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a story."""

    ask: str
    """The request in words."""
    wished: dict[str, str] = field(default_factory=dict)
    """Slots asked for (`who`, `place`, `name`) and the `plot`; empty: any story."""

    @property
    def key(self) -> str:
        """What decides the split: what is asked for, or the words where anything will do."""
        wished = " ".join(f"{name}={value}" for name, value in sorted(self.wished.items()))
        return f"story {wished or normalised(self.ask)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tale:
    """A story and what it is made of."""

    text: str
    """The story."""
    slots: dict[str, str]
    """Its hero `who`, `name`, `place`, `moral` and the rest."""


def tell(rng: random.Random, wished: dict[str, str] | None = None) -> Tale:
    """A story of five or six sentences.

    Returns:
        The story.
    """
    parts = content("stories")
    slots = {name: rng.choice(parts[name]) for name in _SLOTS} | (wished or {})
    plot = parts["plot"][slots.get("plot") or rng.choice(list(parts["plot"]))]
    slots["moral"] = rng.choice(plot["morals"])
    frames = [rng.choice(frames) for frames in (parts["open"], *plot["beats"], parts["close"]["sentences"])]
    text = " ".join(with_articles(_upper(frame.format(**slots))) for frame in frames)
    return Tale(text=text, slots=slots)


def request(rng: random.Random) -> Request:
    """A drawn request for a first story."""
    parts = content("stories")
    ask, plots = parts["ask"], parts["plot"]
    who, place, name = (rng.choice(parts[slot]) for slot in ("who", "place", "name"))
    plot = rng.choice(list(plots))
    theme = rng.choice(plots[plot]["words"])
    kind = rng.choices(("any", "who", "place", "where", "theme", "who_theme", "named"), (2, 5, 5, 1, 2, 2, 2))[0]
    wished = {
        "any": {},
        "who": {"who": who},
        "place": {"who": who, "place": place},
        "where": {"place": place},
        "theme": {"plot": plot},
        "who_theme": {"who": who, "plot": plot},
        "named": {"who": who, "name": name},
    }[kind]
    frame = rng.choice(ask[kind])
    hero = (
        rng.choice((f"a {who}", f"a {who}", f"a {rng.choice(parts['trait'])} {who}")) if kind == "who" else f"a {who}"
    )
    if kind == "who" and hero != f"a {who}":
        wished = wished | {"trait": hero.split(" ")[1]}
    text = frame.format(who=hero, place=place, theme=theme, name=name)
    return Request(ask=with_articles(text), wished=wished)


def told(rng: random.Random, asked: Request) -> tuple[Exchange, Tale]:
    """A request answered."""
    tale = tell(rng, asked.wished)
    return Exchange(group="story", topic="story", ask=asked.ask, answer=tale.text, key=asked.key), tale


def more(rng: random.Random) -> Request:
    """A request for one more story, which follows a story."""
    return Request(ask=rng.choice(content("stories")["ask"]["more"]))


def question(rng: random.Random, tale: Tale) -> Exchange:
    """A question about a story just told."""
    part = rng.choice(content("stories")["question"])
    ask = rng.choice(part["ask"])
    key = f"of the story: {ask} {tale.slots['who']} {tale.slots['name']}"
    return Exchange(group="story", topic="of a story", ask=ask, answer=part["answer"].format(**tale.slots), key=key)


@cache
def _sentence_patterns() -> tuple[re.Pattern[str], ...]:
    parts = content("stories")
    frames = [*parts["open"], *parts["close"]["sentences"]]
    morals = [moral for plot in parts["plot"].values() for moral in plot["morals"]]
    for plot in parts["plot"].values():
        frames += [frame for beat in plot["beats"] for frame in beat]
    choices = {name: "|".join(re.escape(value) for value in parts[name]) for name in _SLOTS if name != "name"}
    choices |= {"moral": "|".join(re.escape(moral) for moral in morals), "name": r"[A-Z]\w+"}

    def pattern(frame: str) -> str:
        text = re.escape(with_articles(_upper(frame))).replace(r"\{", "{").replace(r"\}", "}")
        text = text.replace("a\\ {trait}", "an?\\ {trait}").replace("a\\ {who}", "an?\\ {who}")
        for slot, values in choices.items():
            text = text.replace("{" + slot + "}", f"(?:{values})")
        return text

    return tuple(re.compile(pattern(frame), re.IGNORECASE) for frame in frames)


def is_sound(text: str) -> bool:
    """Whether a story has five or six sentences, each one right, and a single hero's name."""
    sentences = re.findall(r"[^.?]+[.?]", text)
    if not 5 <= len(sentences) <= 6 or "".join(sentences) != text:
        return False
    fits = all(any(p.fullmatch(sentence.strip()) for p in _sentence_patterns()) for sentence in sentences)
    heroes = set(re.findall(r"\b(?:named|called|name of|called the \w+) ([A-Z]\w+)", sentences[0]))
    last = re.search(r"(?:And so|and|then) ([A-Z]\w+) (?:knew|had|the|tells)", sentences[-1])
    return fits and len(heroes) == 1 and last is not None and last[1] in heroes


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
