"""Tokenizer, batches and trainer of the bundled model, on toy sizes."""

from __future__ import annotations

import json
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from assets.demo_model import network, vocabulary
from assets.demo_model.batches import OTHER_SHARE, OTHER_WEIGHT, POOLED_STEPS, batches
from assets.demo_model.corpus import Writer
from assets.demo_model.muon import orthogonalized
from assets.demo_model.train import Plan, Trainer, main, moment, rate_factor
from tests.close import assert_close

TOY: dict[str, Any] = {
    "hidden": 64,
    "intermediate": 64,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "vocabulary": 512,
    "context": 128,
    "tokens": 256,
    "part": 256,
    "steps": 6,
    "warmup": 2,
    "tokenizer_texts": 200,
}


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that was stopped after two steps."""
    folder = tmp_path_factory.mktemp("run") / "run"
    Trainer(Plan(**TOY), folder).run(until=2, save_every=100)
    return folder


@pytest.fixture
def begun(run_of_two: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run_of_two, tmp_path / "begun")


def texts() -> list[str]:
    writer = Writer("train", 1)
    return [m["content"] for i in range(400) for m in writer.conversation(i).messages()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabulary.build(texts(), 600)


@settings(max_examples=200)
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
    assert vocabulary.build(texts(), 600).to_str() == tokenizer.to_str()


def test_chat_template_writes_what_training_saw(tokenizer: Tokenizer, tmp_path: Path) -> None:
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


def _step(split: Any, tokenizer: Tokenizer, step: int, context: int = 512) -> tuple[Any, ...]:
    return batches(Writer(split, 1), tokenizer, step, tokens=2048, part=1024, context=context)


def test_rows_weigh_answers_and_ignore_padding(tokenizer: Tokenizer) -> None:
    parts, again, other = _step("train", tokenizer, 3), _step("train", tokenizer, 3), _step("train", tokenizer, 7)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a.tokens, b.tokens) for a, b in zip(parts, other, strict=False))
    pad, begin = tokenizer.token_to_id(vocabulary.PAD), tokenizer.token_to_id(vocabulary.BEGIN)
    allowed = {0.0, float(np.float32(OTHER_WEIGHT / OTHER_SHARE)), 1.0}
    for part in parts:
        assert (part.weights[(part.tokens == pad) | (part.tokens == begin)] == 0).all()
        assert set(np.unique(part.weights).tolist()) <= allowed
        assert (part.tokens[:, 0] == begin).all()
        assert ((part.tokens == begin).sum(1) == 1).all(), "one conversation a row"


def test_the_steps_of_a_pool_share_its_conversations(tokenizer: Tokenizer) -> None:
    parts = [part for step in range(POOLED_STEPS) for part in _step("train", tokenizer, step)]
    rows = [row.tobytes() for part in parts for row in part.tokens]
    pad = tokenizer.token_to_id(vocabulary.PAD)
    tokens = sum(int((part.tokens != pad).sum()) for part in parts)
    assert 2048 * POOLED_STEPS <= tokens < 2048 * POOLED_STEPS + 512
    assert sum(part.tokens.size for part in parts) < 1.25 * tokens, "rows of like length need little padding"
    assert len(set(rows)) > 0.9 * len(rows)


def test_rows_are_cut_at_the_context(tokenizer: Tokenizer) -> None:
    parts = [part for step in range(POOLED_STEPS) for part in _step("train", tokenizer, step, context=128)]
    assert max(part.tokens.shape[1] for part in parts) == 128


def test_rates_rise_stay_and_fall_to_nothing() -> None:
    """By the clock, where it is ahead of the steps."""
    plan = Plan(steps=100, warmup=10, decay=0.5)
    rates = [rate_factor(plan, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:50] == [1.0] * 41
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)
    plan = Plan(steps=1000, warmup=1, decay=0.5)
    found = [rate_factor(plan, step, done=done) for step, done in ((10, 0.9), (950, 0.1), (10, 1.2))]
    assert found == pytest.approx([0.2, 0.099, 0.0])


def test_moment_is_the_next_such_time() -> None:
    now = datetime(2026, 3, 31, 21, 30, tzinfo=UTC)
    assert moment("22:05", now) - now.timestamp() == 35 * 60
    assert moment("21:00", now) - now.timestamp() == (23 * 60 + 30) * 60


def test_training_ends_when_its_time_is_over(tmp_path: Path) -> None:
    trainer = Trainer(Plan(**TOY), tmp_path)
    trainer.run(until=6, save_every=100, finish_by=time.time() - 1)
    assert trainer.step == 1
    assert (tmp_path / "checkpoint" / "model.safetensors").exists()


def test_resumed_training_ends_with_the_same_bits(begun: Path, tmp_path: Path) -> None:
    plan = Plan(**TOY)
    whole = Trainer(plan, tmp_path / "whole")
    whole.run(until=6, save_every=100)
    resumed = Trainer(plan, begun)
    assert resumed.step == 2
    resumed.run(until=6, save_every=100)
    for (name, first), second in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(first, second), name
    files = [(folder / "checkpoint" / "model.safetensors").read_bytes() for folder in (tmp_path / "whole", begun)]
    assert files[0] == files[1]
    losses = [json.loads(line)["held_out_loss"] for line in (begun / "log.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0]


def test_a_run_is_not_continued_by_another_plan_nor_begun_from_another_shape(begun: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="another plan"):
        Trainer(Plan(**TOY | {"seed": 2}), begun)
    with pytest.raises(SystemExit, match="another hidden, layers"):
        Trainer(Plan(**TOY | {"hidden": 128, "layers": 2}), tmp_path / "second", start=begun)


def test_a_run_can_begin_with_the_weights_and_optimizers_of_another(begun: Path, tmp_path: Path) -> None:
    first, plan = Trainer(Plan(**TOY), begun), Plan(**TOY | {"seed": 2, "steps": 4, "learning_rate": 0.001})
    second = Trainer(plan, tmp_path / "second", start=begun)
    assert (second.step, second.tokens, second.seconds) == (0, 0, 0.0)
    for name, weight in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], weight)
    assert second.optimizers[0].state_dict()["state"].keys() == first.optimizers[0].state_dict()["state"].keys() != {}
    assert (tmp_path / "second/tokenizer.json").read_bytes() == (begun / "tokenizer.json").read_bytes()
    second.run(until=1, save_every=1)
    assert Trainer(plan, tmp_path / "second", start=begun).step == 1, "an unfinished run goes on"


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 3}, "multiple of kv_heads"), ({"steps": 0}, "at least 1"), ({"decay": 0.0}, "above 0")],
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


def test_orthogonalized_moves_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((64, 64), (96, 64), (64, 192)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape, generator=generator)).float())
        # The smallest values of a square matrix start so near 0 that five rounds leave them below the others.
        assert values.max() < 1.3
        assert values.quantile(0.1) > 0.5


def test_plain_and_fused_attention_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 37, 64, generator=generator) for heads in (4, 2, 2))
    plain = network.attention(q, k, v)
    monkeypatch.setattr(network, "LONGEST_PLAIN", 0)
    assert_close(plain, network.attention(q, k, v))


def test_the_checkpoint_is_the_trained_model(begun: Path) -> None:
    trainer = Trainer(Plan(**TOY), begun)
    loaded: Any = AutoModelForCausalLM.from_pretrained(begun / "checkpoint", dtype=torch.float32)
    tokens = torch.tensor([[0, 4, 300, 301, 1, 5, 310]])
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
        states = trainer.model.hidden_states(tokens)
        logits = torch.nn.functional.linear(states, trainer.model.embedding.weight)
        assert_close(logits, loaded(input_ids=tokens).logits, "model")
        chosen = torch.zeros_like(tokens, dtype=torch.bool)
        chosen[0, 3] = chosen[0, 6] = True
        expected = torch.nn.functional.cross_entropy(logits[0, [2, 5]], tokens[0, [3, 6]], reduction="none")
        assert_close(trainer.model.losses(tokens, chosen), expected)
