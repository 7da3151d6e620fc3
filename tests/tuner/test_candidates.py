from __future__ import annotations

import pytest

from tuner.candidates import FetchPlan, chunks, fetch_plan, k_chunk_limit, n_tb_candidates, segments
from tuner.errors import ShapeError

SHARED = 48 << 10


def test_the_worked_example_of_block_counts() -> None:
    assert n_tb_candidates(6144, 4096) == (1, 2, 3, 4, 5, 6, 8, 12, 24)


def test_the_worked_example_of_shared_memory() -> None:
    assert k_chunk_limit(6144, 4096, 8, SHARED) == 367
    assert SHARED == 128 * 367 + 2 * 1024 + 128


def test_seven_blocks_do_no_more_than_six() -> None:
    assert -(-24 // 7) == -(-24 // 6) == 4
    assert 7 not in n_tb_candidates(6144, 4096)


def test_the_bound_of_figure_11_gives_its_counts_for_three_layers() -> None:
    below = {n: max(count for count in n_tb_candidates(n, 4096) if count <= 24) for n in (6144, 4096, 28672)}
    assert below == {6144: 24, 4096: 16, 28672: 23}


def test_many_chunks_give_counts_that_the_outputs_do_not() -> None:
    assert set(range(1, 15)) | {16} == set(n_tb_candidates(4096, 14336))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (255, 1023), (257, 1025), (2048, 5632)])
def test_ragged_layers_are_rounded_up(n: int, k: int) -> None:
    counts = n_tb_candidates(n, k)
    assert counts[0] == 1
    assert counts[-1] == max(segments(n), chunks(k))
    assert list(counts) == sorted(set(counts))


def test_a_fetch_that_fits() -> None:
    assert fetch_plan(6144, 4096, 8, 367, SHARED) == FetchPlan(fallback=False, passes=1)


def test_the_fallback_leaves_the_channels_in_global_memory() -> None:
    assert SHARED < 6 * 14 * 367 + 16384 + 512 * 16 + 128
    assert fetch_plan(4096, 14336, 1, 367, SHARED) == FetchPlan(fallback=True, passes=1)
    assert fetch_plan(4096, 14336, 1, 100, SHARED) == FetchPlan(fallback=False, passes=1)
    assert k_chunk_limit(4096, 14336, 1, SHARED) == 367


def test_too_many_outputs_for_one_block_take_passes() -> None:
    assert fetch_plan(28672, 4096, 1, 1, SHARED) == FetchPlan(fallback=True, passes=2)
    assert fetch_plan(28672, 4096, 2, 1, SHARED) == FetchPlan(fallback=False, passes=1)


@pytest.mark.parametrize("shared", [0, 16384, 16384 + 128 + 511])
def test_without_room_for_a_segment_nothing_is_compensated(shared: int) -> None:
    assert fetch_plan(6144, 4096, 8, 1, shared) is None
    assert k_chunk_limit(6144, 4096, 8, shared) == 0


def test_no_device_allows_more_than_a_chunk() -> None:
    assert k_chunk_limit(6144, 4096, 8, 1 << 20) == 1024


@pytest.mark.parametrize(("n", "k"), [(0, 4096), (4096, 0), (-1, 1)])
def test_a_layer_without_channels_is_refused(n: int, k: int) -> None:
    with pytest.raises(ShapeError, match="no channels"):
        n_tb_candidates(n, k)
    with pytest.raises(ShapeError, match="cannot fetch"):
        fetch_plan(n, k, 1, 1, SHARED)


def test_no_block_is_refused() -> None:
    with pytest.raises(ShapeError, match="0 thread blocks"):
        k_chunk_limit(6144, 4096, 0, SHARED)
