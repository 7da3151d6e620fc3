"""Leaving out what compensation restores."""

from __future__ import annotations

import numpy as np
import pytest

from models.calibration import InputStatistics
from models.quantizers import gptq, quantizer, rtn
from models.quantizers.residual import quantize_residual
from models.salience import CHUNK, levels, without_salient
from tests.close import assert_close


def test_the_largest_of_every_chunk_are_left_out() -> None:
    x = np.random.default_rng(0).standard_normal((5, 1500)).astype(np.float32)
    left = without_salient(x, 20)
    for row, kept in zip(x, left, strict=True):
        for start, stop in ((0, CHUNK), (CHUNK, 1500)):
            count = -(-(stop - start) * 20 // CHUNK)
            order = np.argsort(-np.abs(row[start:stop]), kind="stable")
            assert not kept[start:stop][order[:count]].any()
            np.testing.assert_array_equal(kept[start:stop][order[count:]], row[start:stop][order[count:]])


def test_nothing_is_left_out_for_no_compensation() -> None:
    x = np.ones((2, 40), np.float32)
    assert without_salient(x, 0) is x


@pytest.mark.parametrize("width", [1, 8, 31])
def test_narrow_matrices_give_at_least_one(width: int) -> None:
    x = np.arange(1, width + 1, dtype=np.float32)[None]
    left = without_salient(x, 1)
    assert left[0, -1] == 0
    np.testing.assert_array_equal(left[0, :-1], x[0, :-1])


def planted(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Correlated inputs [4096, 128] of which some channels are always salient, and weights [64, 128]."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((4096, 12)) @ rng.standard_normal((12, 128))).astype(np.float32)
    x += 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    x *= np.exp(rng.standard_normal(128)).astype(np.float32)
    x[:, 7] += 60 * np.abs(x[:, 7]).mean()
    return x, rng.standard_normal((64, 128)).astype(np.float32)


def test_no_level_of_compensation_is_worse_than_plain_rounding() -> None:
    """Where a base that looks at all inputs alone, or at what is left of them alone, is far worse at the other."""
    x, weight = planted()
    train, held_out = x[:3072], x[3072:]

    def errors(base: np.ndarray) -> np.ndarray:
        outputs = [without_salient(held_out, k_chunk) @ (weight - base).T for k_chunk in levels(128)]
        return np.array([float(np.square(y).sum()) for y in outputs])

    def fed_back(hessian: np.ndarray | None) -> np.ndarray:
        assert hessian is not None
        return errors(gptq.quantize(weight, 3, 128, gptq.feedback(hessian)).dequantize())

    plain = errors(rtn.quantize(weight, 3, 128).dequantize())
    everything, alone = fed_back(train.T @ train), without_salient(train, 128)
    statistics = InputStatistics.empty(128, second_moments=True, expected_k_chunk=128)
    statistics.add(train, "layers.0.o")
    ours = fed_back(statistics.hessian)
    assert (ours < plain).all()
    assert (np.diff(ours) < 0).all()
    assert ours[-1] < everything[-1]
    assert ours[0] < fed_back(alone.T @ alone)[0]


def test_second_moments_are_those_of_every_level() -> None:
    x = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float32)
    counts = np.random.default_rng(3).random(64).astype(np.float32)
    plain, expecting = (InputStatistics.empty(32, second_moments=True, expected_k_chunk=k) for k in (0, 64))
    for statistics in (plain, expecting):
        statistics.add(x, "layers.0.o", counts)
    np.testing.assert_array_equal(plain.mean_square(), expecting.mean_square())
    np.testing.assert_array_equal(plain.rank_maximum, expecting.rank_maximum)
    assert levels(64) == (0, 16, 64)
    left = [np.sqrt(counts)[:, None] * without_salient(x, k_chunk).astype(np.float64) for k_chunk in (0, 16, 64)]
    total = float(np.square(left[0]).sum())
    assert_close(expecting.hessian, sum(each.T @ each * total / np.square(each).sum() for each in left), "sums")
    assert_close(plain.hessian, left[0].T @ left[0], "sums")
    restored = np.square(left[0]).sum(0) - np.square(left[-1]).sum(0)
    found = expecting.restored()
    assert found is not None
    assert_close(found, restored / restored.mean() + 0.1, "rounding")
    assert plain.restored() is None
    assert callable(quantizer("gptq", hessian=expecting.hessian))


def test_residual_scales_are_those_of_what_is_restored() -> None:
    """A large residual in a column that is never chosen does not widen the scale of those that are."""
    _, weight = planted()
    residual = weight * 0.01
    residual[:, 3] *= 30
    importance = np.where(np.arange(128) == 3, 0.1, 1.1).astype(np.float32)
    alike, weighed = (quantize_residual(residual, 4, each).dequantize() for each in (None, importance))
    others = np.arange(128) != 3
    assert np.square(weighed - residual)[:, others].sum() < 0.5 * np.square(alike - residual)[:, others].sum()
