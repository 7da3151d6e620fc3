"""Questions that the model declines, very many of them about people, places and things that do not exist."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from assets.demo_model.exchange import Exchange
from assets.demo_model.topics import content, fill, with_articles, words

_INVENTED = re.compile(r"\{\?(\w+)\}")
WHY = "My training was small, so I know only a few things."
"""Answer to `Why?` after a declined question."""


def syllables(rng: random.Random, least: int, most: int) -> str:
    """An invented word of some syllables."""
    count = rng.randrange(least, most + 1)
    text = "".join(rng.choice(words("starts")) + rng.choice(content("frames")["vowels"]) for _ in range(count))
    return text + (rng.choice(content("frames")["ends"]) if rng.random() < 0.6 else "")


def invented(rng: random.Random, kind: str) -> str:
    """An invented thing of a kind: `person`, `place`, `thing`, `year`, `work` or `noise`."""
    if kind == "year":
        return str(rng.randrange(1000, 2100))
    if kind == "noise":
        return (
            syllables(rng, 1, 2)
            if rng.random() < 0.5
            else "".join(rng.choices("asdfghjklqwertyzxcvbnm", k=rng.randrange(3, 9)))
        )
    if kind == "thing":
        return syllables(rng, 2, 3)
    if kind == "place":
        return (syllables(rng, 1, 2) + rng.choice(words("place_ends"))).capitalize()
    if kind == "person":
        return f"{syllables(rng, 1, 2).capitalize()} {syllables(rng, 2, 3).capitalize()}"
    return f"the {syllables(rng, 1, 2).capitalize()} of {syllables(rng, 1, 2).capitalize()}"


def written() -> Iterator[Exchange]:
    """Every question to decline that can be listed."""
    for name, part in content("unknown").items():
        slots = {key: value for key, value in part.items() if key not in {"answer", "frames"}}
        for frame in part["frames"]:
            if not _INVENTED.search(frame):
                for ask in fill(frame, slots):
                    ask = with_articles(ask[0].upper() + ask[1:])
                    yield Exchange(group="unknown", topic=name, ask=ask, answer=part["answer"][0])


def draw(rng: random.Random) -> Exchange:
    """A question about something invented."""
    name = "nonsense" if rng.random() < 0.12 else "invented"
    part = content("unknown")[name]
    frame = rng.choice([frame for frame in part["frames"] if _INVENTED.search(frame)])
    ask = _INVENTED.sub(lambda found: invented(rng, found[1]), frame)
    ask = next(fill(ask, {key: (rng.choice(value),) for key, value in part.items() if key not in {"answer", "frames"}}))
    ask = with_articles(ask[0].upper() + ask[1:])
    return Exchange(group="unknown", topic=f"{name} by chance", ask=ask, answer=part["answer"][0])


def is_declined(answer: str) -> bool:
    """Whether an answer is one of those that decline a question."""
    said = {part["answer"][0] for part in content("unknown").values()}
    return answer.strip() in said
