"""Which experts exchange their places."""

from __future__ import annotations

import numpy as np

from runtime.backends.triton.placement import exchanges


def test_experts_that_are_chosen_clearly_more_come_for_those_that_are_chosen_least() -> None:
    counts = np.array([[50, 2, 10, 0], [5, 5, 5, 5], [0, 7, 90, 8]])
    resident = np.array([[False, True, False, True], [True, True, False, False], [True, True, False, False]])
    assert exchanges(counts, resident, margin=8, most=9) == [(2, 0, 2), (0, 3, 0), (0, 1, 2)]
    assert exchanges(counts, resident, margin=9, most=9) == [(2, 0, 2), (0, 3, 0)]
    assert exchanges(counts, resident, margin=1, most=2) == [(2, 0, 2), (0, 3, 0)]


def test_nothing_is_exchanged_where_nothing_or_everything_is_on_the_device() -> None:
    counts = np.array([[9, 0, 40]])
    for here in (True, False):
        assert exchanges(counts, np.full((1, 3), here), margin=1, most=9) == []


def test_an_exchange_is_not_taken_back() -> None:
    """Counts that differ by less than the margin leave experts where they are."""
    counts, resident = np.array([[40, 30]]), np.array([[False, True]])
    assert exchanges(counts, resident, margin=8, most=9) == [(0, 1, 0)]
    assert exchanges(counts, ~resident, margin=8, most=9) == []
