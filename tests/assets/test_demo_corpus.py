"""The dialogues: deterministic, free of duplicates, and no held-out question in training."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from assets.demo_model import corpus, numbers, tales, topics
from assets.demo_model.corpus import Writer
from assets.demo_model.exchange import Exchange, normalised, question_key

GROUPS = {"talk", "program", "facts", "numbers", "unknown"}


def test_no_question_twice() -> None:
    asked = [normalised(exchange.ask) for split in ("train", "held_out") for exchange in corpus.exchanges(split)]
    assert len(asked) == len(set(asked)) > 15_000


def test_no_held_out_question_in_training() -> None:
    assert corpus.asked_twice() == []


def test_conversations_for_training_hold_no_held_out_question() -> None:
    writer = Writer("train", 1)
    turns = [turn for index in range(4000) for turn in writer.conversation(index).exchanges]
    # Requests for one more story, and asking for the name, belong to both splits: what came before decides the answer.
    context = {"name_recalled", "name_unknown", "story"}
    held = {question_key(e.ask) for e in corpus.exchanges("held_out") if not e.key}
    leaked = [
        turn.ask for turn in turns if turn.topic not in context and not turn.key and question_key(turn.ask) in held
    ]
    assert leaked == []
    assert all(turn.split == "train" for turn in turns if turn.key)


def test_arithmetic_pairs_are_held_out_with_all_their_phrasings() -> None:
    train, held = ({e.key for e in corpus.exchanges(s) if e.topic == "add"} for s in ("train", "held_out"))
    assert train.isdisjoint(held)
    assert 20 <= len(held) <= 60


def test_every_kind_of_knowledge_is_held_out_too() -> None:
    for split in ("train", "held_out"):
        assert {exchange.group for exchange in corpus.exchanges(split)} >= GROUPS
    train, held = ({(e.group, e.topic) for e in corpus.exchanges(s)} for s in ("train", "held_out"))
    assert held <= train, "a held-out question must ask about something that training teaches"


def test_conversations_repeat_exactly_and_differ_by_number_and_seed() -> None:
    first, again, other = Writer("train", 1), Writer("train", 1), Writer("train", 2)
    made = [first.conversation(i).messages() for i in range(200)]
    assert made == [again.conversation(i).messages() for i in range(200)]
    assert made != [other.conversation(i).messages() for i in range(200)]
    assert len({str(messages) for messages in made}) > 190


def test_messages_alternate_and_end_with_an_answer() -> None:
    for index in range(300):
        messages = Writer("held_out", 3).conversation(index).messages()
        roles = [message["role"] for message in messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"].strip() for message in messages)


def test_long_conversations() -> None:
    assert len(Writer("train", 1).conversation(5, turns=24).exchanges) >= 24


def test_sums_are_right() -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    seen = 0
    for exchange in numbers.arithmetic():
        a, sign, b, result = re.fullmatch(r"(\d+) ([+*-]) (\d+) = (\d+)", exchange.answer).groups()  # type: ignore[union-attr]
        assert operations[sign](int(a), int(b)) == int(result)
        assert str(int(a)) in exchange.ask
        seen += 1
    assert seen > 7000


def test_follow_up_sums_continue_the_sum() -> None:
    writer, seen = Writer("train", 1), 0
    for index in range(3000):
        turns = writer.conversation(index).exchanges
        for before, after in itertools.pairwise(turns):
            if after.topic == "then_add":
                seen += 1
                assert after.answer.split(" ")[0] == before.answer.split(" ")[-1]
    assert seen > 20


def test_a_name_that_is_recalled_was_told_last() -> None:
    writer, seen = Writer("train", 1), 0
    for index in range(4000):
        told = None
        for turn in writer.conversation(index).exchanges:
            if turn.topic == "name_told":
                told = re.search(r"you, (\w+)!", turn.answer).group(1)  # type: ignore[union-attr]
            if turn.topic == "name_recalled":
                seen += 1
                assert turn.answer == f"Your name is {told}."
    assert seen > 50


def test_stories_are_five_sentences_about_what_was_asked() -> None:
    rng = random.Random(0)
    for request in list(tales.requests())[::17]:
        story = request.told(rng).answer
        assert story.count(".") == 5
        assert request.who is None or request.who in story
        assert request.place is None or request.place in story
        assert not re.search(r"\b[Aa] [aeio]\w+|[{}]", f"{request.ask} {story}")


def test_slots_are_filled_everywhere() -> None:
    for split in ("train", "held_out"):
        for exchange in corpus.exchanges(split):
            assert "{" not in exchange.ask + exchange.answer
            assert "  " not in exchange.ask
            assert exchange.ask.isascii()
            assert exchange.answer.isascii()


def test_unknown_keys_of_a_topic_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"topic": [{"name": "x", "ask": ["y"], "answer": ["z"], "asks": []}]}
    monkeypatch.setattr(topics, "content", lambda name: table)
    with pytest.raises(ValueError, match="unknown keys"):
        list(topics.talk())


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("Hello, who are you?", "who are you"),
        ("Please tell me a joke", "a joke"),
        ("A story, please", "a story"),
        ("Hi", "hi"),
        ("What's 3*4?", "whats 3 * 4"),
    ],
)
def test_question_key(text: str, key: str) -> None:
    assert question_key(text) == key


def test_the_split_goes_by_the_question_alone() -> None:
    first = Exchange(group="talk", topic="a", ask="Who are you?", answer="x")
    second = Exchange(group="facts", topic="b", ask="hello, who are you", answer="y")
    assert first.split == second.split
