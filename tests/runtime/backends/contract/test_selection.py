"""Choosing salient channels, on every backend: the channels of the plain references, always."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from models.packed import PackedLinear
from runtime.backends.operations import channels as budget
from runtime.backends.operations import compensation as selection
from tests.close import assert_close
from tests.runtime.backends.contract.kernels import Kernels, Selector
from tests.runtime.backends.contract.operands import activations
from tests.runtime.conftest import pack_linear


def calibrated(K: int, k_chunk: int) -> budget.Buckets:
    """Buckets of other activations of the same kind."""
    ranks = activations(8, K, seed=99).abs().sort(dim=1, descending=True).values.max(0).values.numpy()
    return budget.buckets(ranks, budget.total_budget(K, k_chunk))


def chosen(kernels: Kernels, x: torch.Tensor, how: Selector) -> torch.Tensor:
    channels, broken = kernels.select(x, how)
    assert not broken
    return channels


@pytest.mark.parametrize(
    ("K", "k_chunk"),
    [
        *((K, 16) for K in (1, 31, 64, 96, 1000, 1024, 1100, 2500)),
        *((K, k) for K in (31, 2500) for k in (1, 100, 1024)),
    ],
)
def test_every_selector(kernels: Kernels, K: int, k_chunk: int) -> None:
    x = activations(3, K)
    x[1] = (2 * x[1]).round() / 2  # many equal magnitudes
    x[2] = 0
    edges = calibrated(K, k_chunk)
    found = chosen(kernels, x, Selector(mode="approx", k_chunk=k_chunk, buckets=edges))
    assert torch.equal(found, selection.approximate(x, k_chunk, edges))
    assert torch.equal(chosen(kernels, x, Selector(mode="exact", k_chunk=k_chunk)), selection.exact(x, k_chunk))
    static = budget.static_channels(np.random.default_rng(K).random(K).astype(np.float32), k_chunk)
    found = chosen(kernels, x, Selector(mode="static", k_chunk=k_chunk, static=static))
    assert torch.equal(found, torch.from_numpy(static).long().expand(3, -1))


@pytest.mark.parametrize("seed", [0, 5, -7, 2**63, 2**64 - 1])
def test_random_is_the_shared_generator(kernels: Kernels, seed: int) -> None:
    positions = (0, 101, 4095)
    how = Selector(mode="random", k_chunk=9, seed=seed, layer=11, positions=positions)
    found = chosen(kernels, activations(3, 1100), how)
    for row, position in enumerate(positions):
        expected = budget.random_channels(1100, 9, seed=seed, layer=11, position=position)
        assert found[row].tolist() == expected.tolist()


@pytest.mark.parametrize("mode", ["approx", "exact"])
@pytest.mark.parametrize("value", [0.0, 6e-8, 1.5, 65504.0])
def test_of_equal_magnitudes_the_lowest_channels_are_taken(kernels: Kernels, mode: str, value: float) -> None:
    x = torch.full((1, 1100), value).half().float()
    x[:, ::3] *= -1
    how = Selector(mode=mode, k_chunk=20, buckets=calibrated(1100, 20))  # type: ignore[arg-type]
    assert chosen(kernels, x, how)[0].tolist() == [*range(20), 1024, 1025]


def test_the_bucket_that_overflows_gives_its_lowest_channels(kernels: Kernels) -> None:
    x = torch.full((1, 1024), 0.1).half().float()
    x[0, 1000] = 9.0  # above b0
    x[0, 500:600] = torch.linspace(4.1, 4.4, 100).half().float()  # two buckets, the larger the later
    edges = budget.Buckets(b0=0.0, b15=4.0, upper_scale=15 / 4.0, lower_scale=4.0)
    assert selection.bucket_of(x[:, 500:600], edges).unique().numel() == 2
    found = chosen(kernels, x, Selector(mode="approx", k_chunk=8, buckets=edges))
    assert torch.equal(found, selection.approximate(x, 8, edges))
    assert found[0, -1] == 1000


@pytest.mark.parametrize("k_chunk", [200, 400, 700])
def test_magnitudes_on_the_boundaries_fall_into_the_same_buckets(kernels: Kernels, k_chunk: int) -> None:
    edges = budget.buckets(np.array([30.0, 20, 16, 4], np.float32), 3)
    numbers = np.concatenate([edges.boundaries, -edges.boundaries, [0, 65504, 6e-8]])
    x = torch.from_numpy(numbers).half().float()[None]
    found = chosen(kernels, x, Selector(mode="approx", k_chunk=k_chunk, buckets=edges))
    assert torch.equal(found, selection.approximate(x, k_chunk, edges))


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_buckets_of_a_calibration_without_width(kernels: Kernels, spread: float) -> None:
    """b0 = b15, and b15 = 0: a scale is zero, and nothing is divided by it."""
    x, edges = activations(1, 100), budget.buckets(np.full(100, spread, np.float32), 10)
    found = chosen(kernels, x, Selector(mode="approx", k_chunk=100, buckets=edges))
    assert torch.equal(found, selection.approximate(x, 100, edges))


@pytest.mark.parametrize("mode", ["approx", "exact"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_noticed(kernels: Kernels, mode: str, bad: float) -> None:
    x = activations(2, 1100)
    how = Selector(mode=mode, k_chunk=16, buckets=calibrated(1100, 16))  # type: ignore[arg-type]
    chosen(kernels, x, how)
    x[1, 1050:] = bad
    assert kernels.select(x, how)[1]


PackLinear = Callable[..., PackedLinear]


@pytest.mark.parametrize(
    ("M", "N", "K", "k_chunk", "bits"),
    [
        *((1, 1, 96, 16, bits) for bits in (2, 4, 8, 16)),
        (1, 40, 96, 1024, 4),
        (1, 256, 96, 200, 4),
        *((3, 300, 1100, 16, bits) for bits in (2, 4, 8, 16)),
        (1, 70, 2500, 20, 4),
        *((2, 1030, 64, 100, bits) for bits in (2, 8, 16)),
        (1, 16, 64, 1, 4),
        *((1, 6500, 96, 300, bits) for bits in (2, 4, 16)),  # parts of several blocks of tiles, several groups of rows
        (2, 6500, 96, 300, 4),
    ],
)
def test_compensation(kernels: Kernels, M: int, N: int, K: int, k_chunk: int, bits: int) -> None:
    """Each row selects for itself, and gets the residuals of its channels."""
    weight = np.random.default_rng(N + K).standard_normal((N, K)).astype(np.float32)
    linear, x = pack_linear(weight, bits=3, residual_bits=bits), activations(M, K)
    assert linear.rank_maximum is not None
    assert linear.residual is not None
    edges = budget.buckets(linear.rank_maximum, budget.total_budget(K, k_chunk))
    channels, residual = selection.approximate(x, k_chunk, edges), selection.dequantize_residual(linear.residual, N)
    expected = selection.compensate(torch.zeros(M, N), x, channels, residual)
    assert_close(kernels.compensate(linear, x, k_chunk), expected, "sums")
