"""Embeddings: all backends against the reference, and texts that they distinguish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from assets import demo_path
from models.store import StoredModel
from runtime.backends.decoder import Decoder, DecoderOptions, Step
from runtime.engine.engine import Engine, embed
from runtime.errors import Cancelled, ContextOverflowError, RequestError
from runtime.load.plan import open_decoder, open_engine

NEVER: Callable[[], bool] = lambda: False  # noqa: E731
KINDS = ("fp16", "int4")


def opened(backend: str, **options: Any) -> Decoder:
    model = StoredModel.open_folder(demo_path(), "demo")
    return open_decoder(model, DecoderOptions(**{"context": 128, "max_rows": 16, **options}), backend)[0]


def by_hand(decoder: Any, tokens: list[int]) -> np.ndarray:
    """The rows behind the final norm, caught on their way to the head."""
    seen: list[torch.Tensor] = []
    head = decoder.linears["head"]
    decoder.linears["head"] = lambda x, *_, **__: seen.append(x) or head(x, *_, **__)
    for at in range(0, len(tokens), 16):
        part = tokens[at : at + 16]
        rows = np.arange(at, at + len(part), dtype=np.int32)
        every = np.arange(len(part), dtype=np.int32)
        slots = np.zeros(len(part), np.int32)
        decoder.forward(
            Step(tokens=np.array(part, np.int32), slots=slots, positions=rows, logit_rows=every, prefill=True)
        )
    decoder.linears["head"] = head
    mean = torch.cat(seen).double().mean(0).numpy()
    return mean / np.linalg.norm(mean)


@pytest.mark.parametrize("kv", KINDS)
def test_the_mean_of_the_rows_behind_the_final_norm(kv: str) -> None:
    tokens = list(range(20, 60))
    reference = opened("reference", kv=kv)
    own = embed(reference, tokens, NEVER)
    np.testing.assert_allclose(own, by_hand(reference, tokens), atol=1e-6)
    assert own.dtype == np.float32
    assert np.linalg.norm(own) == pytest.approx(1, abs=1e-6)
    cpu = opened("cpu", kv=kv)
    found = embed(cpu, tokens, NEVER)
    assert float(found @ own) > 0.999  # activations of 8 bits and sums in another order
    again = embed(cpu, tokens, NEVER)
    np.testing.assert_array_equal(found, again)
    for decoder in (reference, cpu):
        decoder.close()


def test_it_stops_when_it_is_asked() -> None:
    decoder = opened("reference")
    with pytest.raises(Cancelled):
        embed(decoder, [5] * 40, lambda: True)
    decoder.close()


@pytest.fixture(scope="module")
def engine() -> Any:
    model = StoredModel.open_folder(demo_path(), "demo")
    made = open_engine(model, DecoderOptions(context=256), "cpu")
    yield made
    made.close()


def test_texts_of_one_subject_are_closer(engine: Engine) -> None:
    texts = ("The cat sat on the mat.", "A cat sits on a mat.", "Two plus two is four.")
    one, like, other = (engine.embed(engine.text_prompt(text)) for text in texts)
    assert float(one @ like) > float(one @ other)


def test_a_text_that_cannot_be_read_is_refused(engine: Engine) -> None:
    with pytest.raises(ContextOverflowError):
        engine.embed([5] * 256)
    with pytest.raises(RequestError, match="vocabulary"):
        engine.embed([10**6])


def test_a_conversation_goes_on_behind_an_embedding(engine: Engine) -> None:
    from runtime.text.sampling import SamplingOptions

    prompt = engine.chat_prompt([{"role": "user", "content": "hello"}])
    first = [piece.token for piece in engine.generate(prompt, SamplingOptions(temperature=0, max_tokens=5))]
    engine.embed(engine.text_prompt("something else"))
    assert [piece.token for piece in engine.generate(prompt, SamplingOptions(temperature=0, max_tokens=5))] == first
