"""Memory of a loaded model: arrays side by side in large regions."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.backends.cpu.data.records import LINE
from runtime.backends.cpu.tiles import Arena, aligned_zeros

SHAPES = [(3, 5), (64,), (0, 7), (1000,), (2, 2, 33)]


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int64])
def test_arrays_are_zero_contiguous_and_begin_at_a_cache_line(dtype: type) -> None:
    arena = Arena(2048)
    for shape in SHAPES:
        array = arena.zeros(shape, dtype)
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert not array.any()
        assert array.ctypes.data % LINE == 0


def test_no_two_arrays_share_memory() -> None:
    arena = Arena(4096)
    arrays = [arena.zeros((100 + i,), np.float32) for i in range(40)]  # several regions
    for i, array in enumerate(arrays):
        array[:] = i
    assert all((array == i).all() for i, array in enumerate(arrays))


def test_small_arrays_lie_side_by_side_and_a_large_one_does_not_end_their_region() -> None:
    arena = Arena(4096)
    first = arena.zeros((16,), np.float32)
    large = arena.zeros((5000,), np.uint8)
    second = arena.zeros((16,), np.float32)
    assert second.ctypes.data - first.ctypes.data == LINE
    assert large.nbytes == 5000


def test_an_array_of_its_own_is_aligned() -> None:
    assert aligned_zeros((3, 3), np.int32).ctypes.data % LINE == 0
