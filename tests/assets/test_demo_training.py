"""Tokenizer, batches and trainer of the bundled model, on toy sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from assets.demo_model import vocabulary
from assets.demo_model.batches import OTHER_WEIGHT, batch
from assets.demo_model.corpus import Writer
from assets.demo_model.train import Plan, Trainer, learning_rate, main

TOY: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 64,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "vocabulary": 512,
    "context": 128,
    "length": 64,
    "rows": 4,
    "long_every": 3,
    "steps": 6,
    "warmup": 2,
    "tokenizer_texts": 200,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    writer = Writer("train", 1)
    texts = [m["content"] for i in range(400) for m in writer.conversation(i).messages()]
    return vocabulary.build(texts, 600)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not any(special in text for special in vocabulary.SPECIAL):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["", " ", "a  b\n\n c ", "Ünï 漢字 😀", "<0x41>", "3.5 bits, k_chunk=16", "\ttab\r\n"])
def test_awkward_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_special_tokens_and_digits(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in vocabulary.SPECIAL] == list(range(len(vocabulary.SPECIAL)))
    assert tokenizer.encode("x 123").tokens[-3:] == ["1", "2", "3"]
    assert tokenizer.encode("x").tokens[0] == vocabulary.BEGIN
    assert tokenizer.get_vocab_size() == 600


def test_building_twice_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    writer = Writer("train", 1)
    texts = [m["content"] for i in range(400) for m in writer.conversation(i).messages()]
    assert vocabulary.build(texts, 600).to_str() == tokenizer.to_str()


def test_chat_template_writes_what_training_saw(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    vocabulary.save(tokenizer, tmp_path, context=1024)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "2 + 3 = 5"},
        {"role": "user", "content": " Thanks\n"},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>Be brief.<|end|><|user|>What is 2 + 3?<|end|><|assistant|>2 + 3 = 5<|end|>"
        "<|user|> Thanks\n<|end|><|assistant|>"
    )
    ids = loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected, _ = vocabulary.chat_tokens(tokenizer, messages)
    assert ids == [*expected, tokenizer.token_to_id("<|assistant|>")]
    partial = loaded.apply_chat_template(messages[1:3], tokenize=False, continue_final_message=True)
    assert partial.endswith("<|assistant|>2 + 3 = 5")
    with pytest.raises(Exception, match="unknown role"):
        loaded.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_missing_token_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no token <nothing>"):
        vocabulary.token_id(tokenizer, "<nothing>")


def test_rows_weigh_answers_and_ignore_padding(tokenizer: Tokenizer) -> None:
    rows = batch(Writer("train", 1), tokenizer, 3, rows=4, length=128, long=False)
    again = batch(Writer("train", 1), tokenizer, 3, rows=4, length=128, long=False)
    other = batch(Writer("train", 1), tokenizer, 4, rows=4, length=128, long=False)
    assert np.array_equal(rows.tokens, again.tokens)
    assert not np.array_equal(rows.tokens, other.tokens)
    pad, begin = tokenizer.token_to_id(vocabulary.PAD), tokenizer.token_to_id(vocabulary.BEGIN)
    assert (rows.weights[(rows.tokens == pad) | (rows.tokens == begin)] == 0).all()
    assert set(np.unique(rows.weights).tolist()) == {0.0, float(np.float32(OTHER_WEIGHT)), 1.0}
    assert (rows.tokens[:, 0] == begin).all()


def test_a_long_row_is_one_conversation(tokenizer: Tokenizer) -> None:
    rows = batch(Writer("train", 1), tokenizer, 0, rows=2, length=512, long=True)
    assert ((rows.tokens == tokenizer.token_to_id(vocabulary.BEGIN)).sum(1) == 1).all()
    assert (rows.weights[:, 1:] > 0).all()


def test_learning_rate_rises_and_falls() -> None:
    plan = Plan(steps=100, warmup=10, learning_rate=1.0)
    rates = [learning_rate(plan, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=0.01)


def test_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    import torch

    plan = Plan(**TOY)
    whole = Trainer(plan, tmp_path / "whole")
    whole.run(until=6, save_every=100)
    Trainer(plan, tmp_path / "parts").run(until=2, save_every=100)
    resumed = Trainer(plan, tmp_path / "parts")
    assert resumed.step == 2
    resumed.run(until=6, save_every=100)
    for (name, first), second in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(first, second), name
    files = [(tmp_path / run / "checkpoint" / "model.safetensors").read_bytes() for run in ("whole", "parts")]
    assert files[0] == files[1]
    losses = [json.loads(line)["held_out_loss"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0]


def test_another_plan_does_not_continue_a_run(tmp_path: Path) -> None:
    Trainer(Plan(**TOY), tmp_path).run(until=1, save_every=1)
    with pytest.raises(SystemExit, match="another plan"):
        Trainer(Plan(**TOY | {"seed": 2}), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 3}, "multiple of kv_heads"), ({"steps": 0}, "at least 1"), ({"context": 1000}, "multiple of length")],
)
def test_plans_that_do_not_fit(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**{"kv_heads": 2, **change})


def test_command_line_explains_a_bad_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--output", str(tmp_path / "run"), "--steps", "0"])
    assert error.value.code == 2
    assert "steps must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
