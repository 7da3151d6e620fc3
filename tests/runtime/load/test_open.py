"""The choice of a backend, and its reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from assets import demo_path
from models.weights import Weights
from runtime.backends import backend
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.errors import BackendError, RequestError
from runtime.load import open as opening


def options(**changes: Any) -> DecoderOptions:
    return DecoderOptions(**{"context": 64, "max_rows": 4, "threads": 1, **changes})


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_a_backend_is_chosen_with_a_reason(tiny_model: Callable[..., Any], backend: str) -> None:
    decoder, reason = opening.open_decoder(tiny_model(), options(), backend)
    assert decoder.backend == ("reference" if backend == "reference" else "cpu")
    assert "backend" in reason
    decoder.close()


def test_auto_falls_back_to_the_reference_and_says_why(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(model: Weights, options: DecoderOptions, progress: object) -> Decoder:
        raise BackendError("no compiler for this processor")

    monkeypatch.setattr(backend("cpu"), "open", unable)
    decoder, reason = opening.open_decoder(tiny_model(), options(), "auto")
    assert decoder.backend == "reference"
    assert "no compiler for this processor" in reason
    with pytest.raises(BackendError, match="no compiler"):
        opening.open_decoder(tiny_model(), options(), "cpu")


def test_an_answer_ends_where_the_model_or_its_tokenizer_says(
    tiny_model: Callable[..., Any], tiny_spec: Callable[..., Any]
) -> None:
    model = tiny_model(tiny_spec(eos_token_ids=(77,)))
    model.tokenizer_path = demo_path()
    engine = opening.open_engine(model, options(), "reference")
    assert engine.tokenizer.eos_token_id not in (None, 77)
    assert engine._eos == {77, engine.tokenizer.eos_token_id}
    engine.close()


def test_a_missing_compiler_is_a_backend_error(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "runtime.backends.cpu.decoder", None)
    decoder, reason = opening.open_decoder(tiny_model(), options())
    assert decoder.backend == "reference"
    assert "cannot be built" in reason


def test_what_cannot_be_opened_is_refused(tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(BackendError, match="triton, cpu, reference"):
        opening.open_decoder(tiny_model(), options(), "metal")
    for context in (0, 129):
        with pytest.raises(RequestError, match="context"):
            opening.open_decoder(tiny_model(), options(context=context))
