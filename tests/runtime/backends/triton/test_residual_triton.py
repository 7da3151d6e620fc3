"""Residuals in page-locked memory, and behaviour when there is not enough of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.packed import PackedLinear, PackedResidual
from runtime.backends.triton import residual as placing
from runtime.backends.triton.residual import (
    LockLimits,
    PageLockError,
    fitting,
    load_residuals,
    lock_limits,
    locked_bytes,
    ordinary,
    page_locked,
    residuals_to_device,
    row_lines,
)
from runtime.errors import BackendError
from tests.runtime.conftest import pack_linear
from tuner.detect import MemoryInfo

GIB = 1 << 30
PLENTY = LockLimits(available_bytes=64 * GIB, memlock_bytes=None)


@pytest.fixture
def layers() -> list[PackedLinear]:
    """Four layers with 4-bit residuals, and one without."""
    rng = np.random.default_rng(0)
    found = [
        pack_linear(rng.standard_normal((40, 96)).astype(np.float32), name=f"layers.{i}.o", residual_bits=4)
        for i in range(4)
    ]
    return [*found, pack_linear(np.zeros((40, 96), np.float32), name="head", residual_bits=0)]


class Locker:
    """Memory that runs out after some allocations."""

    def __init__(self, good: int) -> None:
        self.good, self.asked = good, 0

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.asked += 1
        if self.asked > self.good:
            raise PageLockError("1 GiB could not be page-locked: out of memory")
        return ordinary(nbytes)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("N", [1, 32, 255, 256, 300])
def test_codes_keep_the_canonical_packing(device: str, bits: int, N: int) -> None:
    packed = pack_linear(np.random.default_rng(N).standard_normal((N, 70)).astype(np.float32), residual_bits=bits)
    placed = residuals_to_device([packed.residual], packed.shape, device)
    stored = packed.residual.codes
    words = placed.codes.numpy()
    assert placed.codes.device.type == "cpu"
    assert words.shape == (70, 32 * placed.lines)
    np.testing.assert_array_equal(words[:, : stored.shape[1]], stored)
    assert not words[:, stored.shape[1] :].any()
    assert placed.scales is not None
    np.testing.assert_array_equal(placed.scales.cpu().numpy(), packed.residual.scales)


@pytest.mark.parametrize("N", [1, 63, 64, 65])
def test_halves_lie_two_to_a_word(device: str, N: int) -> None:
    packed = pack_linear(np.random.default_rng(N).standard_normal((N, 70)).astype(np.float32), residual_bits=16)
    placed = residuals_to_device([packed.residual], packed.shape, device)
    halves = placed.codes.numpy().view(np.float16)
    np.testing.assert_array_equal(halves[:, :N], packed.residual.codes)
    assert not halves[:, N:].any()
    assert placed.scales is None
    assert placed.lines == -(-N // 64)


def test_a_segment_of_256_outputs_is_a_line_at_4_bits() -> None:
    assert [row_lines(N, 4) for N in (1, 256, 257, 6144)] == [1, 1, 2, 24]
    assert [row_lines(1024, bits) for bits in (2, 4, 8, 16)] == [2, 4, 8, 16]


def test_what_locking_takes_is_a_power_of_two() -> None:
    assert locked_bytes((256, 1024), 4) == 128 * 1024
    assert locked_bytes((257, 1024), 4) == 256 * 1024
    assert locked_bytes((256, 1025), 4) == 256 * 1024


def test_layers_are_kept_from_the_first_while_they_fit() -> None:
    sizes = {"a": GIB, "b": 2 * GIB, "c": GIB}

    def kept(available: int) -> tuple[str, ...]:
        return fitting(sizes, LockLimits(available_bytes=available, memlock_bytes=65536))

    assert kept(5 * GIB) == ("a", "b", "c")
    assert kept(4 * GIB) == ("a", "b")  # half a gibibyte is left to the system
    assert kept(2 * GIB) == ("a",)  # c would fit in place of b, but then which layers run is hard to say
    assert kept(0) == ()
    assert fitting({}, PLENTY) == ()


def test_all_layers_are_placed_without_a_warning(layers: list[PackedLinear], device: str) -> None:
    loaded = load_residuals(layers, device, limits=PLENTY)
    assert list(loaded.layers) == [f"layers.{i}.o" for i in range(4)]
    assert loaded.warning is None
    assert sum(residual.codes.nbytes for residual in loaded.layers.values()) == 4 * 96 * 128


@pytest.mark.parametrize("good", [0, 1, 3])
def test_what_cannot_be_locked_runs_without_and_one_warning_says_so(
    layers: list[PackedLinear], device: str, good: int
) -> None:
    locker = Locker(good)
    limits = LockLimits(available_bytes=64 * GIB, memlock_bytes=8 << 20)
    loaded = load_residuals(layers, device, limits=limits, allocate=locker)
    assert list(loaded.layers) == [f"layers.{i}.o" for i in range(good)]
    assert locker.asked == good + 1
    assert loaded.warning is not None
    assert loaded.warning.startswith(f"{4 - good} of 4 layers run without error compensation, from layers.{good}.o on")
    assert "1 GiB could not be page-locked: out of memory" in loaded.warning
    for advice in ("close other programs", "`ulimit -l` (now 8 MB)", ".wslconfig", "fewer residual bits"):
        assert advice in loaded.warning
    assert "\n" not in loaded.warning


def test_memory_that_is_not_there_is_not_asked_for(layers: list[PackedLinear], device: str) -> None:
    locker = Locker(4)
    limits = LockLimits(available_bytes=100 << 20, memlock_bytes=None)
    loaded = load_residuals(layers, device, limits=limits, allocate=locker)
    assert (loaded.layers, locker.asked) == ({}, 0)
    assert loaded.warning is not None
    assert "only 105 MB of memory are free" in loaded.warning
    assert "(now" not in loaded.warning


def test_the_refusal_of_the_driver_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        assert kwargs["pin_memory"]
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(placing.torch, "empty", refuse)
    with pytest.raises(PageLockError, match=r"^3 MB could not be page-locked: CUDA error: out of memory$") as caught:
        page_locked(3 << 20)
    assert isinstance(caught.value, BackendError)


def test_the_limits_of_this_process() -> None:
    limits = lock_limits()
    assert limits.available_bytes > 0
    assert limits.memlock_bytes is None or limits.memlock_bytes >= 0


def test_a_control_group_s_limit_bounds_what_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with 2 GiB left on a machine with 60: locked pages count against the container's."""
    group = MemoryInfo(total_bytes=4 * GIB, available_bytes=2 * GIB, limit_bytes=4 * GIB)
    monkeypatch.setattr(placing, "detect_memory", lambda: group)
    assert lock_limits().available_bytes == 2 * GIB


def test_damaged_residuals_are_refused(device: str) -> None:
    scales = np.ones(40, np.float16)
    good = PackedResidual(bits=4, codes=np.zeros((96, 8), np.int32), scales=scales)
    assert residuals_to_device([good], (40, 96), device).lines == 1
    for bad, message in (
        (PackedResidual(bits=3, codes=good.codes, scales=scales), "not 3"),
        (PackedResidual(bits=4, codes=good.codes[:95], scales=scales), "not the 4-bit residuals"),
        (PackedResidual(bits=4, codes=np.zeros((96, 40), np.int32), scales=scales), "not the 4-bit residuals"),
        (PackedResidual(bits=4, codes=np.zeros((96, 4), np.int32), scales=scales), "not the 4-bit residuals"),
        (PackedResidual(bits=16, codes=np.zeros((96, 41), np.float16), scales=None), "not the 16-bit residuals"),
        (PackedResidual(bits=4, codes=good.codes, scales=None), "a scale for each of the 40 outputs"),
        (PackedResidual(bits=4, codes=good.codes, scales=scales[:39]), "a scale for each of the 40 outputs"),
    ):
        with pytest.raises(ValueError, match=message):
            residuals_to_device([bad], (40, 96), device)


@pytest.mark.gpu
def test_residuals_on_a_gpu_are_page_locked(cuda: str, layers: list[PackedLinear]) -> None:
    loaded = load_residuals(layers, cuda)
    assert loaded.warning is None
    for placed in loaded.layers.values():
        assert placed.codes.is_pinned()
        assert placed.codes.data_ptr() % 128 == 0
        assert placed.scales is not None
        assert placed.scales.is_cuda
