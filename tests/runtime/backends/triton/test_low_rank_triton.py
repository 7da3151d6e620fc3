"""GEAR's factors on the GPU against torch's QR.

Tolerance: both iterate in float32 and round factors to half precision, 2^-11 of each number, so their products differ
by some 2^-11 of the residual's size; twelve rounds on a flat spectrum may stop at slightly different subspaces, which
costs nothing in error: that is compared as well.
"""

from __future__ import annotations

import pytest
import torch

from runtime.backends.triton.kernels.low_rank import low_rank
from runtime.kv.kinds import KINDS
from runtime.kv.oracle import correction
from runtime.kv.oracle.page import dequantize, quantize


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("alike", [0, 63])
@pytest.mark.parametrize(("T", "D", "rank"), [(16, 8, 4), (48, 20, 3), (128, 32, 4), (128, 500, 4)])
def test_the_product_is_that_of_householder_s_factors(device: str, T: int, D: int, rank: int, alike: int) -> None:
    """Over a residual with that many large directions and noise beside them."""
    residual = _random(3, T, rank) @ _random(3, rank, D) + 0.1 * _random(3, T, D)
    a, b = low_rank(residual.to(device), rank, alike=alike)
    wanted = correction.product(*correction.low_rank(residual, rank, alike=alike))
    found = correction.product(a.cpu(), b.cpu())
    assert (found - wanted).abs().max() <= 2e-3 * residual.abs().max()
    gram = a.float().mT @ a.float()
    assert (gram.cpu() - torch.eye(rank)).abs().max() < 2e-3


def test_noise_is_corrected_as_well_as_by_householder_s(device: str) -> None:
    residual = _random(4, 128, 32)
    errors = [
        (residual - correction.product(a.cpu(), b.cpu())).square().sum().sqrt()
        for a, b in (low_rank(residual.to(device), 4), correction.low_rank(residual, 4))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_residual_of_lower_rank_is_met_exactly(device: str, rank: int) -> None:
    residual = _random(2, 32, max(rank, 1)) @ _random(2, max(rank, 1), 16) * (rank > 0)
    a, b = low_rank(residual.to(device), 4)
    assert (correction.product(a.cpu(), b.cpu()) - residual).abs().max() <= 2e-3 * max(1.0, float(residual.abs().max()))
    assert bool(torch.isfinite(a).all())


def test_a_broken_number_stays_visible_in_its_page_alone(device: str) -> None:
    residual = _random(2, 32, 16)
    residual[0, 3, 5] = torch.nan
    a, b = low_rank(residual.to(device), 4)
    assert not torch.isfinite(correction.product(a.cpu(), b.cpu())[0]).all()
    assert bool(torch.isfinite(a[1]).all() and torch.isfinite(b[1]).all())


@pytest.mark.parametrize("name", ["gear4", "gear2", "gear-l4", "gear-l2"])
def test_pages_read_back_as_the_oracle_s(device: str, name: str) -> None:
    """To 1 % of a page's spread; a number between two codes may fall to either."""
    kind = KINDS[name]
    tokens = _random(2, kind.page, 32)
    for part in ("keys", "values"):
        ours = quantize(kind, part, tokens.to(device), low_rank=low_rank)
        back = [
            dequantize(kind, part, {field: array.cpu() for field, array in stored.items()}, 32)
            for stored in (ours, quantize(kind, part, tokens))
        ]
        assert (back[0] - back[1]).square().mean().sqrt() < 1e-2 * tokens.std()
