"""Leaving out what compensation restores."""

from __future__ import annotations

import numpy as np
import pytest

from models.calibration import InputStatistics
from models.quantizers import gptq, quantizer
from models.salience import CHUNK, without_salient
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


def test_error_feedback_serves_compensated_inference() -> None:
    """Minimizing over what is left of the inputs gives less error once the salient channels are restored."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((4096, 12)) @ rng.standard_normal((12, 128))).astype(np.float32)
    x += 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    x *= np.exp(rng.standard_normal(128)).astype(np.float32)
    weight = rng.standard_normal((64, 128)).astype(np.float32)
    train, held_out, k_chunk = x[:3072], x[3072:], 128
    errors = {}
    for expected in (0, k_chunk):
        statistics = InputStatistics.empty(128, second_moments=True, expected_k_chunk=expected)
        statistics.add(train, "layers.0.o")
        assert statistics.hessian is not None
        found = gptq.quantize(weight, 3, 128, gptq.feedback(statistics.hessian)).dequantize()
        for measured in (0, k_chunk):
            outputs = without_salient(held_out, measured) @ (weight - found).T
            errors[expected, measured] = float(np.square(outputs).sum())
    assert errors[k_chunk, k_chunk] < 0.9 * errors[0, k_chunk]
    assert errors[0, 0] < errors[k_chunk, 0]


def test_other_statistics_see_every_channel() -> None:
    x = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float32)
    plain, expecting = (InputStatistics.empty(32, second_moments=True, expected_k_chunk=k) for k in (0, 64))
    for statistics in (plain, expecting):
        statistics.add(x, "layers.0.o")
    np.testing.assert_array_equal(plain.mean_square(), expecting.mean_square())
    np.testing.assert_array_equal(plain.rank_maximum, expecting.rank_maximum)
    assert expecting.hessian is not None
    left = without_salient(x, 64)
    assert_close(expecting.hessian, left.T @ left, "sums")
    assert callable(quantizer("gptq", hessian=expecting.hessian))
