"""The plain torch operations against their definitions as loops or in another library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.packing import unpack
from runtime.backends.operations import channels as budget
from runtime.backends.operations.compensation import approximate, bucket_of, compensate, dequantize_residual, exact
from runtime.backends.operations.layers import attend, rms_norm, rotate, silu_gate
from runtime.backends.operations.linear import dequantize, dequantize_groups, gemv, gemv_int8, quantize_groups
from runtime.errors import InvalidActivationError
from tests.close import Tolerance, assert_close
from tests.runtime.conftest import pack_codebook_linear, pack_linear

WIDTHS = [1, 31, 64, 172, 1024, 1025, 2100]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("N", "K", "group"), [(1, 1, 32), (5, 64, 32), (7, 172, 64), (3, 300, 128)])
def test_dequantize_follows_the_formula(bits: int, N: int, K: int, group: int) -> None:
    weight = np.random.default_rng(1).standard_normal((N, K)).astype(np.float32)
    packed = pack_linear(weight, bits=bits, group_size=group)
    restored = dequantize(packed).numpy()
    step = np.repeat(packed.scales.astype(np.float32), group, axis=1)[:, :K]
    assert restored.shape == (N, K)
    assert np.all(np.abs(restored - weight) <= step * 0.51 + 1e-3 * np.abs(weight))
    codes = restored / step + np.repeat(packed.zeros, group, axis=1)[:, :K]
    assert_close(codes, np.rint(codes), Tolerance(atol=1e-3, why="whole numbers up to 127 after a division"))


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (5, 64), (7, 172)])
def test_a_codebook_is_looked_up_by_every_row(bits: int, N: int, K: int) -> None:
    weight = np.random.default_rng(1).standard_normal((N, K)).astype(np.float32)
    packed = pack_codebook_linear(weight, bits=bits)
    codes = unpack(packed.codes, bits, K)
    restored = dequantize(packed).numpy()
    for n in range(N):
        for k in range(K):
            assert restored[n, k] == np.float32(packed.codebook[n, codes[n, k]]) * np.float32(packed.scales[n, 0])


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_base_and_residual_together_restore_the_weight(bits: int) -> None:
    weight = np.random.default_rng(2).standard_normal((6, 100)).astype(np.float32)
    packed = pack_linear(weight, bits=3, residual_bits=bits)
    before = np.abs(dequantize(packed).numpy() - weight).max()
    after = np.abs(dequantize(packed).numpy() + dequantize_residual(packed.residual, 6).numpy().T - weight).max()
    assert after < before * {2: 1.0, 4: 0.1, 8: 0.006, 16: 0.001}[bits]


@pytest.mark.parametrize("make", [pack_linear, pack_codebook_linear])
def test_gemv_int8_equals_the_product_of_the_dequantized(make: Any) -> None:
    weight = np.random.default_rng(3).standard_normal((9, 172)).astype(np.float32)
    packed = make(weight, group_size=64, bias=np.arange(9, dtype=np.float32))
    codes, scales = quantize_groups(normal(4, 172), 64)
    x = dequantize_groups(codes, scales, 64)
    expected = gemv(x, dequantize(packed), torch.arange(9.0))
    assert_close(gemv_int8(codes, scales, packed).float(), expected)


@pytest.mark.parametrize("K", [1, 32, 100, 128])
def test_int8_activations_are_within_half_a_step(K: int) -> None:
    x = normal(3, K) * torch.tensor([[1e-6], [1.0], [1e6]])
    x[0, : K // 2] = 0
    codes, scales = quantize_groups(x, 32)
    step = scales.repeat_interleave(32, dim=1)[:, :K]
    assert codes.abs().max() <= 127
    assert bool(((dequantize_groups(codes, scales, 32) - x).abs() <= step * 0.5001).all())


def test_int8_activations_of_zeros_and_denormals_are_zero() -> None:
    codes, scales = quantize_groups(torch.tensor([[0.0] * 32 + [1e-44] * 32]), 32)
    assert not codes.any()
    assert torch.isfinite(scales).all()


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("k_chunk", [0, 1, 16, 1024])
def test_exact_is_the_sorted_top_of_every_chunk(K: int, k_chunk: int) -> None:
    x = normal(3, K)
    chosen = exact(x, k_chunk)
    assert chosen.shape == (3, budget.total_budget(K, k_chunk))
    for row in range(3):
        expected: list[int] = []
        for start in range(0, K, 1024):
            part = x[row, start : start + 1024].abs().tolist()
            order = sorted(range(len(part)), key=lambda i: (-part[i], i))
            expected += sorted(start + i for i in order[: budget.chunk_budget(len(part), k_chunk)])
        assert chosen[row].tolist() == expected


def test_ties_go_to_the_lowest_channel() -> None:
    x = torch.tensor([[1.0, -1, 2, 1, -1]])
    assert exact(torch.nn.functional.pad(x, (0, 1019)), 3).tolist() == [[0, 1, 2]]


def test_buckets_are_those_of_the_boundaries() -> None:
    found = budget.buckets(np.array([30.0, 20, 16, 4, 1], np.float32), 3)
    x = torch.cat([torch.linspace(0, 40, 4001), torch.tensor([0.0, 16, 30, 1e30])]).unsqueeze(0)
    edges = torch.from_numpy(found.boundaries)
    by_search = (x.unsqueeze(-1) < edges).sum(-1)
    near = (x.unsqueeze(-1) - edges).abs().min(-1).values < 1e-4
    assert bool((bucket_of(x, found) == by_search)[~near].all())
    assert bucket_of(torch.tensor([[0.0, 16.0, 30.0, 1e30, -1e30]]), found).tolist() == [[31, 15, 0, 0, 0]]


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("k_chunk", [1, 16, 64, 1024])
def test_approximate_never_leaves_out_a_higher_bucket(K: int, k_chunk: int) -> None:
    x = normal(4, K, seed=K)
    ranks = x.abs().sort(dim=1, descending=True).values.max(0).values.numpy()
    found = budget.buckets(ranks, budget.total_budget(K, k_chunk))
    chosen = approximate(x, k_chunk, found)
    assert chosen.shape == (4, budget.total_budget(K, k_chunk))
    bucket = bucket_of(x, found)
    for row in range(4):
        assert len(set(chosen[row].tolist())) == chosen.shape[1]
        for start in range(0, K, 1024):
            inside = [c for c in chosen[row].tolist() if start <= c < start + 1024]
            outside = [c for c in range(start, min(start + 1024, K)) if c not in set(inside)]
            last = max(int(bucket[row, c]) for c in inside)
            assert all(bucket[row, c] >= last for c in outside)
            taken = [c for c in inside if bucket[row, c] == last]
            assert all(c > max(taken) for c in outside if bucket[row, c] == last)


def test_approximate_recall_is_high_on_data_like_the_calibration() -> None:
    calibration = normal(256, 1024, seed=1)
    ranks = calibration.abs().sort(dim=1, descending=True).values.max(0).values.numpy()
    x = normal(64, 1024, seed=2)
    chosen = approximate(x, 32, budget.buckets(ranks, 32))
    recalls = [budget.recall(row, picks) for row, picks in zip(x.numpy(), chosen.numpy(), strict=True)]
    assert 0.7 < float(np.mean(recalls)) < 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_activations_raise(bad: float) -> None:
    x = torch.zeros(2, 64)
    x[1, 7] = bad
    for select in (lambda: exact(x, 16), lambda: approximate(x, 16, budget.buckets(np.ones(64, np.float32), 1))):
        with pytest.raises(InvalidActivationError, match="row 1, channel 7"):
            select()


def test_compensate_adds_the_selected_rows_of_each_row_only() -> None:
    x, residual, base = normal(2, 5), normal(5, 3, seed=1), normal(2, 3, seed=2)
    channels = torch.tensor([[0, 4], [1, 2]])
    expected = base.clone()
    for m in range(2):
        for c in channels[m].tolist():
            expected[m] += x[m, c] * residual[c]
    assert_close(compensate(base, x, channels, residual), expected)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attention_by_loops(window: int | None) -> None:
    q, k, v = normal(3, 4, 8), normal(6, 2, 8, seed=1), normal(6, 2, 8, seed=2)
    positions = torch.tensor([0, 3, 5])
    out = attend(q, k, v, positions, window)
    for m, p in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, p - window + 1)
        for h in range(4):
            weights = torch.softmax(k[first : p + 1, h // 2] @ q[m, h] / 8**0.5, dim=0)
            assert_close(out[m, h], weights @ v[first : p + 1, h // 2])


def test_norm_rope_and_gate() -> None:
    x = normal(3, 8)
    assert_close(rms_norm(x, torch.full((8,), 2.0), 0.0).square().mean(1), torch.full((3,), 4.0))
    angle = torch.tensor([[0.0, 1.0]])
    heads = torch.arange(5.0).view(1, 1, 5)
    turned = rotate(heads, angle.cos(), angle.sin())[0, 0]
    a, b = np.cos(1.0), np.sin(1.0)
    assert_close(turned, torch.tensor([0, a - 3 * b, 2, 3 * a + b, 4], dtype=torch.float32))
    assert_close(silu_gate(x, x), x * x * torch.sigmoid(x))
