"""The model that ships: loads everywhere it must, is small, and answers questions that training never asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assets
from assets.demo_model import vocabulary
from assets.demo_model.exchange import Exchange, normalised
from assets.demo_model.questions import questions
from assets.demo_model.score import Answerer, FullPrecision, score
from models.checkpoint import Checkpoint
from models.store import StoredModel
from models.store.certificate import Certificate
from runtime.load.certificate import Reference, measured
from tests.lab.demo_table import LowBit

HELD_OUT = {
    "Hi demo": "I am demo",
    "Good evening demo": "Good evening",
    "What is lowbit-chat for?": "language models on your own computer",
    "What does slowdown budget mean?": "percent slower",
    "I don't understand KV4": "4 bits instead of 16",
    "How does speculation work?": "cheap draft",
    "What does GEAR do?": "outliers",
    "Could you tell me what perplexity is?": "Lower is better",
    "How can I delete a model?": "lowbit-chat rm NAME",
    "Can I use it without a graphics card?": "No GPU is needed",
    "What is the capital of Germany?": "Berlin",
    "How many legs does a cat have?": "four legs",
    "What is bread?": "flour and water",
}
"""Questions of the held-out split and what must occur in the answer."""

LEAST = {
    "program": 0.9,
    "program in free words": 0.8,
    "program, hurried": 0.6,
    "facts": 0.9,
    "talk": 0.9,
    "talk in free words": 0.4,
    "addition": 0.9,
    "subtraction": 0.9,
    "multiplication": 0.8,
    "division": 0.9,
    "remainder": 0.7,
    "numbers": 0.9,
    "follow-up": 0.8,
    "unknown": 0.9,
    "invented": 0.9,
    "story": 0.8,
}
"""Kinds of held-out questions and the share of right answers that the shipped model reaches."""

CONVERSATIONS = (
    (("Hello! What can you do?",), "Hello! I can explain lowbit-chat"),
    (("What is 47 + 38?", "And plus 5?"), "together 90"),
    (("My name is Anna", "What is the capital of France?", "What is my name?"), "Your name is Anna."),
    (("What is the capital of France?", "And Spain?", "And Italy?"), "Rome"),
    (("What is the slowdown budget?", "Shorter, please", "Why?"), "takes time"),
    (("What is the capital of Trumbolia?",), "I don't know that"),
    (("Which is larger, 62 or 31?",), "so 62 is larger"),
    (("ugh its soooo slow",), "lowbit-chat doctor"),
    (("it ate all my ram",), "--kv int4"),
    (("how quit",), "Ctrl+Q"),
    (("What is my name?",), "You haven't told me your name yet"),
    (("my name is Anna", "ty demo", "whats my name"), "Your name is Anna"),
    (("what is 84 / 7",), "84 ÷ 7 = 12."),
    (("gotta run, bye",), "Goodbye"),
)
"""Turns of a person, and words that must occur in the last answer."""


@pytest.fixture(scope="module")
def full() -> FullPrecision:
    return FullPrecision(assets.demo_checkpoint_path())


@pytest.fixture(scope="module")
def low() -> Iterator[LowBit]:
    with LowBit(assets.demo_path(), 16) as answerer:
        yield answerer


def ask(answerer: Answerer, *texts: str) -> str:
    """The last answer of a conversation."""
    messages: list[dict[str, str]] = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answerer.answer(messages)})
    return messages[-1]["content"]


@pytest.mark.parametrize(("question", "words"), HELD_OUT.items())
def test_held_out_questions_are_answered(full: FullPrecision, low: LowBit, question: str, words: str) -> None:
    assert Exchange(group="talk", topic="", ask=question, answer="").split == "held_out"
    for answerer in (full, low):
        assert normalised(words) in normalised(ask(answerer, question)), answerer


@pytest.mark.slow
def test_share_of_right_answers_to_held_out_questions(full: FullPrecision) -> None:
    right, _ = score(full, questions(10, seed=2, kinds=tuple(LEAST)))
    share = {kind: sum(found) / len(found) for kind, found in right.items()}
    assert {kind: share[kind] for kind, bound in LEAST.items() if share[kind] < bound} == {}


@pytest.mark.parametrize(("turns", "words"), CONVERSATIONS, ids=[turns[-1] for turns, _ in CONVERSATIONS])
def test_conversations(low: LowBit, turns: tuple[str, ...], words: str) -> None:
    assert normalised(words) in normalised(ask(low, *turns))


def test_transformers_gives_the_same_answer(full: FullPrecision) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = assets.demo_checkpoint_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is lowbit-chat for?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=100)[0, prompt["input_ids"].shape[1] :]
    assert said[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(said, skip_special_tokens=True) == full.answer(messages)


def test_both_forms_agree_on_the_model() -> None:
    checkpoint = Checkpoint.open(assets.demo_checkpoint_path())
    model = StoredModel.open_folder(assets.demo_path(), "demo")
    assert model.spec == checkpoint.spec
    assert model.spec.max_context >= 1024
    assert model.spec.tied
    assert model.spec.eos_token_ids == (1,)
    assert model.recipe.bits == 4
    assert model.linear("layers.0.qkv").residual is not None
    model.verify()


def test_packed_model_was_made_from_the_shipped_checkpoint_and_texts() -> None:
    import hashlib

    recipe = json.loads((assets.demo_path() / "recipe.json").read_text())
    for name, entry in recipe["source"]["files"].items():
        content = (assets.demo_checkpoint_path() / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], f"{name} changed: pack the model again"


def test_its_certificate_is_that_of_the_shipped_files() -> None:
    own = Certificate.of(assets.demo_path())
    assert own.kv == "int4"
    model = StoredModel.open_folder(assets.demo_path(), "demo")
    reference = Reference.of(model)
    assert reference is not None
    again = measured(model, reference, own.ways, backend="cpu")
    assert [(was.k_chunk, was.apart(now)) for was, now in zip(own.ways, again, strict=True)] == [(0, []), (16, [])]


def test_size_in_the_repository() -> None:
    folders = (assets.demo_path(), assets.demo_checkpoint_path())
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= 20_000_000


@pytest.mark.parametrize("folder", [assets.demo_checkpoint_path(), assets.demo_path()], ids=["checkpoint", "packed"])
def test_tokenizer_of_both_forms(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Wie geht's? 漢字"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    plain = vocabulary.load(assets.demo_checkpoint_path())
    assert ids == [*vocabulary.chat_tokens(plain, messages)[0], plain.token_to_id("<|assistant|>")]
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.eos_token == vocabulary.END
    assert tokenizer.decode(tokenizer("Ü 漢字  z").input_ids, skip_special_tokens=True) == "Ü 漢字  z"
