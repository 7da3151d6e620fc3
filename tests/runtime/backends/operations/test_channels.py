"""A chunk's share of channels, the buckets of Fig. 9, and the selections that do not read x."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.backends.operations import channels as budget
from tests.close import assert_close


@pytest.mark.parametrize(
    ("width", "k_chunk", "expected"),
    [
        (1024, 0, 0),
        (1024, 16, 16),
        (1024, 1024, 1024),
        (64, 16, 1),
        (64, 17, 2),
        (172, 16, 3),
        (1, 1, 1),
        (64, 1024, 64),
    ],
)
def test_a_narrow_chunk_takes_its_share_rounded_up(width: int, k_chunk: int, expected: int) -> None:
    assert budget.chunk_budget(width, k_chunk) == expected


def test_last_chunk_is_narrower() -> None:
    assert budget.chunk_budgets(2048 + 128, 8) == (8, 8, 1)
    assert budget.total_budget(2048 + 128, 8) == 17
    assert budget.chunk_budgets(1024, 8) == (8,)


@given(width=st.integers(1, 5000), k_chunk=st.integers(1, 1024))
def test_every_chunk_gets_something_and_never_more_than_it_has(width: int, k_chunk: int) -> None:
    shares = budget.chunk_budgets(width, k_chunk)
    assert len(shares) == -(-width // 1024)
    assert all(1 <= share <= 1024 for share in shares)
    assert sum(shares) <= width
    assert budget.total_budget(width, 1024) == width


def test_boundaries_are_those_of_fig_9() -> None:
    rank_maximum = np.array([30.0, 20, 16, 4, 1], np.float32)
    found = budget.buckets(rank_maximum, 3)
    assert (found.b0, found.b15) == (30.0, 16.0)
    assert found.boundaries.shape == (31,)
    assert found.boundaries[0] == 30.0
    assert found.boundaries[15] == 16.0
    assert_close(found.boundaries[15:], np.arange(16, 0, -1), "rounding")
    assert_close(np.diff(found.boundaries[:16]), -14 / 15)


@pytest.mark.parametrize("values", [[0.0, 0.0], [2.0, 2.0], [1.0, 0.0]])
def test_degenerate_calibration_gives_finite_scales(values: list[float]) -> None:
    found = budget.buckets(np.array(values, np.float32), 2)
    assert np.isfinite([found.upper_scale, found.lower_scale]).all()


def test_static_takes_the_largest_mean_square_of_every_chunk() -> None:
    metric = np.zeros(1024 + 512, np.float32)
    metric[[3, 900, 901, 1024, 1500]] = [1, 5, 4, 2, 3]
    assert budget.static_channels(metric, 2).tolist() == [900, 901, 1500]


@pytest.mark.parametrize("width", [1, 64, 1024, 2100])
def test_random_is_repeatable_distinct_and_depends_on_all_three(width: int) -> None:
    def channels(seed: int, layer: int, position: int) -> list[int]:
        return budget.random_channels(width, 32, seed=seed, layer=layer, position=position).tolist()

    first = channels(1, 2, 3)
    assert first == channels(1, 2, 3)
    assert len(set(first)) == len(first) == budget.total_budget(width, 32)
    assert first == sorted(first)
    if width >= 1024:
        assert first not in (channels(0, 2, 3), channels(1, 3, 2), channels(1, 2, 4))


def test_random_covers_all_channels_alike() -> None:
    counts = np.zeros(64)
    for position in range(2000):
        counts[budget.random_channels(64, 256, seed=0, layer=1, position=position)] += 1
    assert counts.sum() == 2000 * 16
    assert 400 < counts.min() <= counts.max() < 600


def test_recall_counts_channels_of_the_true_top() -> None:
    x = np.array([5, -4, 3, 3, 0], np.float32)
    assert budget.recall(x, np.array([0, 1])) == 1.0
    assert budget.recall(x, np.array([0, 4])) == 0.5
    assert budget.recall(x, np.array([0, 1, 3])) == budget.recall(x, np.array([0, 1, 2])) == 1.0
