"""The interface of all backends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.backends import NAMES, ModelSizes, backend, backends
from runtime.backends.decoder import DecoderOptions
from runtime.errors import BackendError
from runtime.kv.kinds import KINDS
from tests.runtime.conftest import make_model, make_spec

SIZES = ModelSizes(weight_bytes=600 << 20, residual_bytes=500 << 20)


def test_they_are_known_by_their_names() -> None:
    assert [found.name for found in backends()] == list(NAMES)
    with pytest.raises(BackendError, match="choose one of auto, triton, shared, cpu, reference"):
        backend("metal")


@pytest.mark.parametrize("name", NAMES)
def test_each_says_whether_it_can_run_here_and_what_it_has(name: str) -> None:
    presence = backend(name).probe()
    assert presence.reason
    assert presence.usable == (name not in ("triton", "shared") or presence.gpu is not None)
    assert set(backend(name).kinds) == set(KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_residuals_count_where_they_are_used(name: str) -> None:
    plain, used = (backend(name).footprint(make_spec(), SIZES, compensated=on) for on in (False, True))
    assert (plain.residual_bytes, used.residual_bytes) == (0, SIZES.residual_bytes)


def test_all_residuals_of_the_cpu_are_there_twice() -> None:
    once, twice = (
        backend("cpu").footprint(make_spec(), replace(SIZES, whole=on), compensated=True) for on in (False, True)
    )
    assert twice.residual_bytes == 2 * once.residual_bytes > 0


def test_the_reference_unpacks_the_weights() -> None:
    spec = make_spec()
    plain, both = (backend("reference").footprint(spec, SIZES, compensated=on) for on in (False, True))
    table = 2 * spec.vocab_size * spec.hidden_size
    assert plain.weight_bytes > 4 * spec.num_layers * spec.hidden_size**2
    assert both.weight_bytes - table == 2 * (plain.weight_bytes - table)


def test_a_gpu_s_driver_takes_room_of_its_own() -> None:
    taken = {name: backend(name).footprint(make_spec(), SIZES, compensated=True) for name in ("cpu", "triton")}
    assert taken["triton"].overhead_bytes > taken["cpu"].overhead_bytes == 0


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_one_opens_a_model_and_lacks_nothing(name: str) -> None:
    decoder = backend(name).open(make_model(), DecoderOptions(context=64, max_rows=4, threads=1))
    assert decoder.backend == name
    assert backend(name).problems(decoder) == ()
    decoder.close()


def test_what_the_cpu_is_called_names_its_kernels_and_threads() -> None:
    device = backend("cpu").device(DecoderOptions(threads=4))
    assert device.capability.endswith(", 4 threads")
    assert str(backend("cpu").device(DecoderOptions(threads=1))).endswith(", 1 thread)")
    assert device.driver is None


def test_the_reference_has_no_clock() -> None:
    found = backend("reference")
    with pytest.raises(BackendError, match="not tuned"):
        found.device(DecoderOptions())
    with pytest.raises(BackendError, match="not tuned"):
        found.timer(found.open(make_model(), DecoderOptions(context=64)), seconds=0.1)
