"""Drawn wordings: patterns are read rightly, ask about their own topic, and never as a question of the score does."""

from __future__ import annotations

import random
import re

import pytest

from assets.demo_model import corpus, manner, topics, variety
from assets.demo_model.corpus import Writer
from assets.demo_model.exchange import normalised, question_key


def _every(pieces: variety.Pattern) -> set[str]:
    texts = {""}
    for piece in pieces:
        ends = {piece} if isinstance(piece, str) else {end for choice in piece for end in _every(choice)}
        texts = {text + end for text in texts for end in ends}
    return texts


def test_patterns_give_every_combination_of_their_alternatives() -> None:
    pieces = variety.parse("[a|b [c|d]|]-[e|f]")
    assert _every(pieces) == {f"{first}-{last}" for first in ("a", "b c", "b d", "") for last in "ef"}
    rng = random.Random(1)
    assert {variety.filled(rng, "[x|y ]  {g}", g="z") for _ in range(50)} == {"x z", "y z"}


@pytest.mark.parametrize(("text", "message"), [("[a|b", "not closed"), ("a]b", "too many"), ("a|b", "too many")])
def test_patterns_with_wrong_brackets(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variety.parse(text)


@pytest.mark.parametrize("group", ["talk", "program"])
def test_drawn_questions_are_clean_many_and_of_one_topic(group: str) -> None:
    rng = random.Random(2)
    asked: dict[str, set[str]] = {}
    for topic in sorted(variety.topics_of(group)):
        assert topics.answer_of(group, topic)
        drawn = {variety.draw(rng, group, topic) for _ in range(60)}
        assert len(drawn) > 8, topic
        for text in drawn:
            assert text
            assert not re.search(r"[<>{}|\[\]]|  |^ | $", text), text
            asked.setdefault(normalised(text), set()).add(topic)
    shared = {text for text, named in asked.items() if len(named) > 1}
    assert len(shared) < 0.002 * len(asked), shared


def test_every_topic_of_the_program_can_be_asked_in_drawn_words() -> None:
    assert variety.topics_of("program") == {e.topic for e in topics.program()}


def test_free_words_are_held_out_of_training() -> None:
    free = {question_key(ask) for ask in topics.free_words()}
    assert free <= corpus.held_out_keys()
    listed = {question_key(exchange.ask) for exchange in corpus.exchanges("train")}
    assert free & listed == set()
    rng, writer = random.Random(3), Writer("train", 1)
    asked = [turn.ask for _ in range(2500) for turn in writer.thread(rng, rng.choice(("talk", "program")))]
    assert {question_key(ask) for ask in asked} & free == set()


def test_two_questions_in_one_message_get_both_answers() -> None:
    rng, writer, seen = random.Random(4), Writer("train", 1), 0
    for _ in range(1500):
        turn = writer.thread(rng, "program")[0]
        if ", " in turn.topic:
            seen += 1
            first, second = (topics.answer_of("program", topic) for topic in turn.topic.split(", "))
            assert turn.answer == f"{first} {second}"
    assert seen > 30
    both = {manner.joined(rng, "What is KV4?", "How do I quit?") for _ in range(80)}
    assert "What is KV4? And how do I quit?" in both
    assert "Two questions: What is KV4, and how do I quit?" in both


def test_small_words_are_dropped_only_where_others_remain() -> None:
    assert manner.keywords("How do I delete a model?") == "delete model?"
    assert manner.keywords("What is KV4?") == "What is KV4?"
