"""The choice of a backend, and its reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from assets import demo_path
from models.recipe import Recipe
from models.spec import MixtureSpec
from models.weights import Weights
from runtime.backends import Presence, backend
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.compensation import Compensation
from runtime.errors import BackendError, RequestError
from runtime.load import open as opening
from runtime.load.plan import plan_load
from tuner.detect import MemoryInfo


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


def test_auto_passes_over_a_backend_that_does_not_run_the_architecture(
    tiny_spec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a card, it takes mixtures of experts; what a backend there refuses goes to the CPU."""
    mixture = MixtureSpec(experts=4, chosen=2, width=32, normalized=True)
    summary = SimpleNamespace(gpu_bytes=1 << 20, residual_bytes=1 << 20)
    model: Any = SimpleNamespace(
        spec=tiny_spec(mixture=mixture), info=SimpleNamespace(summary=summary), recipe=Recipe()
    )
    memory = MemoryInfo(total_bytes=8 << 30, available_bytes=8 << 30, limit_bytes=None)
    there = Presence(usable=True, reason="there is a card", memory=memory)
    monkeypatch.setattr(backend("triton"), "probe", lambda: there)
    for taken in (mixture, replace(mixture, bias=True), replace(mixture, beside=True)):
        model.spec = tiny_spec(mixture=taken)
        assert plan_load(model, Compensation(k_chunk=0)).backend.name == "triton"

    def refused(*_: Any, **__: Any) -> Any:
        raise BackendError("no kernels for such experts: use the CPU backend")

    monkeypatch.setattr(backend("triton"), "footprint", refused)
    planned = plan_load(model, Compensation(k_chunk=0))
    assert planned.backend.name == planned.backend_name == "cpu"
    with pytest.raises(BackendError, match="no kernels for such experts: use the CPU backend"):
        plan_load(model, Compensation(k_chunk=0), backend_name="triton")


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
