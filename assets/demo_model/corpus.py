"""All exchanges, their split into training and held-out questions, and conversations made of them."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from assets.demo_model import numbers, tales, topics
from assets.demo_model.exchange import Exchange, Split, normalised, question_key

SHARES = {"talk": 17, "program": 31, "facts": 12, "numbers": 20, "unknown": 11, "story": 5, "name": 2, "repeat": 2}
"""How often each group is drawn, in percent."""

_QUESTION = re.compile(r"^(What|How|Which|Who|Can|Could|Do|Does|Is|Are|Why|Where|When|Should|Tell|Explain|Describe)\b")
_NO_NAME = "You have not told me your name yet."


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A system prompt, perhaps, and exchanges in order."""

    system: str | None
    """System prompt or None."""
    exchanges: tuple[Exchange, ...]
    """The turns; `ask` as it is written in this conversation."""

    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat messages of role and content."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        turns = ((("user", turn.ask), ("assistant", turn.answer)) for turn in self.exchanges)
        return start + [{"role": role, "content": text} for role, text in itertools.chain.from_iterable(turns)]


@cache
def exchanges(split: Split) -> tuple[Exchange, ...]:
    """Every single-turn exchange of a split except stories, free of duplicates, in a fixed order."""
    sources = (topics.talk, topics.program, topics.facts, topics.unknown, *numbers.SOURCES, _names_unknown, _repeats)
    found: dict[str, Exchange] = {}
    for exchange in itertools.chain.from_iterable(source() for source in sources):
        found.setdefault(normalised(exchange.ask), exchange)
    return tuple(exchange for exchange in found.values() if exchange.split == split)


@cache
def story_requests(split: Split) -> tuple[tales.Request, ...]:
    """Every request for a story of a split, free of duplicates."""
    found = {normalised(request.ask): request for request in tales.requests()}
    rng = random.Random(0)  # noqa: S311  the story itself does not matter here
    return tuple(request for request in found.values() if request.told(rng).split == split)


def _names_unknown() -> Iterator[Exchange]:
    for ask in topics.words("name_ask"):
        yield Exchange(group="name", topic="name_unknown", ask=ask, answer=_NO_NAME, key=f"unknown name: {ask}")


def _repeats() -> Iterator[Exchange]:
    vocabulary = topics.words("words")
    frames = topics.words("repeat")
    for i, first in enumerate(vocabulary):
        for j, second in enumerate(vocabulary):
            text = first if first == second else f"{first} {second}"
            ask = frames[(i + 5 * j) % len(frames)].format(words=text)
            yield Exchange(group="repeat", topic="repeat", ask=ask, answer=f"{text[0].upper()}{text[1:]}.")


@cache
def _by_topic(split: Split) -> dict[str, dict[str, tuple[Exchange, ...]]]:
    found: dict[str, dict[str, list[Exchange]]] = {}
    for exchange in exchanges(split):
        found.setdefault(exchange.group, {}).setdefault(exchange.topic, []).append(exchange)
    return {group: {name: tuple(items) for name, items in by.items()} for group, by in found.items()}


class Writer:
    """Draws conversations of one split, reproducibly."""

    def __init__(self, split: Split, seed: int) -> None:
        self.split: Split = split
        self.seed = seed
        self._topics = _by_topic(split)
        self._groups = [group for group in SHARES if group in self._topics or group in {"story", "name"}]

    def conversation(self, index: int, *, turns: int | None = None) -> Conversation:
        """The conversation number `index`.

        Args:
            index: Any whole number from 0; the same number gives the same conversation.
            turns: Least number of exchanges, or None to draw one from 1 to 6.

        Returns:
            The conversation.
        """
        rng = random.Random(f"{self.seed} {self.split} {index} {turns}")  # noqa: S311  reproducible, not secret
        wanted = turns or rng.choice((1, 1, 1, 1, 2, 2, 3, 3, 4, 6))
        system = rng.choice(topics.words("systems")) if rng.random() < 0.15 else None
        done: list[Exchange] = []
        name: str | None = None
        while len(done) < wanted:
            group = rng.choices(self._groups, [SHARES[group] for group in self._groups])[0]
            if group == "name" and (name is None or rng.random() < 0.5):
                name = rng.choice(topics.words("names"))
                done += self._introduction(rng, name)
            elif group == "name":
                done.append(self._recall(rng, name or ""))
            elif group == "story":
                done += self._story(rng)
            else:
                done += self._topic(rng, group)
        return Conversation(system=system, exchanges=tuple(self._typed(rng, turn) for turn in done))

    def _topic(self, rng: random.Random, group: str) -> list[Exchange]:
        chosen = rng.choice(self._topics[group][rng.choice(_weighted(self._topics[group]))])
        turns = [chosen]
        following = [follow.exchange for follow in topics.follow_ups().get(chosen.topic, ())]
        following = [exchange for exchange in following if exchange.split == self.split]
        if following and rng.random() < 0.5:
            turns.append(rng.choice(following))
        if chosen.topic == "add" and rng.random() < 0.2:
            turns += self._more_sum(rng, int(chosen.answer.rsplit(" ", 1)[1]))
        return turns

    def _more_sum(self, rng: random.Random, total: int) -> list[Exchange]:
        if total > numbers.LARGEST_TERM:
            return []
        b = rng.randrange(1, 11)
        answer = f"{total} + {b} = {total + b}"
        made = (
            Exchange(group="numbers", topic="then_add", ask=frame.format(b=b), answer=answer, key=f"add {total} {b}")
            for frame in topics.words("then_add")
        )
        allowed = [exchange for exchange in made if exchange.split == self.split]
        return [rng.choice(allowed)] if allowed else []

    def _story(self, rng: random.Random) -> list[Exchange]:
        turns = [rng.choice(story_requests(self.split)).told(rng)]
        while rng.random() < 0.15:
            turns.append(rng.choice(tales.more_requests()).told(rng))
        return turns

    def _introduction(self, rng: random.Random, name: str) -> list[Exchange]:
        frames = [frame.format(name=name) for frame in topics.words("name_tell")]
        asked = [text for text in frames if Exchange(group="name", topic="", ask=text, answer="").split == self.split]
        if not asked:
            return []
        answer = f"Nice to meet you, {name}! What would you like to know?"
        told = Exchange(group="name", topic="name_told", ask=rng.choice(asked), answer=answer)
        between = self._topic(rng, rng.choice(("talk", "facts", "numbers"))) if rng.random() < 0.4 else []
        return [told, *between, self._recall(rng, name)] if rng.random() < 0.7 else [told]

    def _recall(self, rng: random.Random, name: str) -> Exchange:
        ask = rng.choice(topics.words("name_ask"))
        return Exchange(group="name", topic="name_recalled", ask=ask, answer=f"Your name is {name}.")

    def _typed(self, rng: random.Random, turn: Exchange) -> Exchange:
        text = turn.ask
        prefix = rng.choice(topics.words("polite"))
        if prefix and _QUESTION.match(text):
            text = prefix + text[0].lower() + text[1:]
        if rng.random() < 0.12:
            text = topics.casual(text)
        elif text[-1] not in ".?!" and not text[-1].isdigit() and rng.random() < 0.5:
            text += "."
        return Exchange(group=turn.group, topic=turn.topic, ask=text, answer=turn.answer, key=turn.key)


def _weighted(by_topic: dict[str, tuple[Exchange, ...]]) -> tuple[str, ...]:
    """Topic names, the three kinds of arithmetic repeated so that they are not lost among the small topics."""
    return tuple(name for name in by_topic for _ in range(12 if name in {"add", "subtract", "multiply"} else 1))


def asked_twice() -> list[tuple[str, str]]:
    """Questions of the held-out split whose words also occur in training, which must be none."""
    train = {question_key(exchange.ask) for exchange in exchanges("train") if not exchange.key}
    return [(e.topic, e.ask) for e in exchanges("held_out") if not e.key and question_key(e.ask) in train]
