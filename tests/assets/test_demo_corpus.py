"""The dialogues: deterministic, free of duplicates, and no held-out question in training."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import pytest

from assets.demo_model import corpus, facts, manner, person, tales, topics, unknown
from assets.demo_model.corpus import Writer
from assets.demo_model.exchange import Exchange, normalised, question_key
from assets.demo_model.questions import KINDS, Question, questions


@pytest.fixture(scope="module")
def drawn() -> list[corpus.Conversation]:
    """Conversations for training."""
    writer = Writer("train", 1)
    return [writer.conversation(index) for index in range(3000)]


def test_every_question_is_clean_and_there_once() -> None:
    exchanges = [exchange for split in ("train", "held_out") for exchange in corpus.exchanges(split)]
    asked = [normalised(exchange.ask) for exchange in exchanges]
    assert len(asked) == len(set(asked)) > 40_000
    for exchange in exchanges:
        assert "{" not in exchange.ask + exchange.answer
        assert "  " not in exchange.ask
        assert exchange.ask.isascii()
        assert exchange.answer.isascii()


def test_no_held_out_question_in_training(drawn: list[corpus.Conversation]) -> None:
    train = {question_key(exchange.ask) for exchange in corpus.exchanges("train") if not exchange.key}
    held_out = [exchange.ask for exchange in corpus.exchanges("held_out") if not exchange.key]
    assert [ask for ask in held_out if question_key(ask) in train] == []
    turns = [turn for conversation in drawn for turn in conversation.exchanges]
    assert {turn.split for turn in turns} == {"train"}
    assert [turn.ask for turn in turns if question_key(turn.ask) in corpus.held_out_keys()] == []


def test_questions_of_the_score_are_not_trained_on(drawn: list[corpus.Conversation]) -> None:
    asked = {
        question.messages[-1]["content"]
        for question in questions(40, seed=3)
        if question.kind not in {"follow-up", "story"}
    }
    trained = {question_key(turn.ask) for conversation in drawn for turn in conversation.exchanges}
    trained |= {question_key(exchange.ask) for exchange in corpus.exchanges("train")}
    # A third turn such as `And plus 5?` has words that occur anywhere; what it continues is held out instead.
    continued = {
        normalised(frame.format(b=b)) for name in ("then_add",) for frame in topics.words(name) for b in range(21)
    }
    assert {text for text in asked if question_key(text) in trained - continued} == set()


def test_every_kind_of_knowledge_is_held_out_too() -> None:
    for split in ("train", "held_out"):
        assert {e.group for e in corpus.exchanges(split)} == {"talk", "program", "facts", "unknown", "repeat"}
    train, held = ({(e.group, e.topic) for e in corpus.exchanges(s)} for s in ("train", "held_out"))
    assert held <= train, "a held-out question must ask about something that training teaches"


def test_every_topic_of_the_program_has_its_own_name() -> None:
    names = [
        topic["name"]
        for name in ("program", "methods", "options", "interface")
        for topic in topics.content(name)["topic"]
    ]
    assert len(names) == len(set(names)) > 180
    assert set(topics.content("follow")) <= set(names)
    assert all(set(part) <= set(topics.FOLLOWING) for part in topics.content("follow").values())
    assert topics.following("budget") == topics.FOLLOWING
    assert topics.following("rm") == ("short", "why", "how", "example")
    assert topics.following("header") == ()
    assert topics.follow_up("rm", "how", "How?").answer.startswith("Use lowbit-chat rm")


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


def test_what_is_recalled_was_told_last(drawn: list[corpus.Conversation]) -> None:
    """What was told is not declined, and a name that was not told is not known."""
    seen: Counter[str] = Counter()
    for conversation in drawn:
        told: dict[str, str] = {}
        for turn in conversation.exchanges:
            seen[turn.topic] += 1
            assert not (told and turn.topic == "personal")
            assert not ("name" in told and turn.topic == "name not told")
            kind, _, what = turn.topic.partition(" ")
            if turn.group == "person" and what == "told":
                told[kind] = turn.key
            elif turn.group == "person" and what == "recalled":
                seen["recalled"] += 1
                assert told[kind] == turn.key
    assert seen["recalled"] > 100
    assert min(seen["name not told"], seen["personal"]) > 5
    rng = random.Random(5)
    assert {person.name_not_told(rng).answer for _ in range(20)} == {"You haven't told me your name yet."}


def test_what_is_said_again_was_said(drawn: list[corpus.Conversation]) -> None:
    seen = 0
    for conversation in drawn:
        for before, after in itertools.pairwise(conversation.exchanges):
            if after.topic == "again after":
                seen += 1
                assert (
                    after.answer.endswith(before.answer.removeprefix("Hello! ").removeprefix("Good morning! "))
                    or "evening" in before.answer
                )
    assert seen > 20


def test_greeting_and_question_in_one_message(drawn: list[corpus.Conversation]) -> None:
    greeted = [
        t for c in drawn for t in c.exchanges if re.match(r"Hello[!.,] (what|how|can|who)", t.ask, re.IGNORECASE)
    ]
    assert len(greeted) > 20
    assert sum(turn.answer.startswith("Hello! ") for turn in greeted) > 0.9 * len(greeted)


def test_facts_that_follow_are_of_the_same_kind() -> None:
    rng = random.Random(1)
    capital = next(e for e in facts.facts() if e.topic == "capital France")
    other = facts.same_of_another(rng, capital)
    assert other is not None
    assert other.answer == facts.capital(other.subject)
    assert facts.same_of_another(rng, Exchange(group="facts", topic="planets", ask="x", answer="y")) is None


def test_words_fit_each_other() -> None:
    """Opposites both ways, and no invented word is one that is defined."""
    pairs, known = facts.opposites(), topics.content("knowledge")
    assert all(other in pairs for other in pairs.values())
    assert (pairs["hot"], pairs["cold"]) == ("cold", "hot")
    invented = topics.content("unknown")["invented"]
    assert set(known["definitions"]).isdisjoint(invented["rare"])
    assert set(known["capitals"]).isdisjoint(invented["small_place"])


def test_invented_questions_are_very_many_and_declined() -> None:
    rng = random.Random(2)
    made = [unknown.draw(rng) for _ in range(500)]
    assert len({exchange.ask for exchange in made}) > 480
    assert all(unknown.is_declined(exchange.answer) for exchange in made)
    assert not unknown.is_declined("Paris.")
    assert not any("{" in exchange.ask for exchange in made)


def test_what_is_told_comes_back() -> None:
    rng = random.Random(3)
    for kind in person.kinds():
        told = person.told(rng, kind)
        assert told.tell.split == told.recall.split
        value = told.tell.key.removeprefix(f"told {kind} ")
        assert value in told.tell.ask
        assert value in told.recall.answer


def test_stories_are_sound_and_about_what_was_asked() -> None:
    rng = random.Random(0)
    for _ in range(400):
        asked = tales.request(rng)
        story, tale = tales.told(rng, asked)
        assert tales.is_sound(story.answer), story.answer
        assert all(
            normalised(value) in normalised(story.answer) for slot, value in asked.wished.items() if slot != "plot"
        )
        assert not re.search(r"\b[Aa] [aeio]\w+|[{}]", f"{story.ask} {story.answer}")
        question = tales.question(rng, tale)
        assert "{" not in question.answer


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + " And it went",
        lambda text: text.split(". ", 1)[1],
        lambda text: text.replace("lived in", "lived lived in"),
        lambda text: text.replace(" the door", " the the door"),
        lambda text: text[::-1].replace("aiP", "odO", 1)[::-1],
    ],
    ids=["cut", "beginning lost", "word twice", "article twice", "two names"],
)
def test_broken_stories_are_not_sound(change: object) -> None:
    tale = tales.tell(random.Random(4), {"who": "fox", "name": "Pia"})
    text = "Once there was a shy fox named Pia who lived in a garden. " + tale.text.split(". ", 1)[1]
    assert tales.is_sound(text)
    broken = change(text)  # type: ignore[operator]
    assert broken != text
    assert not tales.is_sound(broken)


def test_unknown_keys_of_a_topic_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"topic": [{"name": "x", "ask": ["y"], "answer": ["z"], "asks": []}]}
    monkeypatch.setattr(topics, "content", lambda name: table)
    with pytest.raises(ValueError, match="unknown keys"):
        list(topics.talk())


@pytest.mark.parametrize("seed", range(20))
def test_a_slip_changes_one_word_a_little(seed: int) -> None:
    text = "What is the capital of Germany?"
    slipped = manner.slip(random.Random(seed), text)
    changed = [(a, b) for a, b in zip(text.split(), slipped.split(), strict=True) if a != b]
    assert len(changed) <= 1
    assert abs(len(slipped) - len(text)) <= 1


def test_typing_keeps_the_split() -> None:
    rng = random.Random(6)
    for exchange in corpus.exchanges("held_out")[::40]:
        assert manner.typed(rng, exchange).split == "held_out"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("Hello, who are you?", "who are you"),
        ("Please tell me a joke", "a joke"),
        ("A story, please", "a story"),
        ("Hi", "hi"),
        ("What's 3*4?", "whats 3 * 4"),
        ("What's 3 × 4?", "whats 3 * 4"),
        ("8 ÷ 2", "8 / 2"),
    ],
)
def test_question_key(text: str, key: str) -> None:
    assert question_key(text) == key


def test_the_split_goes_by_the_question_alone() -> None:
    first = Exchange(group="talk", topic="a", ask="Who are you?", answer="x")
    second = Exchange(group="facts", topic="b", ask="hello, who are you", answer="y")
    assert first.split == second.split


def test_questions_are_of_every_kind_and_the_same_each_time() -> None:
    asked = questions(8)
    assert asked == questions(8)
    assert tuple(dict.fromkeys(question.kind for question in asked)) == KINDS
    assert all(question.messages[-1]["role"] == "user" for question in asked)
    assert all(len(q.messages) == 5 for q in asked if q.kind == "follow-up")
    assert all(question.right(question.expected) for question in asked if question.kind != "story")


def _question(kind: str, expected: str) -> Question:
    return Question(kind=kind, messages=({"role": "user", "content": "?"},), expected=expected)


def test_what_counts_as_right() -> None:
    total = _question("addition", "20 + 30 = 50.")
    assert total.right("20 + 30: together 50.")
    assert not total.right("20 + 30 = 51.")
    assert not total.right("I don't know that.")
    story = _question("story", "owl|a garden")
    told = tales.tell(random.Random(1), {"who": "owl", "place": "a garden"}).text
    assert story.right(told)
    assert not story.right(told.replace("owl", "fox"))
    assert not story.right(told + " And it went")
    assert _question("program in free words", "lowbit-chat rm").right("Use lowbit-chat rm NAME.")
    assert not _question("invented", "").right("The capital of Xu is Paris.")
