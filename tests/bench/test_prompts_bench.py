"""The benchmark of compensated prompts, on a model of random weights."""

from __future__ import annotations

import pytest

from runtime.decoder import DecoderOptions
from runtime.open import open_decoder
from tests.bench.prompts import measured, models
from tests.runtime.conftest import make_model


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_row_has_both_sides(backend: str) -> None:
    options = DecoderOptions(context=24, max_rows=8, prompt_k_chunk=1024)
    row = measured("tiny", open_decoder(make_model(bits=3), options, backend)[0], 21, 2)
    assert (row.model, row.backend, row.tokens, row.rows, row.rounds) == ("tiny", backend, 21, 8, 2)
    assert min(row.without_s, row.with_s) > 0


def test_the_shape_has_room_for_long_prompts() -> None:
    (name, model), *rest = models([], [3])
    assert not rest
    assert name == "1.1 B shape, 3 bits"
    assert model.spec.max_context >= 4096
