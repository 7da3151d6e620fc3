"""Token inspection: the logits of decoding, those without compensation, and drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from assets import demo_path
from models.progress import Progress
from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions, Step
from runtime.errors import Cancelled, ContextOverflowError, RequestError
from runtime.load.plan import open_decoder, open_engine
from runtime.text.sampling import SamplingOptions
from runtime.wire.codec import from_json, to_json
from runtime.wire.requests import Inspection

HELLO = [{"role": "user", "content": "Who are you?"}]
GREEDY = SamplingOptions(temperature=0, max_tokens=24)


def engine(**options: Any) -> Any:
    model = StoredModel.open_folder(demo_path(), "demo")
    return open_engine(model, DecoderOptions(**{"context": 256, **options}), "reference")


def answered(own: Any) -> str:
    return "".join(piece.text for piece in own.generate(own.chat_prompt(HELLO), GREEDY, trim=True))


def test_the_tokens_are_those_of_the_answer_and_greedy_ones_are_the_best() -> None:
    own = engine(k_chunk=64)
    answer = answered(own)
    found = own.inspect(own.chat_prompt(HELLO), answer)
    assert "".join(token.text for token in found.tokens) == answer
    assert (found.model, found.compensated, found.complete) == ("demo", True, True)
    assert [token.chosen for token in found.tokens] == [0] * len(found.tokens)
    assert all(token.draft is None for token in found.tokens)
    assert to_json(from_json(Inspection, to_json(found), strict=True)) == to_json(found)
    own.close()


def test_logits_are_those_with_and_without_compensation() -> None:
    """Each of them as one forward pass over the whole conversation gives it."""
    own = engine(k_chunk=512)
    answer = answered(own)
    prompt = own.chat_prompt(HELLO)
    spoken = own.tokenizer.encode(answer, special=False)
    found = own.inspect(prompt, answer).tokens
    own.close()
    plain, _ = open_decoder(
        StoredModel.open_folder(demo_path(), "demo"), DecoderOptions(context=256, k_chunk=0), "reference"
    )
    tokens = np.array([*prompt, *spoken[:-1]], np.int32)
    rows = np.arange(tokens.size, dtype=np.int32)
    logits = plain.forward(
        Step(tokens=tokens, slots=np.zeros(tokens.size, np.int32), positions=rows, logit_rows=rows[len(prompt) - 1 :])
    )
    assert plain.options.k_chunk == 0
    changed = 0
    for token, row in zip(found, logits, strict=True):
        exact = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        assert token.base_best is not None
        best = token.candidates[token.base_best]
        assert best.base_logit == pytest.approx(row.max(), abs=1e-3)
        assert best.base_probability == pytest.approx(exact.max(), abs=1e-4)
        changed += best.logit is not None and abs(best.logit - row.max()) > 0.01
    assert changed > len(found) / 2, "compensation moves logits"
    plain.close()


def test_nothing_is_said_of_a_base_where_nothing_is_compensated() -> None:
    own = engine()
    found = own.inspect(own.chat_prompt(HELLO), "I am.")
    assert not found.compensated
    assert all(token.base_best is None for token in found.tokens)
    likely = [one.probability for one in found.tokens[0].candidates]
    assert likely == sorted(likely, reverse=True)
    own.close()


def test_drafts_are_told_where_the_engine_drafts() -> None:
    own = engine(kv="hierarchical", k_chunk=64)
    own.speculate(3)
    answer = answered(own)
    found = own.inspect(own.chat_prompt(HELLO), answer)
    first, *rest = [token.draft for token in found.tokens]
    assert first is None
    assert None not in rest
    assert sum(token.draft == token.chosen for token in found.tokens) > len(rest) / 2
    own.close()


def test_a_chat_goes_on_behind_it_and_it_can_be_stopped() -> None:
    own = engine(k_chunk=16)
    reports: list[Progress] = []
    first = answered(own)
    own.inspect(own.chat_prompt(HELLO), first, reports.append)
    assert answered(own) == first
    assert reports[-1].done == reports[-1].total
    with pytest.raises(Cancelled):
        own.inspect(own.chat_prompt(HELLO), first, cancelled=lambda: True)
    with pytest.raises(RequestError):
        own.inspect(own.chat_prompt(HELLO), "")
    with pytest.raises(ContextOverflowError):
        own.inspect(own.chat_prompt(HELLO), "word " * 300)
    own.close()
