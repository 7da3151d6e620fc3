"""Held-out questions of every kind, with the check of a right answer to each."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from assets.demo_model import corpus, measures, numbers, person, tales, unknown
from assets.demo_model.corpus import Writer
from assets.demo_model.exchange import Exchange, normalised, split_of
from assets.demo_model.topics import content, words

KINDS = (
    "program",
    "program in free words",
    "program, hurried",
    "facts",
    "talk",
    "talk in free words",
    "addition",
    "subtraction",
    "multiplication",
    "division",
    "remainder",
    "numbers",
    "follow-up",
    "unknown",
    "invented",
    "story",
)
"""Every kind, in the order of the table in `docs/demo-model.md`."""
ARITHMETIC = {"addition": "add", "subtraction": "subtract", "multiplication": "multiply", "division": "divide"}
"""Kinds of calculations and their operations."""
FREE_WORDS = {
    "program in free words": ("free_words", "question"),
    "program, hurried": ("free_more", "sloppy"),
    "talk in free words": ("free_more", "small_talk"),
}
"""Kinds of questions in words of their own, with the file and table they stand in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A conversation up to a question, and what a right answer is."""

    kind: str
    """One of `KINDS`."""
    messages: tuple[dict[str, str], ...]
    """Chat messages, the question last."""
    expected: str
    """The right answer, or a number it must end with, or words that must occur in it."""

    def right(self, answer: str) -> bool:
        """Whether an answer counts.

        A calculation counts by its result, a story if every sentence is right and what was asked for occurs in it, a
        declined question if the answer declines, a question in free words if the expected words occur, a division with
        a remainder by its last words, and anything else if the answer is the expected one but for punctuation.
        """
        if self.kind in ARITHMETIC:
            return bool(answer) and numbers.result_of(answer) == numbers.result_of(self.expected)
        if self.kind in {"unknown", "invented"}:
            return unknown.is_declined(answer)
        if self.kind in FREE_WORDS:
            return normalised(self.expected) in normalised(answer)
        if self.kind == "remainder":
            return f" {normalised(answer)}".endswith(f" {normalised(self.expected)}")
        if self.kind == "story":
            wished = self.expected.split("|")
            return tales.is_sound(answer) and all(normalised(word) in normalised(answer) for word in wished)
        return normalised(answer) == normalised(self.expected)


def questions(count: int, seed: int = 1, kinds: Sequence[str] = KINDS) -> list[Question]:
    """Held-out questions, drawn with a seed.

    Args:
        count: Largest number of a kind.
        seed: Decides which.
        kinds: Kinds wanted.

    Returns:
        The questions, kind after kind.
    """
    made: list[Question] = []
    for kind in kinds:
        rng = random.Random(f"{seed} {kind}")  # noqa: S311  reproducible, not secret
        made += _drawn(kind, rng, count)
    return made


def _drawn(kind: str, rng: random.Random, count: int) -> list[Question]:
    if kind in ARITHMETIC:
        return [_single(kind, exchange) for exchange in _calculations(ARITHMETIC[kind], rng, count)]
    if kind in FREE_WORDS:
        file, table = FREE_WORDS[kind]
        asked = [(ask, part["says"]) for part in content(file)[table] for ask in part["ask"]]
        chosen = rng.sample(asked, min(count, len(asked)))
        return [_question(kind, (), ask, says) for ask, says in chosen]
    if kind in {"program", "facts", "talk", "unknown"}:
        listed = [exchange for exchange in corpus.exchanges("held_out") if exchange.group == kind]
        return [_single(kind, exchange) for exchange in rng.sample(listed, min(count, len(listed)))]
    if kind == "remainder":
        return [_remainder(rng) for _ in range(count)]
    draw = {"numbers": _number, "follow-up": _follow_up, "invented": _invented, "story": _story}[kind]
    return [draw(rng) for _ in range(count)]


def _calculations(operation: str, rng: random.Random, count: int) -> Iterator[Exchange]:
    held = [(a, b) for a, b in numbers.problems(operation) if split_of(numbers.key(operation, a, b)) == "held_out"]
    for a, b in rng.sample(held, min(count, len(held))):
        yield numbers.calculation(operation, a, b, rng.choice(words(operation)))


def _remainder(rng: random.Random) -> Question:
    """A division by a number up to 12 that does not come out whole; the quotient is 1 or more."""
    while True:
        b = rng.randrange(2, 13)
        a = rng.randrange(b, numbers.LARGEST + 1)
        if a % b and split_of(numbers.key("divide", a, b)) == "held_out":
            ask = rng.choice(words("divide")).format(a=a, b=b)
            return _question("remainder", (), ask, f"{a // b} with {a % b} left over")


def _number(rng: random.Random) -> Question:
    while (exchange := measures.draw(rng)).split != "held_out":
        pass
    return _single("numbers", exchange)


def _invented(rng: random.Random) -> Question:
    while (exchange := unknown.draw(rng)).split != "held_out":
        pass
    return _single("invented", exchange)


def _story(rng: random.Random) -> Question:
    while (asked := tales.request(rng)).key and (
        split_of(asked.key) != "held_out" or not asked.wished.keys() & {"who", "place", "name"}
    ):
        pass
    wished = [asked.wished[slot] for slot in ("who", "place", "name", "trait") if slot in asked.wished]
    return _question("story", (), asked.ask, "|".join(wished))


def _follow_up(rng: random.Random) -> Question:
    """A third turn that needs the ones before it: something told, a sum or story that goes on, the program, facts."""
    writer = Writer("held_out", 1)
    if rng.random() < 0.3:
        while (told := person.told(rng, rng.choice(person.kinds()))).tell.split != "held_out":
            pass
        between = writer.thread(rng, rng.choice(("talk", "facts", "arithmetic")))[-1]
        return _question("follow-up", (told.tell, between), told.recall.ask, told.recall.answer)
    while True:
        group = rng.choice(("program", "facts", "arithmetic", "story"))
        turns = writer.thread(rng, group)[:3]
        if len(turns) == 3 and turns[-1].split == "held_out" and turns[-1].topic != "story":
            return _question("follow-up", turns[:2], turns[2].ask, turns[2].answer)


def _single(kind: str, exchange: Exchange) -> Question:
    return _question(kind, (), exchange.ask, exchange.answer)


def _question(kind: str, before: Sequence[Exchange], ask: str, expected: str) -> Question:
    messages: list[dict[str, str]] = []
    for turn in before:
        messages += [{"role": "user", "content": turn.ask}, {"role": "assistant", "content": turn.answer}]
    return Question(kind=kind, messages=(*messages, {"role": "user", "content": ask}), expected=expected)
