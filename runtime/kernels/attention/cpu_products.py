"""Integer products with the packed codes of a page: queries with its keys, softmax weights with its values.

Layouts (64-byte vectors; a 32-bit lane holds four bytes c = 0 .. 3):

    keys, 4 bits     [T / 16, ceil(D / 8)]   lane = token; low nibble channel 8 i + c, high nibble 8 i + 4 + c
    keys, 2 bits     [T / 16, ceil(D / 16)]  lane = token; bits 2 j, 2 j + 1 are channel 16 i + 4 j + c
    values, 4 bits   [ceil(D / 32), T / 4]   lane = channel 32 i + lane (low nibble), 32 i + 16 + lane (high nibble);
                                             byte c = token 4 j + c
    values, 2 bits   [ceil(D / 32), T / 16, 2]  lane = channel 32 i + 16 h + lane; bits 2 j, 2 j + 1 are token
                                             16 n + 4 j + c
    keys, 8 bits     [T / 16, ceil(D / 8), 2]  lane = token; vector h has channel 8 i + 4 h + c
    values, 8 bits   [ceil(D / 32), T / 4, 2]  lane = channel 32 i + 16 h + lane; byte c = token 4 j + c
    two planes       of 4 bits, 16 * upper + lower

Whatever is multiplied stands as rows of INT8: as many rows as there are query heads, or twice as many where each is two
planes (`runtime.kernels.attention.cpu_lowbit`). Products are written as floats; they are whole and exact.
"""

from __future__ import annotations

from typing import Any

import numba

from runtime.cpu.codes import (
    bits_0,
    bits_2,
    bits_4,
    bits_6,
    dot4_bytes,
    high_nibbles,
    join_high,
    join_low,
    load_bytes,
    low_nibbles,
)
from runtime.cpu.vector import add_words, broadcast_word, dot4, store_floats, to_floats, zero_words


@numba.njit(nogil=True, inline="always")
def _halves_4(address: int, _lower: int) -> Any:
    x = load_bytes(address)
    return low_nibbles(x), high_nibbles(x)


@numba.njit(nogil=True, inline="always")
def _halves_8(address: int, _lower: int) -> Any:
    return load_bytes(address), load_bytes(address + 64)


@numba.njit(nogil=True, inline="always")
def _halves_planes(address: int, lower: int) -> Any:
    x, y = load_bytes(address), load_bytes(address + lower)
    return join_low(x, y), join_high(x, y)


def _key_rows(halves: Any, dot: Any, size: int = 64) -> Any:
    """Products of four rows, or of one, with keys, eight channels of which take `size` bytes."""

    @numba.njit(nogil=True)
    def four(q: int, q_step: int, keys: int, lower: int, vectors: int, tiles: int, out: int, out_step: int) -> None:
        q1, q2, q3 = q + q_step, q + 2 * q_step, q + 3 * q_step
        for tile in range(0, tiles, 2):
            at0 = keys + size * vectors * tile
            at1 = at0 + size * vectors
            a0, a1, a2, a3 = zero_words(), zero_words(), zero_words(), zero_words()
            b0, b1, b2, b3 = zero_words(), zero_words(), zero_words(), zero_words()
            for i in range(vectors):
                x, y = halves(at0 + size * i, lower)
                u, v = halves(at1 + size * i, lower)
                w = broadcast_word(q + 8 * i)
                a0, b0 = dot(a0, x, w), dot(b0, u, w)
                w = broadcast_word(q1 + 8 * i)
                a1, b1 = dot(a1, x, w), dot(b1, u, w)
                w = broadcast_word(q2 + 8 * i)
                a2, b2 = dot(a2, x, w), dot(b2, u, w)
                w = broadcast_word(q3 + 8 * i)
                a3, b3 = dot(a3, x, w), dot(b3, u, w)
                w = broadcast_word(q + 8 * i + 4)
                a0, b0 = dot(a0, y, w), dot(b0, v, w)
                w = broadcast_word(q1 + 8 * i + 4)
                a1, b1 = dot(a1, y, w), dot(b1, v, w)
                w = broadcast_word(q2 + 8 * i + 4)
                a2, b2 = dot(a2, y, w), dot(b2, v, w)
                w = broadcast_word(q3 + 8 * i + 4)
                a3, b3 = dot(a3, y, w), dot(b3, v, w)
            to = out + 64 * tile
            store_floats(to, to_floats(a0))
            store_floats(to + 64, to_floats(b0))
            store_floats(to + out_step, to_floats(a1))
            store_floats(to + out_step + 64, to_floats(b1))
            store_floats(to + 2 * out_step, to_floats(a2))
            store_floats(to + 2 * out_step + 64, to_floats(b2))
            store_floats(to + 3 * out_step, to_floats(a3))
            store_floats(to + 3 * out_step + 64, to_floats(b3))

    @numba.njit(nogil=True)
    def one(q: int, keys: int, lower: int, vectors: int, tiles: int, out: int) -> None:
        for tile in range(0, tiles, 2):
            at0 = keys + size * vectors * tile
            at1 = at0 + size * vectors
            a0, a1, b0, b1 = zero_words(), zero_words(), zero_words(), zero_words()
            for i in range(vectors):
                x, y = halves(at0 + size * i, lower)
                u, v = halves(at1 + size * i, lower)
                w = broadcast_word(q + 8 * i)
                a0, b0 = dot(a0, x, w), dot(b0, u, w)
                w = broadcast_word(q + 8 * i + 4)
                a1, b1 = dot(a1, y, w), dot(b1, v, w)
            store_floats(out + 64 * tile, to_floats(add_words(a0, a1)))
            store_floats(out + 64 * tile + 64, to_floats(add_words(b0, b1)))

    return _all_key_rows(four, one)


def _all_key_rows(four: Any, one: Any) -> Any:
    """Products of any number of rows."""

    @numba.njit(nogil=True)
    def products(
        q: int, q_step: int, rows: int, keys: int, lower: int, vectors: int, tiles: int, out: int, out_step: int
    ) -> None:
        n = 0
        while n + 4 <= rows:
            four(q + n * q_step, q_step, keys, lower, vectors, tiles, out + n * out_step, out_step)
            n += 4
        while n < rows:
            one(q + n * q_step, keys, lower, vectors, tiles, out + n * out_step)
            n += 1

    return products


@numba.njit(nogil=True, inline="always")
def _quarters(address: int) -> Any:
    x = load_bytes(address)
    return bits_0(x), bits_2(x), bits_4(x), bits_6(x)


@numba.njit(nogil=True)
def _four_key_rows_2(
    q: int, q_step: int, keys: int, _lower: int, vectors: int, tiles: int, out: int, out_step: int
) -> None:
    q1, q2, q3 = q + q_step, q + 2 * q_step, q + 3 * q_step
    for tile in range(tiles):
        a0, a1, a2, a3 = zero_words(), zero_words(), zero_words(), zero_words()
        b0, b1, b2, b3 = zero_words(), zero_words(), zero_words(), zero_words()
        for i in range(vectors):
            x, y, u, v = _quarters(keys + 64 * (vectors * tile + i))
            at = 16 * i
            a0 = dot4(dot4(a0, x, broadcast_word(q + at)), y, broadcast_word(q + at + 4))
            a1 = dot4(dot4(a1, x, broadcast_word(q1 + at)), y, broadcast_word(q1 + at + 4))
            a2 = dot4(dot4(a2, x, broadcast_word(q2 + at)), y, broadcast_word(q2 + at + 4))
            a3 = dot4(dot4(a3, x, broadcast_word(q3 + at)), y, broadcast_word(q3 + at + 4))
            b0 = dot4(dot4(b0, u, broadcast_word(q + at + 8)), v, broadcast_word(q + at + 12))
            b1 = dot4(dot4(b1, u, broadcast_word(q1 + at + 8)), v, broadcast_word(q1 + at + 12))
            b2 = dot4(dot4(b2, u, broadcast_word(q2 + at + 8)), v, broadcast_word(q2 + at + 12))
            b3 = dot4(dot4(b3, u, broadcast_word(q3 + at + 8)), v, broadcast_word(q3 + at + 12))
        to = out + 64 * tile
        store_floats(to, to_floats(add_words(a0, b0)))
        store_floats(to + out_step, to_floats(add_words(a1, b1)))
        store_floats(to + 2 * out_step, to_floats(add_words(a2, b2)))
        store_floats(to + 3 * out_step, to_floats(add_words(a3, b3)))


@numba.njit(nogil=True)
def _one_key_row_2(q: int, keys: int, _lower: int, vectors: int, tiles: int, out: int) -> None:
    for tile in range(tiles):
        a, b, c, d = zero_words(), zero_words(), zero_words(), zero_words()
        for i in range(vectors):
            x, y, u, v = _quarters(keys + 64 * (vectors * tile + i))
            a = dot4(a, x, broadcast_word(q + 16 * i))
            b = dot4(b, y, broadcast_word(q + 16 * i + 4))
            c = dot4(c, u, broadcast_word(q + 16 * i + 8))
            d = dot4(d, v, broadcast_word(q + 16 * i + 12))
        store_floats(out + 64 * tile, to_floats(add_words(add_words(a, b), add_words(c, d))))


key_products_2 = _all_key_rows(_four_key_rows_2, _one_key_row_2)
key_products_4 = _key_rows(_halves_4, dot4)
"""Products of rows with the keys of a page.

Args (addresses and bytes): rows INT8 and the step from row to row, number of rows; keys, offset of their lower plane
(where there are two), vectors of a tile, tiles of 16 tokens (even); out float32 [rows, T] and the step from row to row.
"""
key_products_8 = _key_rows(_halves_8, dot4_bytes, 128)
key_products_planes = _key_rows(_halves_planes, dot4_bytes)


def _value_rows(halves: Any, dot: Any, size: int = 64) -> Any:
    """Products of rows of weights with values, 32 channels of four tokens of which take `size` bytes."""

    @numba.njit(nogil=True)
    def four(w: int, w_step: int, values: int, lower: int, quads: int, out: int, out_step: int) -> None:
        w1, w2, w3 = w + w_step, w + 2 * w_step, w + 3 * w_step
        a0, a1, a2, a3 = zero_words(), zero_words(), zero_words(), zero_words()
        b0, b1, b2, b3 = zero_words(), zero_words(), zero_words(), zero_words()
        for j in range(quads):
            x, y = halves(values + size * j, lower)
            weight = broadcast_word(w + 4 * j)
            a0, b0 = dot(a0, x, weight), dot(b0, y, weight)
            weight = broadcast_word(w1 + 4 * j)
            a1, b1 = dot(a1, x, weight), dot(b1, y, weight)
            weight = broadcast_word(w2 + 4 * j)
            a2, b2 = dot(a2, x, weight), dot(b2, y, weight)
            weight = broadcast_word(w3 + 4 * j)
            a3, b3 = dot(a3, x, weight), dot(b3, y, weight)
        store_floats(out, to_floats(a0))
        store_floats(out + 64, to_floats(b0))
        store_floats(out + out_step, to_floats(a1))
        store_floats(out + out_step + 64, to_floats(b1))
        store_floats(out + 2 * out_step, to_floats(a2))
        store_floats(out + 2 * out_step + 64, to_floats(b2))
        store_floats(out + 3 * out_step, to_floats(a3))
        store_floats(out + 3 * out_step + 64, to_floats(b3))

    @numba.njit(nogil=True)
    def one(w: int, values: int, lower: int, quads: int, out: int) -> None:
        a0, a1, b0, b1 = zero_words(), zero_words(), zero_words(), zero_words()
        for j in range(0, quads, 2):
            x, y = halves(values + size * j, lower)
            weight = broadcast_word(w + 4 * j)
            a0, b0 = dot(a0, x, weight), dot(b0, y, weight)
            x, y = halves(values + size * (j + 1), lower)
            weight = broadcast_word(w + 4 * j + 4)
            a1, b1 = dot(a1, x, weight), dot(b1, y, weight)
        store_floats(out, to_floats(add_words(a0, a1)))
        store_floats(out + 64, to_floats(add_words(b0, b1)))

    return _all_value_rows(four, one)


def _all_value_rows(four: Any, one: Any) -> Any:
    """Products of any number of rows with some blocks of 32 channels."""

    @numba.njit(nogil=True)
    def products(
        w: int,
        w_step: int,
        rows: int,
        values: int,
        lower: int,
        count: int,
        block: int,
        blocks: int,
        out: int,
        step: int,
    ) -> None:
        for i in range(blocks):
            at, to, n = values + i * block, out + 128 * i, 0
            while n + 4 <= rows:
                four(w + n * w_step, w_step, at, lower, count, to + n * step, step)
                n += 4
            while n < rows:
                one(w + n * w_step, at, lower, count, to + n * step)
                n += 1

    return products


@numba.njit(nogil=True)
def _four_value_rows_2(w: int, w_step: int, values: int, _lower: int, count: int, out: int, out_step: int) -> None:
    w1, w2, w3 = w + w_step, w + 2 * w_step, w + 3 * w_step
    for half in range(2):
        a0, a1, a2, a3 = zero_words(), zero_words(), zero_words(), zero_words()
        b0, b1, b2, b3 = zero_words(), zero_words(), zero_words(), zero_words()
        for n in range(count):
            x, y, u, v = _quarters(values + 128 * n + 64 * half)
            at = 16 * n
            a0 = dot4(dot4(a0, x, broadcast_word(w + at)), y, broadcast_word(w + at + 4))
            a1 = dot4(dot4(a1, x, broadcast_word(w1 + at)), y, broadcast_word(w1 + at + 4))
            a2 = dot4(dot4(a2, x, broadcast_word(w2 + at)), y, broadcast_word(w2 + at + 4))
            a3 = dot4(dot4(a3, x, broadcast_word(w3 + at)), y, broadcast_word(w3 + at + 4))
            b0 = dot4(dot4(b0, u, broadcast_word(w + at + 8)), v, broadcast_word(w + at + 12))
            b1 = dot4(dot4(b1, u, broadcast_word(w1 + at + 8)), v, broadcast_word(w1 + at + 12))
            b2 = dot4(dot4(b2, u, broadcast_word(w2 + at + 8)), v, broadcast_word(w2 + at + 12))
            b3 = dot4(dot4(b3, u, broadcast_word(w3 + at + 8)), v, broadcast_word(w3 + at + 12))
        to = out + 64 * half
        store_floats(to, to_floats(add_words(a0, b0)))
        store_floats(to + out_step, to_floats(add_words(a1, b1)))
        store_floats(to + 2 * out_step, to_floats(add_words(a2, b2)))
        store_floats(to + 3 * out_step, to_floats(add_words(a3, b3)))


@numba.njit(nogil=True)
def _one_value_row_2(w: int, values: int, _lower: int, count: int, out: int) -> None:
    for half in range(2):
        a, b, c, d = zero_words(), zero_words(), zero_words(), zero_words()
        for n in range(count):
            x, y, u, v = _quarters(values + 128 * n + 64 * half)
            a = dot4(a, x, broadcast_word(w + 16 * n))
            b = dot4(b, y, broadcast_word(w + 16 * n + 4))
            c = dot4(c, u, broadcast_word(w + 16 * n + 8))
            d = dot4(d, v, broadcast_word(w + 16 * n + 12))
        store_floats(out + 64 * half, to_floats(add_words(add_words(a, b), add_words(c, d))))


value_products_2 = _all_value_rows(_four_value_rows_2, _one_value_row_2)
value_products_4 = _value_rows(_halves_4, dot4)
"""Products of rows of weights with the values of a page.

Args (addresses and bytes): weights INT8 [rows, T] and the step from row to row, number of rows; values, offset of their
lower plane (of two), vectors along the tokens (T / 4, or T / 16 where codes have 2 bits), bytes of a block of 32
channels, blocks; out float32 [rows, 32 * blocks] and the step from row to row.
"""
value_products_8 = _value_rows(_halves_8, dot4_bytes, 128)
value_products_planes = _value_rows(_halves_planes, dot4_bytes)
