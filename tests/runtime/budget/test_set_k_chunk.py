"""k_chunk changed while a model is loaded, and the timers that use it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.cpu.timer import CpuTimer
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.errors import Cancelled, RequestError
from runtime.measure.timing import DecodeTimer, undisturbed
from tests.runtime.conftest import make_model, make_spec
from tests.runtime.engine.talking import hybrid

BACKENDS = {"cpu": CpuDecoder, "reference": ReferenceDecoder}
ROWS = np.arange(6, dtype=np.int32)


def decode(decoder: Any) -> np.ndarray[Any, Any]:
    step = Step(tokens=ROWS + 3, slots=0 * ROWS, positions=ROWS, logit_rows=ROWS, compensate=True)
    return np.array(decoder.forward(step))


@pytest.fixture
def model() -> Any:
    return make_model(make_spec(), bits=3)


@pytest.mark.parametrize("select", ["approx", "exact", "static", "random"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_k_chunk_is_as_good_as_a_fresh_load(model: Any, backend: str, select: Any) -> None:
    loaded = BACKENDS[backend](model, DecoderOptions(context=32, select=select, seed=5))
    for wanted in (0, 64, {"qkv": 8, "down": 300, "head": 1}, 1024, 64, 0):
        loaded.set_k_chunk(wanted, {"qkv": 4})
        fresh = BACKENDS[backend](model, DecoderOptions(context=32, select=select, seed=5, k_chunk=wanted))
        assert np.array_equal(decode(loaded), decode(fresh)), wanted
        assert loaded.options.k_chunk == wanted
        assert loaded.options.n_tb == {"qkv": 4}
        assert loaded.weight_bytes == fresh.weight_bytes
    loaded.set_k_chunk(0)
    plain = decode(loaded)
    loaded.set_k_chunk(1024)
    assert not np.allclose(plain, decode(loaded))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_block_has_a_k_chunk_of_its_own(model: Any, backend: str) -> None:
    loaded = BACKENDS[backend](model, DecoderOptions(context=32))
    assert loaded.spec.num_layers == 2

    def with_k_chunk(**first_and_second: int) -> np.ndarray[Any, Any]:
        loaded.set_k_chunk({key.replace("_", "."): k for key, k in first_and_second.items()})
        return decode(loaded)

    both, none = with_k_chunk(down=64), with_k_chunk(down=0)
    assert np.array_equal(both, with_k_chunk(layers_0_down=64, layers_1_down=64))
    first, second = with_k_chunk(layers_0_down=64), with_k_chunk(layers_1_down=64)
    assert np.array_equal(first, with_k_chunk(down=64, layers_1_down=0))
    assert np.array_equal(second, with_k_chunk(down=64, layers_0_down=0))
    different = [both, none, first, second]
    assert not any(np.array_equal(a, b) for i, a in enumerate(different) for b in different[:i])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_compensated_changes_nothing(backend: str) -> None:
    bare = BACKENDS[backend](make_model(make_spec(), bits=3, residual_bits=0), DecoderOptions(context=32))
    before = decode(bare)
    with pytest.raises(RequestError, match="without residuals"):
        bare.set_k_chunk(8)
    with pytest.raises(RequestError, match="0 to 1024"):
        bare.set_k_chunk(2000)
    with pytest.raises(RequestError, match="layer type 'quux'"):
        bare.set_k_chunk({"quux": 1})
    assert bare.options.k_chunk == 0
    assert np.array_equal(before, decode(bare))


def test_recall_is_still_measured(model: Any) -> None:
    decoder = CpuDecoder(model, DecoderOptions(context=32, select="exact", measure_recall=True))
    decode(decoder)
    assert decoder.recall is None
    decoder.set_k_chunk(1024)
    decode(decoder)
    assert decoder.recall == 1.0


def test_the_cpu_timer_runs_exactly_one_layer_type(model: Any) -> None:
    decoder = CpuDecoder(model, DecoderOptions(context=32))
    layers = decoder.spec.num_layers
    assert len(decoder.layer_program("down", 0)) == layers
    assert len(decoder.layer_program("down", 7)) == 2 * layers
    assert len(decoder.layer_program("head", 7)) == 2
    timer = CpuTimer(decoder, seconds=0.0)
    assert timer.measured
    plain = timer.seconds("down", 0, 0)
    assert 0 < plain < 1
    assert timer.seconds("down", 0, 0) == plain
    assert timer.seconds("down", 0, 512) > 0
    before = decode(decoder)
    timer.seconds("qkv", 0, 16)
    assert np.array_equal(before, decode(decoder))  # timing leaves no trace in what the model computes


class Sleeper:
    """A decoder that takes as long as it is told to, by a clock of its own."""

    def __init__(self, *, base_s: float, each_s: float) -> None:
        self.clock = 0.0
        self.inner_seconds = base_s
        self.each_s = each_s
        self.spec = type("Spec", (), {"vocab_size": 50})
        self.options = DecoderOptions(context=64, k_chunk={"qkv": 3}, n_tb={"qkv": 2})
        self.cache = SimpleNamespace(reach=lambda _, length: length)
        self.k_chunk: Mapping[str, int] | int = 0
        self.set: list[Any] = []

    def session(self) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        self.k_chunk = k_chunk
        self.set.append((k_chunk, n_tb))

    def forward(self, step: Step) -> Any:
        assert isinstance(self.k_chunk, int)
        self.clock += self.inner_seconds + self.each_s * self.k_chunk


def test_the_fastest_tenth_counts() -> None:
    assert undisturbed([5.0, 3.0, 4.0]) == 3.0
    assert undisturbed([1.0] + [2.0] * 9) == 1.0
    assert undisturbed([1.0] + [2.0] * 10) == 2.0
    assert undisturbed([float(i) for i in range(100, 0, -1)]) == 10.0


def test_the_slowdown_of_a_decoder_whose_times_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Sleeper(base_s=2e-4, each_s=1e-5)
    monkeypatch.setattr(time, "perf_counter", lambda: decoder.clock)
    timer = DecodeTimer(decoder, seconds=0.0)  # type: ignore[arg-type]
    assert timer.slowdown(20) == pytest.approx(100)
    assert decoder.set[-1] == ({"qkv": 3}, {"qkv": 2})


def test_a_decoder_with_states_is_timed() -> None:
    """In turns that are longer than what a state can be cut back by."""
    decoder = ReferenceDecoder(make_model(hybrid()), DecoderOptions(kv="fp16", context=32))
    assert DecodeTimer(decoder, seconds=0.0, turn=1.0).slowdown(64) > -100


def test_a_stopped_measurement_leaves_the_decoder_as_it_was() -> None:
    decoder = Sleeper(base_s=0, each_s=0)
    with pytest.raises(Cancelled):
        DecodeTimer(decoder, cancelled=lambda: True).slowdown(20)  # type: ignore[arg-type]
    assert decoder.set[-1] == ({"qkv": 3}, {"qkv": 2})
