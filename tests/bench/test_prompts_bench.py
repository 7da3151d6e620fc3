"""The benchmark of compensated prompts, on a model of random weights."""

from __future__ import annotations

import pytest

from runtime.backends.decoder import DecoderOptions
from runtime.load.open import open_decoder
from tests.bench import steps
from tests.bench.prompts import measured, models
from tests.bench.reporting.run import shown
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--stored a=/tmp/a b=c --out x.json --rounds 3", "--stored a=PATH b=c --out PATH --rounds 3"),
        ("--peer-python=here --smollm2 /data/one --only gear", "--peer-python=PATH --smollm2 PATH --only gear"),
    ],
)
def test_a_command_names_no_places(words: str, told: str) -> None:
    assert shown(words.split()) == told.split()


def test_steps_of_some_sizes_are_timed_in_every_way() -> None:
    model = make_model(bits=3)
    found = steps.measured("tiny", model, (1, 3), 2)
    assert [(row.way, row.rows) for row in found] == [(way.name, rows) for way in steps.WAYS for rows in (1, 3)]
    assert all(0 < row.undisturbed_ms <= row.median_ms for row in found)
    limits = {row.way: row.limit_ms for row in found if row.rows == 1}
    assert limits["plain"] < limits["rows 16"] < limits["rows 64"] < limits["all"]
