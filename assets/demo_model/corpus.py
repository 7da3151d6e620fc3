"""All exchanges, their split into training and held-out questions, and conversations made of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from assets.demo_model import facts, manner, measures, numbers, person, tales, topics, unknown, variety
from assets.demo_model.exchange import Exchange, Split, normalised, question_key

SHARES = {
    "talk": 18,
    "program": 29,
    "facts": 5,
    "arithmetic": 22,
    "numbers": 9,
    "unknown": 8,
    "story": 2,
    "person": 6,
    "repeat": 1,
}
"""How often each group is drawn, in percent."""

UNSURE = "I think so, but I can be wrong. Please check what matters."
VARIED_SHARE = 0.65
"""Share of the questions of small talk and the program that are put in drawn words, where a topic has patterns."""
DOUBLE_SHARE = 0.05
"""Share of the threads about the program that ask two things at once."""
_LONGEST_DOUBLE = 320
_LENGTHS = (1, 1, 1, 1, 1, 2, 2, 3, 3, 4, 5)


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
    """Every exchange that can be listed and stands alone, free of duplicates, in a fixed order."""
    sources = (topics.talk, topics.program, facts.facts, unknown.written, _repeats)
    found: dict[str, Exchange] = {}
    for exchange in itertools.chain.from_iterable(source() for source in sources):
        found.setdefault(normalised(exchange.ask), exchange)
    return tuple(exchange for exchange in found.values() if exchange.split == split)


@cache
def held_out_keys() -> frozenset[str]:
    """Words of the held-out questions that the words themselves decide, and of those in free words."""
    listed = [exchange.ask for exchange in exchanges("held_out") if not exchange.key]
    return frozenset(question_key(ask) for ask in (*listed, *topics.free_words()))


@cache
def _topic_asked() -> dict[str, str]:
    """For the words of every listed question of small talk and the program, its topic."""
    listed = itertools.chain(exchanges("train"), exchanges("held_out"))
    return {normalised(exchange.ask): exchange.topic for exchange in listed}


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
        self._names = {group: tuple(by) for group, by in self._topics.items()}

    def conversation(self, index: int, *, turns: int | None = None) -> Conversation:
        """The conversation number `index`.

        Args:
            index: Any whole number from 0; the same number gives the same conversation.
            turns: Least number of exchanges, or None to draw one from 1 to 5.

        Returns:
            The conversation.
        """
        rng = random.Random(f"{self.seed} {self.split} {index} {turns}")  # noqa: S311  reproducible, not secret
        wanted = turns or rng.choice(_LENGTHS)
        system = rng.choice(topics.words("systems")) if rng.random() < 0.1 else None
        done: list[Exchange] = []
        known: dict[str, person.Told] = {}
        while len(done) < wanted:
            if known and rng.random() < 0.3:
                done.append(known[rng.choice(list(known))].recall)
                continue
            group = rng.choices(list(SHARES), list(SHARES.values()))[0]
            more = self._told(rng, known) if group == "person" else self.thread(rng, group)
            if not (known and more[0].topic == "personal"):  # what was told must not be declined
                done += more
        return Conversation(system=system, exchanges=tuple(self._typed(rng, turn) for turn in done))

    def thread(self, rng: random.Random, group: str) -> list[Exchange]:
        """Turns that belong together, of a group other than `person`, the last one (in training all) of this split."""
        while True:
            turns = self._drawn(rng, group)
            if self.split == "held_out" and turns[-1].split == "held_out":
                return turns
            if self.split == "train" and all(_may_be_trained_on(turn) for turn in turns):
                return turns

    def _drawn(self, rng: random.Random, group: str) -> list[Exchange]:
        if group == "story":
            return _story(rng)
        if group == "arithmetic":
            return _continued(rng, numbers.draw(rng))
        if group == "numbers":
            return [measures.draw(rng)]
        if group == "program" and rng.random() < DOUBLE_SHARE:
            return [self._two_at_once(rng)]
        if group == "unknown" and rng.random() < 0.5:
            turns = [unknown.draw(rng)]
        elif group in {"talk", "program"}:
            turns = [self._asked(rng, group)]
        else:
            turns = [rng.choice(self._topics[group][rng.choice(self._names[group])])]
        return turns + _following(rng, turns[0])

    def _asked(self, rng: random.Random, group: str) -> Exchange:
        """A question about a drawn topic, as listed or in drawn words that no other topic's listed question has."""
        topic = rng.choice(self._names[group])
        if topic in variety.topics_of(group) and rng.random() < VARIED_SHARE:
            ask = variety.draw(rng, group, topic)
            if _topic_asked().get(normalised(ask), topic) == topic:
                return Exchange(group=group, topic=topic, ask=ask, answer=topics.answer_of(group, topic))
        return rng.choice(self._topics[group][topic])

    def _two_at_once(self, rng: random.Random) -> Exchange:
        """Two questions about the program in one message, answered one after the other."""
        while True:
            first, second = self._asked(rng, "program"), self._asked(rng, "program")
            answer = f"{first.answer} {second.answer}"
            if first.topic != second.topic and len(answer) <= _LONGEST_DOUBLE:
                ask = manner.joined(rng, first.ask, second.ask)
                return Exchange(group="program", topic=f"{first.topic}, {second.topic}", ask=ask, answer=answer)

    def _told(self, rng: random.Random, known: dict[str, person.Told]) -> list[Exchange]:
        if "name" not in known and rng.random() < 0.07:
            while (asked := person.name_not_told(rng)).split != self.split:
                pass
            return [asked]
        while True:
            kind = rng.choice((*person.kinds(), *("name",) * 5))
            told = person.told(rng, kind)
            if told.tell.split == self.split:
                break
        known[kind] = told
        return [told.tell, told.recall] if rng.random() < 0.3 else [told.tell]

    def _typed(self, rng: random.Random, turn: Exchange) -> Exchange:
        made = manner.typed(rng, turn)
        return made if self.split == "held_out" or _may_be_trained_on(made) else turn


def _may_be_trained_on(turn: Exchange) -> bool:
    """Whether neither the turn's key nor its words are held out."""
    return turn.split == "train" and question_key(turn.ask) not in held_out_keys()


def _continued(rng: random.Random, first: Exchange) -> list[Exchange]:
    turns = [first]
    while rng.random() < 0.3 and len(turns) < 4:
        total = numbers.result_of(turns[-1].answer)
        following = None if total is None else numbers.then(rng, total)
        if following is None:
            break
        turns.append(following)
    if rng.random() < 0.06:
        turns.append(_after(rng, "sure", UNSURE, turns[-1]))
    return turns


def _story(rng: random.Random) -> list[Exchange]:
    exchange, tale = tales.told(rng, tales.request(rng))
    turns = [exchange]
    while rng.random() < 0.35 and len(turns) < 4:
        if rng.random() < 0.2:
            exchange, tale = tales.told(rng, tales.more(rng))
            turns.append(exchange)
        else:
            turns.append(tales.question(rng, tale))
    return turns


def _following(rng: random.Random, first: Exchange) -> list[Exchange]:
    """What may follow a written exchange: a request for the short form, the reason, another thing, the same again."""
    turns: list[Exchange] = []
    more = 0.6 if first.group == "program" and topics.following(first.topic) else 0.3
    while rng.random() < more and len(turns) < 3:
        last = turns[-1] if turns else first
        another = facts.same_of_another(rng, last) if rng.random() < 0.8 else None
        if another is not None:
            turns.append(another)
        elif first.group == "program" and topics.following(first.topic) and rng.random() < 0.85:
            kind = rng.choice(topics.following(first.topic))
            turns.append(topics.follow_up(first.topic, kind, rng.choice(topics.words(kind))))
        else:
            turns.append(_general(rng, first, last))
    return turns


def _general(rng: random.Random, first: Exchange, last: Exchange) -> Exchange:
    kind = rng.choice(("again", "again", "sure", "why"))
    if kind == "why" and first.group in {"unknown", "facts"}:
        return _after(rng, kind, unknown.WHY if first.group == "unknown" else facts.NO_REASON, first)
    return _after(rng, "sure", UNSURE, last) if kind == "sure" else _after(rng, "again", last.answer, last)


def _after(rng: random.Random, kind: str, answer: str, before: Exchange) -> Exchange:
    ask = rng.choice(topics.words(kind))
    key = f"{kind}: {ask} {before.key or question_key(before.ask)}"
    return Exchange(group=before.group, topic=f"{kind} after", ask=ask, answer=answer, key=key)
