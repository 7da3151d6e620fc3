"""The layers that drafts are sensitive to are found by measuring."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from assets import demo_path, evaluation_text
from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions, Step
from runtime.drafting import Speculate
from runtime.engine.costs import ROWS, TOKENS, most_sensitive, sensitivities, start
from runtime.errors import Cancelled, RequestError
from runtime.load.plan import open_engine

TEXT = list(range(TOKENS + 100))


class Scripted:
    """A decoder in which every layer read at 4 bits moves the logits by an amount of its own."""

    def __init__(self, *shifts: float, **options: Any) -> None:
        self.spec = SimpleNamespace(num_layers=len(shifts))
        self.options = DecoderOptions(**{"kv": "hierarchical", "context": 2048, "sensitive_layers": (1,), **options})
        self._shifts = np.array(shifts)
        self.prompts: list[Step] = []
        self.drafts: list[Step] = []

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def set_sensitive_layers(self, layers: Any) -> None:
        self.options = replace(self.options, sensitive_layers=tuple(layers))

    def forward(self, step: Step) -> Any:
        (self.drafts if step.draft else self.prompts).append(step)
        coarse = [layer for layer in range(len(self._shifts)) if layer not in self.options.sensitive_layers]
        logits = np.zeros((step.logit_rows.size, 5), np.float32)
        logits[:, 0] = self._shifts[coarse].sum()
        return logits


def test_layers_are_ordered_by_what_their_four_bits_change() -> None:
    decoder: Any = Scripted(0.1, 0.5, -0.9, 0.3)
    found = sensitivities(decoder, TEXT)
    assert np.argsort(found).tolist() == [0, 3, 1, 2]
    for count, layers in ((1, (2,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (0, 1, 2, 3)), (0, ())):
        assert most_sensitive(decoder, TEXT, count) == layers
    assert decoder.options.sensitive_layers == (1,), "left as it was"


def test_the_text_lies_in_pages_before_the_drafts() -> None:
    decoder: Any = Scripted(0.1, 0.5)
    sensitivities(decoder, TEXT)
    assert np.concatenate([step.positions for step in decoder.prompts]).tolist() == list(range(TOKENS - ROWS))
    assert all(step.prefill for step in decoder.prompts)
    assert len(decoder.drafts) == 3
    assert all(step.positions.tolist() == list(range(TOKENS - ROWS, TOKENS)) for step in decoder.drafts)


@pytest.mark.parametrize(
    ("options", "tokens", "count", "said"),
    [
        ({"kv": "int8"}, 1000, 1, "one precision only"),
        ({}, 200, 1, "320 tokens of text at least, and there are 200"),
        ({"context": 256}, 1000, 1, "longer context"),
        ({}, 1000, 3, "the model has 2"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(
    options: dict[str, Any], tokens: int, count: int, said: str
) -> None:
    decoder: Any = Scripted(0.1, 0.5, **options)
    with pytest.raises(RequestError, match=said):
        most_sensitive(decoder, TEXT[:tokens], count)
    assert decoder.options.sensitive_layers == (1,)


def test_it_can_be_stopped() -> None:
    decoder: Any = Scripted(0.1, 0.5)
    with pytest.raises(Cancelled):
        sensitivities(decoder, TEXT, cancelled=lambda: bool(decoder.drafts))
    assert decoder.options.sensitive_layers == (1,)


def test_a_real_model_drafts_with_its_most_sensitive_layers() -> None:
    """The KL divergence of one layer alone is that of a distribution that differs, and smaller for others."""
    options = DecoderOptions(kv="hierarchical", context=700, slots=2, max_rows=64)
    engine = open_engine(StoredModel.open_folder(demo_path(), "demo"), options, "cpu")
    try:
        text = engine.tokenizer.encode(evaluation_text())
        start(engine, Speculate(gamma=2, sensitive_layers=2), text=lambda: text)
        assert engine.speculates
        chosen = engine.decoder.options.sensitive_layers
        with engine.borrow(TOKENS) as decoder:
            found = sensitivities(decoder, text)
        assert min(found) > 0
        assert set(chosen) == set(np.argsort(found)[-2:].tolist())
        start(engine, Speculate(gamma=2))
        assert engine.decoder.options.sensitive_layers == ()
    finally:
        engine.close()
