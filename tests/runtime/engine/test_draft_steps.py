"""Draft steps read only the upper plane of the hierarchical cache, on the reference and on the CPU.

The GPU's decoder is checked in `tests/runtime/backends/triton/test_triton_decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.errors import RequestError
from runtime.kv.kinds import PARTS, KVKind
from tests.runtime.conftest import make_model, make_spec

Factory = Callable[..., Any]
OPTIONS: Any = {"context": 280, "max_rows": 128, "kv": "hierarchical"}
PROMPT = np.random.default_rng(3).integers(0, 96, 280).tolist()


def rows(start: int, count: int, **how: Any) -> Step:
    """Tokens of the prompt, and the logits of all."""
    return Step.of(PROMPT[start : start + count], start, **how)


def rms(x: np.ndarray[Any, Any]) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(x**2)))


def clear_lower_plane(decoder: Any) -> None:
    """Zeros in the lower plane of all pages: a full read then gives what a draft reads."""
    store = decoder.cache.store
    for part in PARTS:
        if isinstance(decoder, ReferenceDecoder):
            store.fields(part, store.pools[part])["lower"].zero_()
        else:
            fields = store.layout.read(store.records, part)
            store.layout.write(store.records, part, fields | {"lower": np.zeros_like(fields["lower"])})


@pytest.fixture
def prompted() -> Factory:
    """Makes decoders with 256 tokens in their cache: the next step cuts a page of 128 off their windows."""
    model = make_model(make_spec(max_context=512), bits=4)

    def make(backend: type, kv: KVKind) -> Any:
        decoder = backend(model, DecoderOptions(context=280, max_rows=128, kv=kv))
        for start in (0, 128):
            decoder.forward(rows(start, 128))
        return decoder

    return make


@pytest.mark.parametrize(("backend", "rounding"), [(ReferenceDecoder, 1e-6), (CpuDecoder, 5e-2)])
@pytest.mark.parametrize("count", [1, 4])
def test_a_draft_reads_the_upper_plane_alone(prompted: Factory, backend: type, rounding: float, count: int) -> None:
    """The CPU rounds queries more coarsely where there is one plane."""
    decoder = prompted(backend, "hierarchical")
    full, draft, again = (np.array(decoder.forward(rows(256, count, draft=draft))) for draft in (False, True, False))
    clear_lower_plane(decoder)
    upper = np.array(decoder.forward(rows(256, count)))
    assert rms(draft - upper) <= rounding * rms(full)
    assert rms(draft - full) > 2 * rounding * rms(full)
    assert np.array_equal(again, full)


@pytest.mark.parametrize("backend", [ReferenceDecoder, CpuDecoder])
def test_a_draft_reads_both_planes_of_sensitive_layers(prompted: Factory, backend: type) -> None:
    """With all layers it is a step without compensation; each layer alone takes it part of the way."""
    decoder = prompted(backend, "hierarchical")

    def drafted(*layers: int) -> np.ndarray[Any, Any]:
        decoder.set_sensitive_layers(layers)
        return np.array(decoder.forward(rows(256, 1, draft=True)))

    plain, first, second, both, again = (drafted(*own) for own in ((), (0,), (1,), (1, 0, 1), ()))
    assert decoder.options.sensitive_layers == ()
    full = np.array(decoder.forward(rows(256, 1)))
    assert np.array_equal(both, full)
    assert np.array_equal(again, plain)
    assert 0 < rms(first - full) != rms(second - full) > 0
    assert rms(first - plain) > 0 < rms(second - plain)
    with pytest.raises(RequestError, match="layers are 0 to 1"):
        decoder.set_sensitive_layers([2])


@pytest.mark.parametrize("backend", [ReferenceDecoder, CpuDecoder])
def test_sensitive_layers_are_an_option_too(backend: type) -> None:
    model = make_model(make_spec(max_context=512), bits=4)
    decoders = [backend(model, DecoderOptions(**OPTIONS, sensitive_layers=layers)) for layers in ((), (1, 0))]
    for decoder in decoders:
        for start in (0, 128):
            decoder.forward(rows(start, 128))
    without, with_all = (np.array(decoder.forward(rows(256, 1, draft=True))) for decoder in decoders)
    assert not np.array_equal(without, with_all)
    assert np.array_equal(with_all, decoders[0].forward(rows(256, 1)))
    with pytest.raises(RequestError, match="layers are 0 to 1"):
        backend(model, DecoderOptions(**OPTIONS, sensitive_layers=(-1,)))


@pytest.mark.parametrize("backend", [ReferenceDecoder, CpuDecoder])
def test_kinds_without_planes_read_everything(prompted: Factory, backend: type) -> None:
    decoder = prompted(backend, "int4")
    full = np.array(decoder.forward(rows(256, 1)))
    assert np.array_equal(full, decoder.forward(rows(256, 1, draft=True)))


@pytest.mark.parametrize("backend", [ReferenceDecoder, CpuDecoder])
def test_a_step_may_leave_windows_as_they_are(prompted: Factory, backend: type) -> None:
    """Drafted tokens are not quantized before they are verified."""
    decoder = prompted(backend, "kivi2")
    for start, count in ((256, 4), (260, 1)):
        decoder.forward(rows(start, count, draft=True, flush=False))
        assert decoder.cache.paged_length(0) == 0
    decoder.forward(rows(256, 4))
    assert decoder.cache.paged_length(0) == 128
