"""The GPU's selection against the plain references: the same channels, always."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.operations import channels as budget
from runtime.backends.operations import select as plain
from runtime.backends.triton.kernels.select import Selection, make_selection, recall, select
from tests.close import assert_close

WIDTHS = [1, 31, 96, 1024, 1100, 2500]
BUDGETS = [1, 16, 100, 1024]


def activations(rows: int, K: int, seed: int = 0) -> torch.Tensor:
    """Normal activations with a few large ones among them, half precision [rows, K]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=generator)
    x[:, torch.randperm(K, generator=generator)[: max(1, K // 50)]] *= 20
    return x.half()


def calibrated(x: torch.Tensor, k_chunk: int, mode: Any = "approx", **more: Any) -> Selection:
    """A selection whose buckets come from other activations of the same kind."""
    K = x.shape[1]
    k = budget.total_budget(K, k_chunk)
    ranks = activations(8, K, seed=99).float().abs().sort(dim=1, descending=True).values.max(0).values.numpy()
    edges = budget.buckets(ranks, k)
    scales = {"b15": edges.b15, "upper_scale": edges.upper_scale, "lower_scale": edges.lower_scale}
    return Selection(width=K, k_chunk=k_chunk, k=k, mode=mode, **(scales | more))


def buckets_of(selection: Selection) -> budget.Buckets:
    return budget.Buckets(
        b0=0.0, b15=selection.b15, upper_scale=selection.upper_scale, lower_scale=selection.lower_scale
    )


def run(x: torch.Tensor, selection: Selection, device: str, **more: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Indices, values and flag, from poisoned buffers."""
    shape = (x.shape[0], selection.k)
    indices = torch.full(shape, -(2**31), dtype=torch.int32, device=device)
    values = torch.full(shape, torch.nan, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    select(x.to(device), selection, indices, values, flag, **more)
    return indices.cpu().long(), values.cpu(), int(flag)


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("k_chunk", BUDGETS)
def test_approximate_is_the_reference(device: str, K: int, k_chunk: int) -> None:
    x = activations(2, K)
    selection = calibrated(x, k_chunk)
    indices, values, flag = run(x, selection, device)
    assert torch.equal(indices, plain.approximate(x.float(), k_chunk, buckets_of(selection)))
    assert torch.equal(values, x.float().gather(1, indices))
    assert flag == 0


@pytest.mark.parametrize("K", WIDTHS)
@pytest.mark.parametrize("k_chunk", [1, 16, 1024])
def test_exact_is_the_reference(device: str, K: int, k_chunk: int) -> None:
    x = activations(2, K)
    x[1] = (x[1] * 2).round() / 2  # many equal magnitudes
    indices, values, flag = run(x, calibrated(x, k_chunk, "exact"), device)
    assert torch.equal(indices, plain.exact(x.float(), k_chunk))
    assert torch.equal(values, x.float().gather(1, indices))
    assert flag == 0


@pytest.mark.parametrize("mode", ["approx", "exact"])
@pytest.mark.parametrize("value", [0.0, 6e-8, 1.5, 65504.0])
def test_of_equal_magnitudes_the_lowest_channels_are_taken(device: str, mode: str, value: float) -> None:
    x = torch.full((1, 1100), value, dtype=torch.half)
    x[:, ::3] *= -1
    indices, values, _ = run(x, calibrated(x, 20, mode), device)
    assert indices[0].tolist() == [*range(20), 1024, 1025]
    assert torch.equal(values, x.float().gather(1, indices))


def test_the_bucket_that_overflows_gives_its_lowest_channels(device: str) -> None:
    x = torch.full((1, 1024), 0.1, dtype=torch.half)
    x[0, 1000] = 9.0  # above b0
    x[0, 500:600] = torch.linspace(4.1, 4.4, 100).half()  # one bucket, the larger the later
    selection = Selection(width=1024, k_chunk=8, k=8, b15=4.0, upper_scale=15 / 4.0, lower_scale=4.0)
    assert plain.bucket_of(x[:, 500:600].float(), buckets_of(selection)).unique().numel() == 2
    indices, _, _ = run(x, selection, device)
    assert torch.equal(indices, plain.approximate(x.float(), 8, buckets_of(selection)))
    assert indices[0, -1] == 1000


def test_magnitudes_on_the_boundaries_fall_into_the_same_buckets(device: str) -> None:
    edges = budget.buckets(np.array([30.0, 20, 16, 4], np.float32), 3)
    x = torch.from_numpy(np.concatenate([edges.boundaries, -edges.boundaries, [0, 65504, 6e-8]])).half()[None]
    for k_chunk in (200, 400, 700):
        k = budget.total_budget(x.shape[1], k_chunk)
        selection = Selection(
            width=x.shape[1],
            k_chunk=k_chunk,
            k=k,
            b15=edges.b15,
            upper_scale=edges.upper_scale,
            lower_scale=edges.lower_scale,
        )
        assert torch.equal(run(x, selection, device)[0], plain.approximate(x.float(), k_chunk, edges))


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_buckets_of_a_calibration_without_width(device: str, spread: float) -> None:
    """b0 = b15, and b15 = 0: a scale is zero, and nothing is divided by it."""
    x = activations(1, 100)
    edges = budget.buckets(np.full(100, spread, np.float32), 10)
    selection = Selection(
        width=100,
        k_chunk=100,
        k=10,
        b15=edges.b15,
        upper_scale=edges.upper_scale,
        lower_scale=edges.lower_scale,
    )
    assert torch.equal(run(x, selection, device)[0], plain.approximate(x.float(), 100, edges))


@pytest.mark.parametrize("K", [96, 1100])
def test_static_takes_its_table(device: str, packed_linear: Any, K: int) -> None:
    packed = packed_linear(np.random.default_rng(0).standard_normal((4, K)).astype(np.float32))
    x = activations(2, K)
    indices, values, _ = run(x, make_selection(packed, k_chunk=16, mode="static", device=device), device)
    assert torch.equal(indices, torch.from_numpy(budget.static_channels(packed.mean_square, 16)).long().expand(2, -1))
    assert torch.equal(values, x.float().gather(1, indices))


@pytest.mark.parametrize("seed", [0, 1, -7, 2**63, 2**64 - 1])
def test_random_is_the_shared_generator(device: str, packed_linear: Any, seed: int) -> None:
    packed = packed_linear(np.random.default_rng(0).standard_normal((4, 1100)).astype(np.float32))
    positions = torch.tensor([0, 4095], dtype=torch.int32, device=device)
    selection = make_selection(packed, k_chunk=9, mode="random", seed=seed, layer=11, device=device)
    indices, _, _ = run(activations(2, 1100), selection, device, positions=positions)
    for row, position in enumerate((0, 4095)):
        expected = budget.random_channels(1100, 9, seed=seed, layer=11, position=position)
        assert indices[row].tolist() == expected.tolist()


def test_a_selection_is_made_of_the_calibration(packed_linear: Any) -> None:
    packed = packed_linear(np.random.default_rng(0).standard_normal((4, 1100)).astype(np.float32))
    selection = make_selection(packed, k_chunk=16, device="cpu")
    edges = budget.buckets(packed.rank_maximum, 18)
    assert (selection.k, selection.chunks) == (18, 2)
    assert (selection.b15, selection.upper_scale, selection.lower_scale) == (
        edges.b15,
        edges.upper_scale,
        edges.lower_scale,
    )


@pytest.mark.parametrize("mode", ["approx", "exact", "static", "random"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_activations_set_the_flag_and_nothing_else_breaks(
    device: str, packed_linear: Any, mode: Any, bad: float
) -> None:
    packed = packed_linear(np.random.default_rng(0).standard_normal((4, 1100)).astype(np.float32))
    x = activations(2, 1100)
    x[1, 1050:] = bad
    positions = torch.zeros(2, dtype=torch.int32, device=device)
    selection = make_selection(packed, k_chunk=16, mode=mode, device=device)
    indices, _, flag = run(x, selection, device, positions=positions)
    assert flag == 1
    assert bool(((indices >= 0) & (indices < 1100)).all())
    assert bool((indices.diff(dim=1) > 0).all())


def test_a_flag_that_is_set_stays_set(device: str) -> None:
    x = activations(1, 96)
    selection = calibrated(x, 64)
    buffers = torch.zeros(1, selection.k, dtype=torch.int32, device=device), torch.zeros(1, selection.k, device=device)
    flag = torch.ones(1, dtype=torch.int32, device=device)
    select(x.to(device), selection, *buffers, flag)
    assert int(flag) == 1


def test_nothing_is_written_beyond_the_chosen(device: str) -> None:
    x = activations(1, 1100)
    selection = calibrated(x, 7)
    indices = torch.full((64,), -5, dtype=torch.int32, device=device)
    values = torch.full((64,), -5.0, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    shape = (1, selection.k)
    select(x.to(device), selection, indices[: selection.k].view(shape), values[: selection.k].view(shape), flag)
    assert bool((indices[selection.k :] == -5).all())
    assert bool((values[selection.k :] == -5).all())


def test_recall_is_that_of_the_budget(device: str) -> None:
    x = activations(3, 2500)
    selection = calibrated(x, 16)
    indices, _, _ = run(x, selection, device)
    expected = [budget.recall(x[row].float().numpy(), indices[row].numpy()) for row in range(3)]
    found = recall(x.to(device), indices.int().to(device))
    assert_close(found.cpu().numpy(), expected, "rounding")
    assert 0.2 < min(expected) <= max(expected) < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "best"}, "no selector 'best'"),
        ({"k_chunk": 0}, "k_chunk is 0"),
        ({"k_chunk": 1025}, "k_chunk is 1025"),
        ({"k": 5}, "k is 5"),
        ({"mode": "static"}, "table of channels"),
        ({"channels": torch.zeros(2, dtype=torch.int32)}, "table of channels"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Selection(**({"width": 96, "k_chunk": 16, "k": 2} | change))


def test_operands_that_do_not_fit_are_refused(device: str, packed_linear: Any) -> None:
    x = activations(1, 96)
    selection = calibrated(x, 32)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    indices, values = torch.zeros(1, 3, dtype=torch.int32, device=device), torch.zeros(1, 3, device=device)
    for wrong in (x.float(), x[:, :95], activations(96, 2).T):
        with pytest.raises(ValueError, match="x must be contiguous float16"):
            select(wrong.to(device), selection, indices, values, flag)
    with pytest.raises(ValueError, match="indices must be"):
        select(x.to(device), selection, indices[:, :2], values, flag)
    with pytest.raises(ValueError, match="values must be"):
        select(x.to(device), selection, indices, values.half(), flag)
    with pytest.raises(ValueError, match="positions of all 1 rows"):
        select(x.to(device), calibrated(x, 32, "random"), indices, values, flag)
    bare = packed_linear(np.zeros((4, 96), np.float32), residual_bits=0)
    with pytest.raises(ValueError, match="stored without residuals"):
        make_selection(bare, k_chunk=16, device="cpu")
