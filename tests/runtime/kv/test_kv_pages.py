"""The page table: counts, sharing, reuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import OutOfMemoryError
from runtime.kv.pages import PageTable

ACTIONS = st.lists(st.tuples(st.sampled_from("atso"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 4)))


def test_a_freed_page_is_taken_again() -> None:
    table = PageTable(2, 2)
    pages = [table.append(0), table.append(0), table.append(1)]
    assert len(set(pages)) == 3
    table.truncate(0, 1)
    assert table.append(1) == pages[1]
    np.testing.assert_array_equal(table.tables, [[pages[0], -1], [pages[2], pages[1]]])


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    table = PageTable(2, 2)
    first, second = table.append(0), table.append(0)
    table.share(0, 1, 2)
    assert (table.used, table.references(first)) == (2, 2)
    copied = table.own(1, 1)
    assert copied is not None
    assert copied[0] == second
    assert table.held(0) == [first, second]
    assert table.held(1) == [first, copied[1]]
    assert table.own(0, 1) is None
    table.truncate(0, 0)
    assert (table.used, table.references(first)) == (2, 1)


def test_running_out_is_said() -> None:
    table = PageTable(2, 2, pages=1)
    table.append(0)
    with pytest.raises(OutOfMemoryError, match="all 1 pages"):
        table.append(1)


@settings(max_examples=200)
@given(ACTIONS)
def test_counts_are_those_of_the_tables(actions: list[tuple[str, int, int, int]]) -> None:
    table = PageTable(3, 4)
    for action, slot, other, count in actions:
        if action == "a" and table.count(slot) < 4:
            table.append(slot)
        elif action == "t":
            table.truncate(slot, count)
        elif action == "s" and slot != other:
            table.truncate(other, 0)
            table.share(slot, other, count)
        elif action == "o" and count < table.count(slot):
            table.own(slot, count)
        held = [page for one in range(3) for page in table.held(one)]
        assert table.used == len(set(held))
        assert all(table.references(page) == held.count(page) for page in set(held))
        assert (table.tables >= 0).sum() == len(held)
