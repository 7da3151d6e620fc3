"""Low-bit matrices in kernels: converts words of the layout to tensor core operands.

Device functions shared by several kernels. `runtime.backends.triton.layout` describes the layout,
`runtime.backends.triton.kernels.gemv` the conversion from codes to numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.sizes import PIECE

EXPONENT = {3: 0x48004800, 4: 0x4C004C00}
"""Exponent bits of 2^bits in both halves, such that the top bits of the mantissa count ones."""


class Matrix(NamedTuple):
    """A low-bit matrix as kernels take it: the tensors of a `GpuLinear`, and numbers."""

    codes: Any
    groups: Any
    book: Any
    bias: Any
    N: Any
    K: Any
    exponent: Any


class Form(NamedTuple):
    """Compile-time parameters of a matrix."""

    GROUP_SIZE: int  # Input channels that share a scale; 128 with a codebook
    BITS: int  # 3 or 4
    CODEBOOK: bool  # Whether codes are looked up in a codebook
    SPAN: int  # The part of a group covered by one product
    EVEN_K: bool  # Whether the last piece is complete
    TAIL: int
    """Pieces after the last whole block, from 0 to 15, of matrices whose width is not a multiple of it. Such matrices
    share the kernel of those whose width is."""


class Tile(NamedTuple):
    """Compile-time parameters of a program's tile."""

    DOT: int  # Input channels unpacked at a time: 32, 64 or 128
    BLOCK_M: int
    BLOCK_N: int
    WARPS: int


def matrix_of(weight: GpuLinear, unused: torch.Tensor) -> Matrix:
    """A matrix as a kernel argument; `unused` replaces absent tensors."""
    groups, book, bias = (unused if t is None else t for t in (weight.groups, weight.codebook, weight.bias))
    return Matrix(weight.codes, groups, book, bias, *weight.shape, EXPONENT[weight.bits])


def weight_form(weight: GpuLinear) -> Form:
    group_size = weight.group_size or 128
    return Form(
        GROUP_SIZE=group_size,
        BITS=weight.bits,
        CODEBOOK=weight.codebook is not None,
        SPAN=min(128, group_size & -group_size),
        EVEN_K=weight.shape[1] % PIECE == 0,
        TAIL=weight.tail,
    )


@triton.jit
def natural_rows(BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Row of the matrix in each row of a product's tile, int32 [BLOCK_N].

    Loads assign 8 rows to a warp and the next 8 to the next warp, whereas a tensor core tile has 16 rows in one warp.
    So the second 8 rows of a tile are those that the warp loads next.
    """
    row = tl.arange(0, BLOCK_N)
    return row // (16 * WARPS) * (16 * WARPS) + row // 8 % 2 * (8 * WARPS) + row // 16 % WARPS * 8 + row % 8


@triton.jit
def pair_up(low, high, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Join both halves of the lanes of a piece, [BLOCK_N, 16] each -> [BLOCK_N, 32] with channels in natural order."""
    pairs = tl.reshape(tl.join(low, high), (BLOCK_N // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1, 3, 5, 4, 6, 7)), (BLOCK_N, 32))


@triton.jit
def _shift(word, BY: tl.constexpr):
    """Shift the word left by BY bits, or right if BY is negative; shifted-in bits are undefined."""
    return word << BY if BY > 0 else word >> -BY


@triton.jit
def spare_bit(word, BIT: tl.constexpr, TOP: tl.constexpr):
    """Bit BIT of the codes of piece 15, at 3 bits, from the word that stores it, moved above TOP."""
    return _shift(word, TOP - 15 + BIT) & (0x00010001 << (TOP + BIT))


@triton.jit
def _piece(words, PIECE: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr):
    """Codes of a piece in both halves of its lanes, at the bits TOP and up; other bits zero. int32 [BLOCK_N, 16].

    At 3 bits the fourth word holds piece 15 that way already.
    """
    if BITS == 3 and PIECE == 15:
        code = words[3]
    else:
        EACH: tl.constexpr = 16 // BITS
        shifted = _shift(words[PIECE // EACH], TOP - PIECE % EACH * BITS)
        code = shifted & (((1 << BITS) - 1) * 0x00010001 << TOP)
    return code


@triton.jit
def halves_of(word):
    """Both halves of a word as float16."""
    return word.to(tl.int16).to(tl.float16, bitcast=True), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.constexpr_function
def top_of(form):
    """The bit of a half at which codes become numbers: the mantissa's top, or 0 for look-ups."""
    return 0 if form.CODEBOOK else 10 - form.BITS


@triton.jit
def _values(words, book, exponent, PIECE: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """One piece as float16 [BLOCK_N, 32]: 2^BITS + code, or the values of the codebook."""
    if form.CODEBOOK:
        code = _piece(words, PIECE, form.BITS, top_of(form))
        low, high = tl.load(book + (code & 0xFFFF)), tl.load(book + (code >> 16))
    else:
        low, high = halves_of(_piece(words, PIECE, form.BITS, top_of(form)) | exponent)
    return pair_up(low, high, tile.BLOCK_N, tile.WARPS)


@triton.jit
def load_words(at, N, form: tl.constexpr):
    """The words of a whole block of each row, int32 [BLOCK_N, 16] each; `at` points to the first.

    At 3 bits the fourth is piece 15, which is stored in spare bits of the others.
    """
    w0 = tl.load(at)
    w1 = tl.load(at + N * 16)
    w2 = tl.load(at + N * 32)
    if form.BITS == 4:
        w3 = tl.load(at + N * 48)
    else:
        w3 = spare_bit(w0, 0, top_of(form)) | spare_bit(w1, 1, top_of(form)) | spare_bit(w2, 2, top_of(form))
    return w0, w1, w2, w3


@triton.jit
def _tail_word(tail, load_n, N, WORD: tl.constexpr, form: tl.constexpr):
    """Word WORD of each row's pieces after the last whole block, int32 [BLOCK_N, 16]; `tail` points to their words."""
    EACH: tl.constexpr = 16 // form.BITS
    PIECES: tl.constexpr = form.TAIL - EACH * WORD
    lanes = tl.arange(0, 16)
    if PIECES > 2:
        word = tl.load(tail + N * (16 * WORD) + load_n[:, None] * 16 + lanes[None, :])
    else:
        lanes = tl.max_contiguous(lanes, 4)  # four a thread, like other words, or they would have to be exchanged
        short = (tail + N * (16 * WORD)).to(tl.pointer_type(tl.int16), bitcast=True)
        pair = tl.load(short + load_n[:, None] * 16 + lanes[None, :]).to(tl.int32)
        word = pair & 0xFF | (pair & 0xFF00) << 8
    return word


@triton.jit
def tail_words(codes, load_n, N, blocks, form: tl.constexpr):
    """The words of the pieces after the last whole block, in the format of `load_words`.

    Args (tensors): the matrix's codes; the program's rows, int32 [BLOCK_N]; how many whole blocks there are.
    """
    EACH: tl.constexpr = 16 // form.BITS
    tail = codes + blocks * form.BITS * N * 16
    w0 = _tail_word(tail, load_n, N, 0, form)
    w1 = _tail_word(tail, load_n, N, 1, form) if form.TAIL > EACH else w0
    w2 = _tail_word(tail, load_n, N, 2, form) if form.TAIL > 2 * EACH else w0
    w3 = _tail_word(tail, load_n, N, 3, form) if form.TAIL > 3 * EACH else w0
    return w0, w1, w2, w3


@triton.jit
def values_of(words, book, exponent, PIECE: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """DOT (32, 64 or 128) channels from a piece on, float16 [BLOCK_N, DOT] in natural order; see `_values`.

    Args (tensors): the block's `load_words`; codebooks of the rows, pointers [BLOCK_N, 1]; the exponent bits, int32, an
    argument of the kernel so that the compiler can't see through it and treat both halves of a word apart.
    """
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    w = _values(words, book, exponent, PIECE, form, tile)
    if tile.DOT > 32:
        w1 = _values(words, book, exponent, PIECE + 1, form, tile)
        w = tl.join(w, w1)
        if tile.DOT > 64:
            w2 = _values(words, book, exponent, PIECE + 2, form, tile)
            w3 = _values(words, book, exponent, PIECE + 3, form, tile)
            w = tl.permute(tl.join(w, tl.join(w2, w3)), (0, 3, 2, 1))
        else:
            w = tl.permute(w, (0, 2, 1))
        w = tl.reshape(w, (BLOCK_N, tile.DOT))
    return w


@triton.jit
def row_words(at, first_n, N, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """One word of each row of a tile, int32 [BLOCK_N], in two loads that are smaller than the program.

    Args (tensors): pointer to the words of all rows; the first 8 rows of every 16 of the tile, int32 [BLOCK_N / 2].
    """
    first = tl.load(at + tl.minimum(first_n, N - 1))
    second = tl.load(at + tl.minimum(first_n + 8 * WARPS, N - 1))
    pairs = tl.reshape(tl.join(first, second), (BLOCK_N // 16, 8, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (BLOCK_N,))


@triton.jit
def spread(value, SPAN: tl.constexpr, BLOCK_N: tl.constexpr):
    """One value per row for every channel, [BLOCK_N] -> [BLOCK_N, SPAN], built of pairs as the weights are."""
    pairs = tl.join(value, value)[:, None, :]
    return tl.reshape(tl.broadcast_to(pairs, (BLOCK_N, SPAN // 2, 2)), (BLOCK_N, SPAN))


@triton.constexpr_function
def tail_tile(form, tile):
    """The tile for the pieces after the last whole block, unpacked in a number that divides them."""
    return tile._replace(DOT=min(tile.DOT, 32 * (form.TAIL & -form.TAIL)))
