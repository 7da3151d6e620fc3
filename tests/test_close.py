"""The comparison of numbers: fails where it should, and names the place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.close import TOLERANCES, Tolerance, assert_close

LOOSE = Tolerance(atol=0.1, why="an example")


def test_what_is_near_passes() -> None:
    assert_close(torch.ones(3, 2), np.ones((3, 2)))
    assert_close(np.array([1.05, 0.95]), 1.0, LOOSE)
    assert_close(np.float32(2.0), 2.0, "exact")
    assert_close(np.empty((0, 3)), np.empty((0, 3)))
    assert_close([np.nan, np.inf], [np.nan, np.inf])


def test_the_worst_place_is_named() -> None:
    actual = np.zeros((4, 5))
    actual[1, 2], actual[3, 4] = 0.2, 0.5
    with pytest.raises(AssertionError, match=r"0\.5.* instead of .*0\.0.* at \(3, 4\): off by 0\.5, .*2 of 20"):
        assert_close(actual, np.zeros((4, 5)), LOOSE)


def test_a_bound_that_is_reached_everywhere_is_no_rounding() -> None:
    with pytest.raises(AssertionError, match=r"the mean error is 0\.90"):
        assert_close(np.full(100, 0.09), np.zeros(100), LOOSE)
    assert_close(np.full(3, 0.09), np.zeros(3), LOOSE)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (np.zeros(3), np.zeros(4)),
        (np.zeros((2, 3)), np.zeros(3)),
        ([np.nan], [0.0]),
        ([np.inf], [0.0]),
        ([0.0], [np.nan]),
        ([np.inf], [-np.inf]),
    ],
    ids=str,
)
def test_other_shapes_and_what_is_not_finite(actual: object, expected: object) -> None:
    with pytest.raises(AssertionError):
        assert_close(actual, expected, Tolerance(atol=1e9, why="whatever"))


def test_a_span_is_that_of_the_largest() -> None:
    assert_close([1000.0, 0.005], [1000.0, 0.0], "sums")
    with pytest.raises(AssertionError, match="at"):
        assert_close([1000.0, 0.05], [1000.0, 0.0], "sums")


def test_every_tolerance_says_why() -> None:
    assert all(tolerance.why for tolerance in TOLERANCES.values())
