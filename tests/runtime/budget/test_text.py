"""What a loaded model loses on a text by its compensation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from assets import demo_path
from models.store import StoredModel
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions
from runtime.budget.text import TextLoss, text_id, text_loss
from runtime.compensation import CHUNK, k_chunk_by_type
from runtime.errors import Cancelled
from runtime.measure.evaluate import perplexity


@pytest.fixture
def decoder(tiny_model: Any, tiny_spec: Any) -> Any:
    return CpuDecoder(tiny_model(tiny_spec(), bits=3), DecoderOptions(context=64, prompt_k_chunk=CHUNK, k_chunk=5))


def loss_of(decoder: Any, told: list[Mapping[str, int]], **options: Any) -> TextLoss:
    tokens = np.random.default_rng(0).integers(0, decoder.spec.vocab_size, 300).tolist()
    return TextLoss(decoder, tokens, options.get("known", ()), told.append, options.get("cancelled", lambda: False))


def test_more_compensation_loses_less_and_all_of_it_nothing(decoder: Any) -> None:
    told: list[Mapping[str, int]] = []
    loss = loss_of(decoder, told)
    found = [loss(k_chunk_by_type(k_chunk)) for k_chunk in (0, 256, CHUNK)]
    assert found[0] > found[1] > found[2] == pytest.approx(0, abs=1e-5)
    assert decoder.options.k_chunk == 5, "it must stay as it was"
    assert [k_chunk["qkv"] for k_chunk in told] == [0, 256, CHUNK]


def test_the_same_again_is_the_same_and_is_not_measured(decoder: Any) -> None:
    told: list[Mapping[str, int]] = []
    first, again = loss_of(decoder, told), loss_of(decoder, told)
    found = first(k_chunk_by_type(8))
    assert again(k_chunk_by_type(8)) == found
    known = loss_of(decoder, told, known=first.known)
    assert (known(k_chunk_by_type(8)), known.known, len(told)) == (found, first.known, 2)


def test_it_can_be_stopped(decoder: Any) -> None:
    with pytest.raises(Cancelled):
        loss_of(decoder, [], cancelled=lambda: True)(k_chunk_by_type(8))
    assert decoder.options.k_chunk == 5


def test_a_text_on_a_stored_model() -> None:
    model = StoredModel.open_folder(demo_path(), "demo")
    decoder = CpuDecoder(model, DecoderOptions(context=64))
    text = "lowbit-chat keeps what rounding removed in ordinary memory, and fetches what matters. " * 8
    loss = text_loss(decoder, model, text, (), lambda _: None, lambda: False)
    assert loss(k_chunk_by_type(0)) > loss(k_chunk_by_type(256)) > 0
    decoder.close()


def test_texts_are_told_apart() -> None:
    assert text_id(None) == ""
    assert text_id("a") == text_id("a") != text_id("b")


def test_rows_together_score_what_tokens_one_by_one_do(decoder: Any) -> None:
    tokens = np.random.default_rng(1).integers(0, decoder.spec.vocab_size, 90).tolist()
    alone = perplexity(decoder, tokens, 60, 30, as_chat=True)
    together = perplexity(decoder, tokens, 60, 30, as_chat=True, rows=16)
    assert together.tokens == alone.tokens
    assert together.nll_sum == pytest.approx(alone.nll_sum, rel=1e-6)
