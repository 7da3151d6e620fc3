"""Compensation of a prompt's rows together and of experts, against the oracle: fetches, products, two buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models.packed import PackedLinear
from runtime.backends.operations.channels import static_channels
from runtime.backends.operations.compensation import compensate_shared, dequantize_residual, exact
from runtime.backends.triton.kernels.compensate import Output, compensate_experts
from runtime.backends.triton.kernels.residual_gemm import Shared, Staging, multiply, multiply_experts, stage
from runtime.backends.triton.kernels.select import Selection, make_selection, static_table
from runtime.backends.triton.residual import (
    LockLimits,
    load_residuals,
    locked_bytes,
    residuals_to_device,
)
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError
from tests.close import Tolerance, assert_close
from tests.runtime.backends.triton.operands import choice, grouped, poisoned
from tests.runtime.conftest import pack_linear

EXPERTS = 4
SUMS = Tolerance(spread=1e-5, why="sums in another order")
HALVES = Tolerance(spread=2e-3, why="products of halves, on tensor cores")
CASES = [
    # N, K, bits: several lines and tiles, a line that is not full, chunks of 1024 channels that are not
    (600, 40, 4),
    (70, 1100, 2),
    (130, 64, 8),
    (66, 48, 16),
]


@pytest.fixture
def residuals() -> Any:
    """Experts' matrices of a shape, with residuals of so many bits and statistics of their own."""

    def make(N: int, K: int, bits: int) -> list[PackedLinear]:
        rng = np.random.default_rng(N)
        weights = [rng.standard_normal((N, K)).astype(np.float32) for _ in range(EXPERTS)]
        return [
            replace(
                pack_linear(weight, name=f"layers.0.experts.{number}.down", residual_bits=bits),
                mean_square=rng.random(K).astype(np.float32),
            )
            for number, weight in enumerate(weights)
        ]

    return make


def inputs(rows: int, K: int) -> torch.Tensor:
    """Activations without equal magnitudes in a row."""
    order = torch.stack([torch.randperm(K, generator=torch.Generator().manual_seed(row)) for row in range(rows)])
    return ((order + 1) / K * (1 - 2 * (order % 2))).half()


def added(
    packed: list[PackedLinear], x: torch.Tensor, channels: torch.Tensor, chosen: torch.Tensor, each: int
) -> torch.Tensor:
    """What compensation adds to each pair's product, float32 [P, N], by the channels [P, k] of pairs."""
    found = []
    for pair, expert in enumerate(chosen.flatten().tolist()):
        residual = packed[expert].residual
        assert residual is not None
        own = channels[pair].long()
        found.append(x[pair // each].float()[own] @ dequantize_residual(residual, packed[expert].shape[0])[own])
    return torch.stack(found)


def _run(
    x: torch.Tensor,
    packed: list[PackedLinear],
    selection: Selection,
    chosen: torch.Tensor,
    out: torch.Tensor,
    n_tb: int,
) -> None:
    device = out.device
    residual = residuals_to_device([each.residual for each in packed if each.residual], packed[0].shape, device)
    rest = (torch.zeros(1, dtype=torch.int32, device=device), torch.arange(len(chosen), dtype=torch.int32).to(device))
    base = out if bool(out.isfinite().all()) else None
    compensate_experts(x, selection, residual, chosen, Output(out, base), Workspace(device), n_tb=n_tb, rest=rest)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_experts_of_a_row_share_its_channels(residuals: Any, case: tuple[int, int, int], device: str) -> None:
    (N, K, _), M, each = case, 3, 2
    packed, chosen, x = residuals(*case), choice(M, each, EXPERTS, device), inputs(M, K)
    selection = make_selection(packed[0], k_chunk=400, mode="exact", device=device)
    wanted = added(packed, x, exact(x.float(), 400).repeat_interleave(each, dim=0), chosen, each)
    out = poisoned(M * each, N, device=device)
    _run(x.to(device), packed, selection, chosen, out, 1)
    assert_close(out, wanted, SUMS)
    again = torch.full_like(out, torch.nan)
    _run(x.to(device), packed, selection, chosen, again, 3)
    assert torch.equal(out, again), "the number of programs changes no bit"


@pytest.mark.parametrize(("case", "mode"), [*((case, "static") for case in CASES), (CASES[0], "exact")], ids=str)
def test_pairs_choose_and_a_row_s_experts_are_summed(
    residuals: Any, case: tuple[int, int, int], mode: Any, device: str
) -> None:
    """In place, too. The static selector takes other channels for each expert."""
    (N, K, _), M, each = case, 2, 3
    packed, chosen, x = residuals(*case), choice(M, each, EXPERTS, device), inputs(M * each, K)
    selection = make_selection(packed[0], k_chunk=400, mode=mode, device=device, experts=packed)
    channels = exact(x.float(), 400)
    if mode == "static":
        own = [packed[expert].mean_square for expert in chosen.flatten().tolist()]
        channels = torch.from_numpy(np.stack([static_channels(np.asarray(one), 400) for one in own]))
    wanted = added(packed, x, channels, chosen, 1).view(M, each, N).sum(1)
    out, base = poisoned(M, N, device=device), torch.ones(M, N, device=device)
    _run(x.to(device), packed, selection, chosen, out, 2)
    assert_close(out, wanted, SUMS)
    _run(x.to(device), packed, selection, chosen, base, 2)
    assert_close(base, wanted + 1, SUMS)


@pytest.mark.parametrize(
    ("case", "k_chunk"), [*((case, 300) for case in CASES), (CASES[0], 1024), (CASES[3], 1024)], ids=str
)
def test_a_prompt_s_pairs_multiply_with_copies(
    residuals: Any, case: tuple[int, int, int], k_chunk: int, device: str
) -> None:
    """Some channels of each expert and all; a row for each pair, and one for all pairs of a row."""
    (N, K, bits), M, each = case, 40, 2
    packed, chosen = residuals(*case), choice(M, each, EXPERTS - 1, device)
    residual = residuals_to_device([one.residual for one in packed], (N, K), device)
    table = static_table(packed, k_chunk)
    rows = (table + K * torch.arange(EXPERTS)[:, None]).int().flatten().to(device)
    channels = None if table.shape[1] == K else rows
    staged = torch.zeros(len(rows), residual.codes.shape[1], dtype=torch.int32, device=device)
    stage(residual.codes, rows, staged)
    pairs, block_m = M * each, 32
    groups = grouped(chosen, EXPERTS, block_m)
    for reads in (1, each):
        x, out = inputs(pairs // reads, K), torch.ones(pairs, N, device=device)
        shared = Shared(residual=residual, channels=channels)
        multiply_experts(x.to(device), shared, staged, groups, out, each=reads, block_m=block_m)
        own = table[chosen.flatten().long().cpu()]
        assert_close(out, added(packed, x, own, chosen, reads) + 1, SUMS if bits < 16 else HALVES)


def test_residuals_of_experts_lie_one_behind_the_other(residuals: Any, device: str) -> None:
    packed = residuals(66, 48, 4)
    together = residuals_to_device([one.residual for one in packed], (66, 48), device)
    alone = [residuals_to_device([one.residual], (66, 48), device) for one in packed]
    assert torch.equal(together.codes, torch.cat([one.codes for one in alone]))
    assert together.scales is not None
    for number, one in enumerate(alone):
        assert one.scales is not None
        assert torch.equal(together.scales[number], one.scales)
    other = residuals(66, 48, 2)[0].residual
    with pytest.raises(ValueError, match="those of all experts the same"):
        residuals_to_device([packed[0].residual, other], (66, 48), device)


def test_all_experts_of_a_block_find_memory_or_none(residuals: Any, device: str) -> None:
    """They are loaded by the first one's name, and counted together."""
    packed = residuals(256, 1024, 4)
    taken = locked_bytes((256, 1024), 4, EXPERTS)
    assert taken == EXPERTS * locked_bytes((256, 1024), 4)
    name, margin = packed[0].name, 512 << 20
    for free, found in ((taken, [name]), (taken - 1, [])):
        limits = LockLimits(available_bytes=free + margin, memlock_bytes=None)
        loaded = load_residuals(packed[:1], device, {name: packed}, limits=limits)
        assert list(loaded.layers) == found
        assert (loaded.warning is None) == bool(found)


def test_few_rows_leave_experts_out_of_what_is_copied(residuals: Any, device: str) -> None:
    """Their order stays that of the layers that run."""
    packed = residuals(66, 48, 4)
    dense = [residuals_to_device([one.residual], (66, 48), device) for one in packed[:2]]
    of_experts = residuals_to_device([one.residual for one in packed], (66, 48), device)
    selection = make_selection(packed[0], k_chunk=100, mode="static", device=device, experts=packed)
    layers = [
        Shared(residual=dense[0], channels=None),
        Shared(residual=of_experts, channels=None, selection=selection),
        Shared(residual=dense[1], channels=None),
    ]
    staging = Staging(layers, torch.device(device), None)
    for few, wanted in ((False, [dense[0], of_experts, dense[1]]), (True, dense)):
        staging.begin(few=few)
        assert all(torch.equal(staging.take().cpu(), one.codes) for one in wanted)


PRODUCTS = Tolerance(spread=1e-4, why="products of halves are exact; sums of some hundred of them in another order")


@pytest.mark.parametrize(
    ("M", "N", "K", "bits", "k"),
    [(3, 40, 70, 4, 9), (70, 96, 64, 4, 64), (2, 33, 40, 2, 33), (5, 64, 33, 8, 1), (2, 50, 40, 16, 40)],
)
def test_some_channels_of_all_rows(device: str, M: int, N: int, K: int, bits: int, k: int) -> None:
    rng = np.random.default_rng(M + N)
    linear = pack_linear(rng.standard_normal((N, K)).astype(np.float32), bits=3, residual_bits=bits)
    residual = residuals_to_device([linear.residual], (N, K), device)
    x = torch.from_numpy(rng.standard_normal((M, K))).half().to(device)
    chosen = torch.from_numpy(np.sort(rng.permutation(K)[:k]).astype(np.int32)).to(device)
    staged = torch.full((k, residual.codes.shape[1]), -1, dtype=torch.int32, device=device)
    stage(residual.codes, chosen, staged)
    assert bool((staged.cpu() == residual.codes[chosen.cpu().long()]).all())
    base = torch.from_numpy(rng.standard_normal((M, N))).float()
    out = base.to(device, copy=True)
    multiply(x, None if k == K else chosen, staged, residual.scales, bits, out)
    expected = compensate_shared(base, x.cpu().float(), chosen.cpu().long(), dequantize_residual(linear.residual, N))
    assert_close(out.cpu(), expected, PRODUCTS)


def test_operands_that_do_not_belong_together_are_refused(device: str) -> None:
    linear = pack_linear(np.ones((32, 64), np.float32), residual_bits=4)
    residual = residuals_to_device([linear.residual], (32, 64), device)
    x, out = torch.zeros((2, 64), dtype=torch.float16, device=device), torch.zeros((2, 32), device=device)
    with pytest.raises(BackendError, match="63 rows"):
        multiply(x, None, residual.codes[:63].to(device), residual.scales, 4, out)
    with pytest.raises(BackendError, match="residuals of a product"):
        multiply(x, None, residual.codes.to(device), None, 4, out)


def test_layers_arrive_one_ahead_in_two_buffers(device: str) -> None:
    rng = np.random.default_rng(0)
    layers = []
    for K, channels in ((64, None), (96, [3, 50]), (32, [0, 31, 7]), (64, None)):
        linear = pack_linear(rng.standard_normal((32, K)).astype(np.float32), residual_bits=4)
        chosen = None if channels is None else torch.tensor(channels, dtype=torch.int32, device=device)
        layers.append(Shared(residual=residuals_to_device([linear.residual], (32, K), device), channels=chosen))
    stream = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]
    staging = Staging(layers, torch.device(device), stream)
    assert staging.nbytes == 2 * layers[0].residual.codes.nbytes
    for _ in range(2):
        staging.begin()
        for layer in layers:
            taken = staging.take().cpu()
            wanted = (
                layer.residual.codes if layer.channels is None else layer.residual.codes[layer.channels.cpu().long()]
            )
            assert bool((taken == wanted).all())
