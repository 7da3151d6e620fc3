"""What is special to the GPU's selection: how it is made, its flag, recall, and operands that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.operations import channels as budget
from runtime.backends.triton.kernels.select import Selection, make_selection, recall, select
from tests.close import assert_close
from tests.runtime.backends.contract.operands import activations
from tests.runtime.conftest import pack_linear


def halves(rows: int, K: int) -> torch.Tensor:
    """Activations [rows, K] as kernels take them."""
    return activations(rows, K).half()


def calibrated(x: torch.Tensor, k_chunk: int, mode: Any = "approx", **more: Any) -> Selection:
    """A selection whose buckets come from other activations of the same kind."""
    K = x.shape[1]
    k = budget.total_budget(K, k_chunk)
    ranks = activations(8, K, seed=99).abs().sort(dim=1, descending=True).values.max(0).values.numpy()
    edges = budget.buckets(ranks, k)
    scales = {"b15": edges.b15, "upper_scale": edges.upper_scale, "lower_scale": edges.lower_scale}
    return Selection(width=K, k_chunk=k_chunk, k=k, mode=mode, **(scales | more))


def run(x: torch.Tensor, selection: Selection, device: str, **more: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Indices, values and flag, from poisoned buffers."""
    shape = (x.shape[0], selection.k)
    indices = torch.full(shape, -(2**31), dtype=torch.int32, device=device)
    values = torch.full(shape, torch.nan, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    select(x.to(device), selection, indices, values, flag, **more)
    return indices.cpu().long(), values.cpu(), int(flag)


def test_a_selection_is_made_of_the_calibration() -> None:
    packed = pack_linear(np.random.default_rng(0).standard_normal((4, 1100)).astype(np.float32))
    selection = make_selection(packed, k_chunk=16, device="cpu")
    edges = budget.buckets(packed.rank_maximum, 18)
    assert (selection.k, selection.chunks) == (18, 2)
    assert (selection.b15, selection.upper_scale, selection.lower_scale) == (
        edges.b15,
        edges.upper_scale,
        edges.lower_scale,
    )


@pytest.mark.parametrize(
    ("mode", "bad"),
    [("approx", torch.nan), ("approx", -torch.inf), ("exact", torch.nan), ("static", torch.inf), ("random", torch.inf)],
)
def test_bad_activations_set_the_flag_and_nothing_else_breaks(device: str, mode: Any, bad: float) -> None:
    packed = pack_linear(np.random.default_rng(0).standard_normal((4, 1100)).astype(np.float32))
    x = halves(2, 1100)
    x[1, 1050:] = bad
    positions = torch.zeros(2, dtype=torch.int32, device=device)
    selection = make_selection(packed, k_chunk=16, mode=mode, device=device)
    indices, _, flag = run(x, selection, device, positions=positions)
    assert flag == 1
    assert bool(((indices >= 0) & (indices < 1100)).all())
    assert bool((indices.diff(dim=1) > 0).all())


def test_a_flag_that_is_set_stays_set_and_nothing_is_written_beyond_the_chosen(device: str) -> None:
    x = halves(1, 1100)
    selection = calibrated(x, 7)
    indices = torch.full((64,), -5, dtype=torch.int32, device=device)
    values, flag = torch.full((64,), -5.0, device=device), torch.ones(1, dtype=torch.int32, device=device)
    own = (each[: selection.k].view(1, selection.k) for each in (indices, values))
    select(x.to(device), selection, *own, flag)
    assert bool((indices[selection.k :] == -5).all())
    assert bool((values[selection.k :] == -5).all())
    assert int(flag) == 1


def test_recall_is_that_of_the_budget(device: str) -> None:
    x = halves(3, 2500)
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


def test_operands_that_do_not_fit_are_refused(device: str) -> None:
    x = halves(1, 96)
    selection = calibrated(x, 32)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    indices, values = torch.zeros(1, 3, dtype=torch.int32, device=device), torch.zeros(1, 3, device=device)
    for wrong in (x.float(), x[:, :95], halves(96, 2).T):
        with pytest.raises(ValueError, match="x must be contiguous float16"):
            select(wrong.to(device), selection, indices, values, flag)
    with pytest.raises(ValueError, match="indices must be"):
        select(x.to(device), selection, indices[:, :2], values, flag)
    with pytest.raises(ValueError, match="values must be"):
        select(x.to(device), selection, indices, values.half(), flag)
    with pytest.raises(ValueError, match="positions of all 1 rows"):
        select(x.to(device), calibrated(x, 32, "random"), indices, values, flag)
    bare = pack_linear(np.zeros((4, 96), np.float32), residual_bits=0)
    with pytest.raises(ValueError, match="stored without residuals"):
        make_selection(bare, k_chunk=16, device="cpu")
