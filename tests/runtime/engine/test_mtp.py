"""Drafts by a block that predicts further tokens: its numbers, its cache, and the same answers as without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import runtime.backends.decoder
from models.quantizers.dequantize import restored
from models.spec import ModelSpec
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.drafting import Speculate
from runtime.engine import costs
from runtime.engine.engine import Engine
from runtime.engine.gamma import Costs
from runtime.engine.generation import Speculation
from runtime.engine.mtp import MtpDrafts
from runtime.engine.scheduler import run_alone
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.close import Tolerance, assert_close
from tests.runtime.conftest import TinyModel, make_model, make_spec, pack_linear
from tests.runtime.engine.talking import decaying, hybrid

V, GREEDY = 300, SamplingOptions(temperature=0.0, max_tokens=70)
DRAWN = SamplingOptions(temperature=0.8, top_k=20, seed=5)


def foreseeing(spec: ModelSpec) -> TinyModel:
    """A model whose next token mostly follows from the last, and a block that knows that: most drafts are right."""
    model = decaying(make_model(spec, residual_bits=0, mtp=True))
    assert model.mtp is not None
    C = spec.hidden_size
    for own in (model, model.mtp):
        for name, linear in own.linears.items():
            if name.endswith((".o", "down")):
                own.linears[name] = replace(linear, scales=linear.scales * np.float16(0.08))
    join = np.eye(C, 2 * C, dtype=np.float32)
    model.mtp.linears["layers.0.join.down"] = pack_linear(join, name="layers.0.join.down", residual_bits=0)
    return model


@pytest.fixture(scope="module", params=["attention", "delta"])
def model(request: pytest.FixtureRequest) -> TinyModel:
    """All blocks with attention, or most with states."""
    if request.param == "delta":
        return foreseeing(replace(hybrid("delta"), vocab_size=V))
    return foreseeing(make_spec(max_context=256, vocab_size=V))


def opened(backend: Callable[..., Any], model: TinyModel, tokenizer: Tokenizer, **options: Any) -> Engine:
    used = {"kv": "int4", "context": 256, "slots": 2, "max_rows": 24, "threads": 1, "mtp": True, **options}
    return Engine(backend(model, DecoderOptions(**used)), tokenizer, name="tiny", eos_token_ids=[])


def answers(engine: Engine, most: int) -> tuple[list[list[int | None]], list[Speculation | None]]:
    """A chat, a branch of it, another chat, drawn answers, each of so many tokens at most; and what drafted."""
    prompt = np.random.default_rng(1).integers(40, 296, 60).tolist()
    told: list[list[int | None]] = []
    drafted = []
    for begin, options in (
        (prompt, GREEDY),
        ([*prompt, 7], DRAWN),
        (prompt[:30], replace(GREEDY, repetition_penalty=1.2)),
        (prompt, GREEDY),
    ):
        start = [*begin, *(told[0][:12] if told and len(begin) > 60 else [])]
        pieces = list(engine.generate([int(token or 0) for token in start], replace(options, max_tokens=most)))
        told.append([piece.token for piece in pieces])
        assert pieces[-1].usage is not None
        drafted.append(pieces[-1].usage.speculation)
    return told, drafted


@pytest.mark.parametrize(("backend", "most"), [(CpuDecoder, 70), (ReferenceDecoder, 16)])
def test_answers_are_the_same_with_and_without(
    backend: type, most: int, model: TinyModel, tokenizer: Tokenizer
) -> None:
    """Over pages, with drafts that are refused, in chats that go on, branch and change slots."""
    alone = opened(backend, model, tokenizer, mtp=False)
    alone.speculate(None, copied=False)
    engine = opened(backend, model, tokenizer)
    engine.speculate(4, mtp=True)
    expected, _ = answers(alone, most)
    found, drafted = answers(engine, most)
    assert found == expected
    first = drafted[0]
    assert first is not None
    assert first.source == "head"
    assert 0.1 < first.acceptance_rate < 1
    assert first.rounds + first.plain < most - 2


def test_answers_at_the_same_time_are_the_same(model: TinyModel, tokenizer: Tokenizer) -> None:
    told = []
    for mtp in (False, True):
        engine = opened(CpuDecoder, model, tokenizer)
        engine.speculate(3 if mtp else None, copied=False, mtp=mtp)
        pieces: list[list[Any]] = [[], []]
        for own, start in zip(pieces, (50, 90), strict=True):
            engine.submit(list(range(start, start + 30)), GREEDY, own.append)
        while engine.step():
            pass
        told.append([[piece.token for piece in own] for own in pieces])
    assert told[0] == told[1]


INTEGERS = Tolerance(span=0.03, why="activations in INT8 in front of six products")


@pytest.mark.parametrize(("backend", "within"), [(CpuDecoder, INTEGERS), (ReferenceDecoder, "half attention")])
def test_the_block_computes_what_the_paper_says(backend: type, within: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3 §2.2, in plain torch; a head sees its own token alone, so attention is its values."""
    monkeypatch.setattr(runtime.backends.decoder, "MTP_KV", "fp16")
    spec = make_spec(num_heads=2, num_kv_heads=2, head_dim=32)
    model = make_model(spec, residual_bits=0, mtp=True)
    block = model.mtp
    assert block is not None
    decoder = backend(model, DecoderOptions(kv="fp16", context=32, max_rows=8, mtp=True))
    logits = decoder.forward(Step.of([5, 9])).copy()
    left = decoder.left()

    def w(name: str, own: TinyModel = block) -> torch.Tensor:
        return torch.from_numpy(restored(own.linear(name), residuals=False))

    def rms(x: torch.Tensor, name: str, own: TinyModel = block) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + spec.norm_eps).rsqrt() * torch.from_numpy(own.vector(name))

    h = torch.from_numpy(left[1])
    assert_close(w("head", model) @ h, torch.from_numpy(logits[1]), within)
    emb = torch.from_numpy(model.table[int(logits[1].argmax())].astype(np.float32))
    x = w("layers.0.join.down") @ torch.cat([rms(emb, "layers.0.embed_norm"), rms(h, "layers.0.hidden_norm")])
    x = x + w("layers.0.o") @ (w("layers.0.qkv") @ rms(x, "layers.0.input_norm"))[-spec.kv_width :]
    gate, up = (w("layers.0.gate_up") @ rms(x, "layers.0.post_norm")).chunk(2)
    x = rms(x + w("layers.0.down") @ (torch.nn.functional.silu(gate) * up), "norm")
    found = decoder.mtp.forward(Step.of([int(logits[1].argmax())], stream=left[1:]))
    assert_close(torch.from_numpy(found[0].copy()), w("head", model) @ x, within)
    assert_close(torch.from_numpy(decoder.mtp.left()[0]), x, within)


def test_rows_are_those_of_the_verified_tokens() -> None:
    """After drafts, refusals, pauses and cuts, the next draft is that of a block that reads all tokens at once."""
    model = make_model(make_spec(max_context=256, vocab_size=V), residual_bits=0, mtp=True)
    decoder = CpuDecoder(model, DecoderOptions(kv="fp16", context=256, max_rows=200, threads=1, mtp=True))
    block = decoder.mtp
    assert block is not None
    random, tokens = np.random.default_rng(3), np.random.default_rng(4).integers(0, V, 200).tolist()
    decoder.forward(Step.of(tokens))
    left, drafts, at = decoder.left(), MtpDrafts(block), 0

    def drafted() -> list[int]:
        return run_alone(decoder, drafts.draft(0, tokens[at], 3, ()))

    def at_once() -> list[int]:
        logits = block.forward(Step.of(tokens[1 : at + 1], 0, [at - 1], stream=left[:at]))
        found = [int(logits[0].argmax())]
        while len(found) < 3:
            logits = block.forward(Step.of(found[-1:], at + len(found) - 1, stream=block.left()[-1:]))
            found.append(int(logits[0].argmax()))
        return found

    while at < 150:
        count = int(random.integers(1, 30))
        drafts.follow(0, at, tokens[at : at + count], left[at : at + count + 3])
        at += count
        if random.random() < 0.6:
            found = drafted()
        elif random.random() < 0.3:
            run_alone(decoder, drafts.catch_up(0, 5))
    drafts.follow(0, at, tokens[at : at + 5], left[at : at + 5])
    at += 5
    drafts.begin(0, tokens[:at])
    found = drafted()
    assert found == at_once()
    drafts.begin(0, tokens[: at - 20])  # cut back: the next row lacks what the model left before it
    drafts.follow(0, at - 20, tokens[at - 20 : at], left[at - 20 : at])
    left[at - 21] = 0
    assert drafted() == at_once()
    drafts.begin(0, [*tokens[: at - 9], 1])
    assert drafted() == [], "nothing is known of another text"


@pytest.mark.parametrize(
    ("draft", "wanted", "drafts"), [(0.1, None, True), (9.0, None, False), (9.0, 2, True), (0.1, False, False)]
)
def test_the_block_drafts_if_that_can_pay(
    draft: float, wanted: int | bool | None, drafts: bool, model: TinyModel, tokenizer: Tokenizer, monkeypatch: Any
) -> None:
    engine = opened(CpuDecoder, model, tokenizer)
    monkeypatch.setattr(costs, "measure_costs", lambda *_, **__: Costs(plain=1.0, draft=draft, verify=[1.0] * 7))
    asked: Any = Speculate(gamma=wanted) if wanted else wanted
    costs.start(engine, asked)
    assert engine.drafts_by_head == drafts
    monkeypatch.undo()
    if drafts:
        found = costs.measure_costs(engine.decoder, block=engine.decoder.mtp)  # type: ignore[attr-defined]
        assert 0 < found.draft < 20 * found.plain


def test_a_model_without_the_block_drafts_as_ever(tokenizer: Tokenizer) -> None:
    engine = opened(CpuDecoder, make_model(make_spec(max_context=256, vocab_size=V)), tokenizer)
    costs.start(engine, None)
    assert not engine.speculates
