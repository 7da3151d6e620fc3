"""The questions of `tests.lab.tasks` have the answers that they say; a cache that was cut back answers as a new one."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from assets import demo_checkpoint_path, demo_path
from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.load.plan import open_decoder
from runtime.text.tokenizer import Tokenizer
from tests.lab.tasks import LENGTHS, Prompt, Tasks, _fitting, interval, objects, pass_keys, retrieval, sums


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("task", [pass_keys, retrieval])
def test_a_key_is_where_its_question_says(task: object) -> None:
    for prompt in task(LENGTHS[0], words):
        assert LENGTHS[0] * 0.9 < words(prompt.text) < LENGTHS[0] * 1.3
        for question, answer in prompt.questions:
            told = question.split("? ")[1].replace("The", "").strip()
            assert f"The {told}{answer}." in prompt.text


def test_sums_are_right() -> None:
    (prompt,) = sums(0, words)
    asked = [question.rsplit(". ", 1)[-1] + answer for question, answer in prompt.questions]
    for equation in [*asked, *re.findall(r"\d+ \+ \d+ = \d+", prompt.text)]:
        one, other, total = map(int, re.findall(r"\d+", equation.rsplit(": ")[-1]))
        assert one + other == total


@pytest.mark.parametrize(
    ("said", "judged"),
    [
        ('{"name": "Anna", "age": 20, "city": "Paris"}', (1, 1)),
        ('```json\n{"name": "Anna", "age": 20, "city": "Paris"}\n```', (1, 1)),
        ('{"name": "Anna", "age": 21, "city": "Paris"}', (1, 0)),
        ('{"name": "Anna", "age": "20", "city": "Paris"}', (0, 0)),
        ('Here it is: {"name": "Anna", "age": 20, "city": "Paris"}', (0, 0)),
        ("", (0, 0)),
    ],
)
def test_json_is_judged(said: str, judged: tuple[int, int]) -> None:
    assert _fitting(said, {"name": "Anna", "age": 20, "city": "Paris"}) == judged


def test_an_interval_is_that_of_a_mean() -> None:
    assert interval([1.0, 2.0, 3.0]) == "2.00 ± 1.13"


def test_a_cache_that_was_cut_back_answers_as_a_new_one() -> None:
    tokenizer, model = Tokenizer(demo_checkpoint_path()), StoredModel.open_folder(demo_path(), "demo")
    tasks = Tasks(SimpleNamespace(entries=None, tell=None, case=SimpleNamespace(folder=demo_checkpoint_path())))
    text = "What is lowbit-chat? It is a chat program for your terminal. " * 30
    questions = [(" Is it a program?", " Yes, it is."), (" What is it?", " A chat program.")]
    decoder, _ = open_decoder(model, DecoderOptions(kv="int4", context=1024, max_rows=128, k_chunk=16), "cpu")
    try:
        together = [*tasks._answered(decoder, Prompt(text, questions))]
        alone = [one for each in questions for one in tasks._answered(decoder, Prompt(text, [each]))]
    finally:
        decoder.close()
    assert len(tokenizer.encode(text)) > 320, "some of it has to be in pages"
    np.testing.assert_allclose([nats for nats, _ in together], [nats for nats, _ in alone], rtol=1e-6)
    assert together[0] != together[1]


def test_objects_say_what_their_sentences_say() -> None:
    (prompt,) = objects(0, words)
    assert len(prompt.questions) == 16
    for sentence, said in [
        *prompt.questions,
        *zip(*[iter(prompt.text.replace("\n\n", "\n").splitlines())] * 2, strict=True),
    ]:
        told = json.loads(said)
        assert sentence.strip() == f"{told['name']} is {told['age']} years old and lives in {told['city']}."
    assert not any(said in prompt.text for _, said in prompt.questions)
