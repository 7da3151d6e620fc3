"""Canonical packing: exact round trips, and every value in the place the format names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.packing import PACKED_BITS, pack, packed_width, unpack


@settings(deadline=None, max_examples=200)
@given(
    bits=st.sampled_from(PACKED_BITS),
    rows=st.integers(0, 3),
    length=st.integers(0, 200) | st.sampled_from([31, 32, 33, 64, 1024]),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_is_exact(bits: int, rows: int, length: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, length), dtype=np.uint8)
    words = pack(codes, bits)
    assert words.dtype == np.int32
    assert words.shape == (rows, packed_width(length, bits)) == (rows, -(-length // 32) * bits)
    np.testing.assert_array_equal(unpack(words, bits, length), codes)


def place_of(bits: int, i: int) -> list[tuple[int, int, int]]:
    """Where the format puts value i: (word, bit, bits of the value there starting at this one)."""
    if bits == 3:
        return [(i // 16, 2 * (i % 16), 0), (i // 16, 2 * (i % 16) + 1, 1), (2, i, 2)]
    if bits == 5:
        return [(i // 8, 4 * (i % 8) + b, b) for b in range(4)] + [(4, i, 4)]
    if bits == 6:
        low, high = (
            [(i // 8, 4 * (i % 8) + b, b) for b in range(4)],
            [(4 + i // 16, 2 * (i % 16) + b, 4 + b) for b in range(2)],
        )
        return low + high
    per_word = 32 // bits
    return [(i // per_word, bits * (i % per_word) + b, b) for b in range(bits)]


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_every_bit_lies_where_the_format_says(bits: int) -> None:
    for i in range(64):
        for word, bit, value_bit in place_of(bits, i % 32):
            codes = np.zeros((1, 64), dtype=np.uint8)
            codes[0, i] = 1 << value_bit
            words = pack(codes, bits).astype(np.int64)[0] & 0xFFFFFFFF
            expected = np.zeros(2 * bits, dtype=np.int64)
            expected[i // 32 * bits + word] = 1 << bit
            np.testing.assert_array_equal(words, expected, err_msg=f"value {i}, bit {value_bit}")


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_tail_is_filled_with_zeros(bits: int) -> None:
    full = np.full((2, 5), (1 << bits) - 1, dtype=np.uint8)
    padded = np.zeros((2, 32), dtype=np.uint8)
    padded[:, :5] = full
    np.testing.assert_array_equal(pack(full, bits), pack(padded, bits))


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("length", [40, 64])
def test_strided_and_read_only_inputs(bits: int, length: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (length, 66), dtype=np.uint8)
    words = pack(codes.T, bits)
    words.flags.writeable = False
    np.testing.assert_array_equal(unpack(words, bits, length), codes.T)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_that_do_not_fit_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack(np.full((1, 32), 1 << bits, dtype=np.uint8), bits)


def test_foreign_widths_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="bits must be"):
        pack(np.zeros((1, 32), dtype=np.uint8), 7)
    with pytest.raises(ValueError, match="uint8"):
        pack(np.zeros((1, 32), dtype=np.int32), 4)
    with pytest.raises(ValueError, match="need int32"):
        unpack(np.zeros((1, 5), dtype=np.int32), 4, 32)
    with pytest.raises(ValueError, match="negative"):
        packed_width(-1, 4)
