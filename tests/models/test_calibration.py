"""Statistics of activations."""

from __future__ import annotations

import numpy as np
import pytest

from models import calibration
from models.calibration import InputStatistics
from models.errors import QuantizationError
from models.quantizers.gptq import DAMPING
from tests.close import assert_close


@pytest.mark.parametrize("alike", [0.0, 0.999])
def test_second_moments_of_bfloat16_products_can_be_factored(alike: float) -> None:
    """Of channels that are all alike, too, where rounding is largest beside the smallest eigenvalue.

    A product is rounded to 8 bits, so off by 1/512 at most; a sum of twelve by less. GPTQ damps by half the mean.
    """
    import torch

    random = np.random.default_rng(7)
    exactly, fast = (
        InputStatistics.empty(600, second_moments=True, expected_k_chunk=64, products=products)
        for products in (None, torch.bfloat16)
    )
    for _ in range(4):
        common, own = random.normal(size=(256, 1)), random.normal(size=(256, 600))
        x = (alike * common + (1 - alike) * own).astype(np.float32) * 30
        for statistics in (exactly, fast):
            statistics.add(x, "layers.0.down")
    assert exactly.hessian is not None
    assert fast.hessian is not None
    size = np.sqrt(np.outer(np.diag(exactly.hessian), np.diag(exactly.hessian)))
    assert np.abs((fast.hessian - exactly.hessian) / size).max() < 1 / 512
    np.testing.assert_array_equal(fast.hessian, fast.hessian.T)
    damped = fast.hessian / np.diag(fast.hessian).mean() + DAMPING * np.eye(600)
    assert np.linalg.eigvalsh(damped).min() > DAMPING / 2


def test_statistics_follow_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_CHUNK", 100)
    x = np.random.default_rng(0).standard_normal((3, 17, 24)).astype(np.float32)
    statistics = InputStatistics.empty(24, second_moments=True)
    for sequence in x:
        statistics.add(sequence[None], "layers.0.qkv")
    flat = x.reshape(-1, 24)
    expected = [max(sorted(np.abs(row), reverse=True)[rank] for row in flat) for rank in range(24)]
    np.testing.assert_array_equal(statistics.rank_maximum, expected)
    assert_close(statistics.mean_square(), (flat.astype(np.float64) ** 2).mean(0), "rounding")
    assert_close(statistics.hessian, flat.T @ flat, "model")
    assert InputStatistics.empty(24).hessian is None
    assert statistics.rank_maximum.dtype == statistics.mean_square().dtype == np.float32
    assert statistics.rank_maximum[0] == np.abs(x).max()
    assert (np.diff(statistics.rank_maximum) <= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activations_that_are_no_numbers_are_refused(bad: float) -> None:
    x = np.zeros((4, 8), np.float32)
    x[2, 3] = bad
    with pytest.raises(QuantizationError, match=r"before layers\.1\.o"):
        InputStatistics.empty(8).add(x, "layers.1.o")


def test_no_tokens_give_zeros() -> None:
    np.testing.assert_array_equal(InputStatistics.empty(5).mean_square(), 0)
