"""Division of instructions into parts, each of which is run once, by any thread."""

from __future__ import annotations

import itertools

import pytest

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import share_of, share_of_weights
from runtime.backends.cpu.link import parts_of
from tests.runtime.backends.cpu.machine import unplaced

NONE = op.Matrix(0, 0)
ROUNDED = op.Quantized(0, 0, 0)


@pytest.mark.parametrize("share", [share_of, share_of_weights])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 6, 12, 48])
@pytest.mark.parametrize("count", [1, 2, 36, 60, 704, 3072])
def test_the_parts_are_the_whole_once(share, parts, count):
    ends = [share(count, part, parts) for part in range(parts)]
    assert ends[0][0] == 0
    assert ends[-1][1] == count
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    assert all(first <= last for first, last in ends)


def test_large_weights_are_read_in_long_runs_and_end_together():
    sizes = [last - first for first, last in (share_of_weights(704, part, 6) for part in range(6))]
    assert sizes == [264, 264, 44, 44, 44, 44]


def test_what_is_little_is_done_by_one_thread():
    assert parts_of(unplaced(2, 4), 8) == (1, 8)
    assert parts_of(op.Norm(NONE, op.Input(576, False, NONE, ROUNDED, 2), 0, 1e-5), 8)[0] == 1
    assert parts_of(op.Norm(NONE, op.Input(8192, False, NONE, ROUNDED, 2), 0, 1e-5), 8)[0] == 8


def test_parts_grow_with_the_weights_and_are_tiles_at_least():
    assert parts_of(unplaced(36, 18), 2)[0] == 2
    assert parts_of(unplaced(704, 64), 2)[0] == 6
    assert parts_of(unplaced(704, 64), 1)[0] == 1
    assert parts_of(unplaced(5, 4096), 4) == (5, 5)


def test_attention_says_itself_how_it_is_cut():
    attend = op.Attend(NONE, 9, 3, 64, 0, 8, op.Stored(0, 0, 0, 0), 0, exact=0)
    assert parts_of(attend, 4) == (0, 0)
