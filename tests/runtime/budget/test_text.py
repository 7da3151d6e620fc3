"""What a loaded model loses on a text by its compensation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from assets import demo_path
from models.store import StoredModel
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions
from runtime.budget.text import TextLoss, text_id
from runtime.compensation import CHUNK, k_chunk_by_type
from runtime.errors import Cancelled
from runtime.measure.evaluate import perplexity
from runtime.text.tokenizer import Tokenizer
from tests.runtime.conftest import make_model, make_spec


@pytest.fixture
def decoder() -> Any:
    return CpuDecoder(make_model(make_spec(), bits=3), DecoderOptions(context=64, prompt_k_chunk=CHUNK, k_chunk=5))


def loss_of(decoder: Any, cancelled: Callable[[], bool] = lambda: False) -> TextLoss:
    tokens = np.random.default_rng(0).integers(0, decoder.spec.vocab_size, 300).tolist()
    return TextLoss(decoder, tokens, cancelled)


def test_more_compensation_loses_less_and_all_of_it_nothing(decoder: Any) -> None:
    loss = loss_of(decoder)
    whole = {**k_chunk_by_type(CHUNK), "head": CHUNK // 2}
    found = [loss(k_chunk) for k_chunk in (k_chunk_by_type(0), k_chunk_by_type(256), whole)]
    assert found[0] > found[1] > found[2] >= 0
    assert found[2] < 0.02 * found[0], "a prompt's weights with residuals are rounded to 8 bits"
    assert decoder.options.k_chunk == 5, "it must stay as it was"


def test_the_same_again_is_the_same(decoder: Any) -> None:
    assert loss_of(decoder)(k_chunk_by_type(8)) == loss_of(decoder)(k_chunk_by_type(8))


def test_it_can_be_stopped(decoder: Any) -> None:
    """Between any two steps, and it then finds its way again."""
    polled = iter([False] * 5 + [True])
    loss = loss_of(decoder, lambda: next(polled, False))
    with pytest.raises(Cancelled):
        loss(k_chunk_by_type(8))
    assert decoder.options.k_chunk == 5
    assert loss(k_chunk_by_type(8)) == loss_of(decoder)(k_chunk_by_type(8))


def test_a_text_on_a_stored_model() -> None:
    model = StoredModel.open_folder(demo_path(), "demo")
    decoder = CpuDecoder(model, DecoderOptions(context=64))
    text = "lowbit-chat keeps what rounding removed in ordinary memory, and fetches what matters. " * 8
    loss = TextLoss(decoder, Tokenizer(model.path).encode(text), lambda: False)
    assert loss(k_chunk_by_type(0)) > loss(k_chunk_by_type(256)) > 0
    decoder.close()


def test_texts_and_prompts_are_told_apart() -> None:
    options = DecoderOptions(context=256)
    assert text_id("a", options) == text_id("a", replace(options, context=512, k_chunk=4))
    others = [("b", options), ("a", replace(options, prompt_k_chunk=CHUNK)), ("a", replace(options, context=64))]
    assert len({text_id("a", options), *(text_id(text, own) for text, own in others)}) == 4


def test_rows_together_score_what_tokens_one_by_one_do(decoder: Any) -> None:
    tokens = np.random.default_rng(1).integers(0, decoder.spec.vocab_size, 90).tolist()
    alone = perplexity(decoder, tokens, 60, 30, as_chat=True)
    together = perplexity(decoder, tokens, 60, 30, as_chat=True, rows=16)
    assert together.tokens == alone.tokens
    assert together.nll_sum == pytest.approx(alone.nll_sum, rel=1e-6)
