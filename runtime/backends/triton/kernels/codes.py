"""Low-bit matrices in kernels: converts words of the layout to tensor core operands.

Device functions shared by several kernels. `runtime.backends.triton.layout` describes the layout,
`runtime.backends.triton.kernels.gemv` the conversion from codes to numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.trellis import MULTIPLIERS, STATE_BITS
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.sizes import PIECE

EXPONENT = {3: 0x48004800, 4: 0x4C004C00}
"""Exponent bits of 2^bits in both halves, such that the top bits of the mantissa count ones."""
_STATE_BITS = tl.constexpr(STATE_BITS)
_RANK_EXPONENT = 0x66006600
"""The same of 1536, such that the lowest bit counts ones, for a trellis's levels."""
_MULTIPLIERS = tl.constexpr(MULTIPLIERS)


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

    GROUP_SIZE: int  # Input channels that share a scale; 128 if all do
    BITS: int
    KIND: str  # "uniform", "minimums", "codebook", or "trellis"
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
    book = weight.scales if weight.trellis else weight.codebook
    groups, book, bias = (unused if t is None else t for t in (weight.groups, book, weight.bias))
    exponent = _RANK_EXPONENT if weight.trellis else EXPONENT[weight.bits]
    return Matrix(weight.codes, groups, book, bias, weight.shape[0], weight.width, exponent)


def weight_form(weight: GpuLinear) -> Form:
    group_size = weight.group_size or 128
    return Form(
        GROUP_SIZE=group_size,
        BITS=weight.bits,
        KIND=weight.kind,
        SPAN=min(128, group_size & -group_size),
        EVEN_K=weight.width % PIECE == 0,
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
    return 0 if form.KIND == "codebook" else 10 - form.BITS


@triton.jit
def _states(words, PIECE: tl.constexpr, BITS: tl.constexpr):
    """States of a piece of a trellis in both halves of its lanes, int32 [BLOCK_N, 16]: windows of the words' streams.

    Behind a block's own words, as many as codes have bits, follows the last of the five.
    """
    WORD: tl.constexpr = PIECE * BITS // 16
    BIT: tl.constexpr = PIECE * BITS % 16
    states = words[WORD] >> BIT
    if BIT > 16 - _STATE_BITS:
        LOW: tl.constexpr = (1 << (16 - BIT)) - 1
        NEXT: tl.constexpr = 4 if WORD + 1 == BITS else WORD + 1
        states = states & (LOW * 0x00010001) | (words[NEXT] << (16 - BIT)) & ((0xFF - LOW) * 0x00010001)
    else:
        states &= 0x00FF00FF
    return states


@triton.constexpr_function
def _levels(bits):
    """Assembly that turns two states into their levels, both in the halves of a word: exactly (`models.trellis`).

    Bits 4 to 7 of a rank are the place of the coarse part, u. Below the exponent of 1536 ($2) they are the half 1536 +
    16 u, and t is 15 / 16 of what it is there. Triton would compute each half by itself. Each rounding counts: with
    these constants the sum with 1536 and the fine part, which rounds to whole numbers, gives all levels.
    """
    multiplier = _MULTIPLIERS[bits]
    return f"""{{
        .reg .b32 rank, t, power, level, fine, eighth, middle, most, growth, back;
        mov.b32 eighth, 0x20002000;
        mov.b32 middle, 0xCA78CA78;
        mov.b32 most, 0x50065006;
        mov.b32 growth, 0x50005000;
        mov.b32 back, 0xE60FE60F;
        shl.b32 fine, $1, 1;
        lop3.b32 fine, fine, 0x001E001E, $2, 0xEA;
        mad.lo.u32 rank, $1, {16 * multiplier + 1}, {8 * multiplier * 0x10001};
        lop3.b32 t, rank, 0x00F000F0, $2, 0xEA;
        fma.rn.f16x2 t, t, eighth, middle;
        mul.rn.f16x2 power, t, t;
        mul.rn.f16x2 power, power, power;
        mul.rn.f16x2 power, power, power;
        fma.rn.f16x2 power, power, most, growth;
        fma.rn.f16x2 level, t, power, fine;
        add.rn.f16x2 $0, level, back;
    }}"""


@triton.jit
def _values(words, book, exponent, PIECE: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """One piece as float16 [BLOCK_N, 32]: 2^BITS + code, the values of the codebook, or a trellis's levels."""
    if form.KIND == "trellis":
        low, high = halves_of(
            tl.inline_asm_elementwise(
                _levels(form.BITS),
                "=r,r,r",
                [_states(words, PIECE, form.BITS), exponent],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        )
    elif form.KIND == "codebook":
        code = _piece(words, PIECE, form.BITS, top_of(form))
        low, high = tl.load(book + (code & 0xFFFF)), tl.load(book + (code >> 16))
    else:
        low, high = halves_of(_piece(words, PIECE, form.BITS, top_of(form)) | exponent)
    return pair_up(low, high, tile.BLOCK_N, tile.WARPS)


@triton.jit
def load_words(at, N, more, form: tl.constexpr):
    """The words of a whole block of each row, int32 [BLOCK_N, 16] each; `at` points to the first.

    At 3 bits the fourth is piece 15, which is stored in spare bits of the others. Of a trellis, the fifth is what
    follows its own (`overlap`). `more` says whether anything follows the block in the rows.
    """
    w0 = tl.load(at)
    w1 = tl.load(at + N * 16)
    w2 = tl.load(at + N * 32) if form.BITS > 2 else w1
    w3 = tl.load(at + N * 48) if form.BITS > 3 else w2
    w4 = w3
    if form.KIND == "trellis":
        w4 = overlap(w0, load_behind(at, 0, N, more, form))
    elif form.BITS == 3:
        w3 = spare_bit(w0, 0, top_of(form)) | spare_bit(w1, 1, top_of(form)) | spare_bit(w2, 2, top_of(form))
    return w0, w1, w2, w3, w4


@triton.jit
def load_behind(rows, at, N, more, form: tl.constexpr):
    """The first word of each lane's next one, int32 [BLOCK_N, 16]; 0 behind the last lane of a row.

    Behind a block's last lane follows the first of the next block, or of the tail. `at` is the block's first word, from
    the pointers `rows` on.
    """
    lanes = tl.arange(0, 16)[None, :]
    step = tl.where(lanes < 15, 1, form.BITS * N * 16 - 15)
    return tl.load(rows + (at + step), mask=(lanes < 15) | more, other=0)


@triton.jit
def overlap(first, following):
    """What follows the streams in both halves of a lane's words: the other half's, and the next lane's.

    Args (tensors): the lanes' first words, and those of their next lanes (`load_behind`).
    """
    return (first >> 16) & 0xFFFF | following << 16


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


@triton.constexpr_function
def _tail_words(form):
    """Words of the pieces after the last whole block of a trellis (`runtime.backends.triton.sizes.tail_words`)."""
    return -(-(form.TAIL * form.BITS + _STATE_BITS.value - form.BITS) // 16)


@triton.jit
def tail_words(codes, load_n, N, blocks, form: tl.constexpr):
    """The words of the pieces after the last whole block, in the format of `load_words`, four of them.

    Of a trellis they have all bits of their states, those of the next lane's codes too.

    Args (tensors): the matrix's codes; the program's rows, int32 [BLOCK_N]; how many whole blocks there are.
    """
    EACH: tl.constexpr = 16 // form.BITS
    tail = codes + blocks * form.BITS * N * 16
    if form.KIND == "trellis":
        at = tail + load_n[:, None] * 16 + tl.arange(0, 16)[None, :]
        WORDS: tl.constexpr = _tail_words(form)
        w0 = tl.load(at)
        w1 = tl.load(at + N * 16) if WORDS > 1 else w0
        w2 = tl.load(at + N * 32) if WORDS > 2 else w1
        w3 = tl.load(at + N * 48) if WORDS > 3 else w2
    else:
        w0 = _tail_word(tail, load_n, N, 0, form)
        w1 = _tail_word(tail, load_n, N, 1, form) if form.TAIL > EACH else w0
        w2 = _tail_word(tail, load_n, N, 2, form) if form.TAIL > 2 * EACH else w0
        w3 = _tail_word(tail, load_n, N, 3, form) if form.TAIL > 3 * EACH else w0
    return w0, w1, w2, w3, w3


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
def row_words(words, at, first_n, N, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """One word of each row of a tile, int32 [BLOCK_N], in two loads that are smaller than the program.

    Places are 32-bit numbers until they meet the pointer, so that a loop keeps half of the registers for them.

    Args (tensors): pointer to words; place of the first row's; the first 8 rows of every 16 of the tile, int32
    [BLOCK_N / 2].
    """
    first = tl.load(words + (at + tl.minimum(first_n, N - 1)))
    second = tl.load(words + (at + tl.minimum(first_n + 8 * WARPS, N - 1)))
    pairs = tl.reshape(tl.join(first, second), (BLOCK_N // 16, 8, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (BLOCK_N,))


@triton.jit
def spread(value, SPAN: tl.constexpr, BLOCK_N: tl.constexpr):
    """One value per row for every channel, [BLOCK_N] -> [BLOCK_N, SPAN], built of pairs as the weights are."""
    pairs = tl.join(value, value)[:, None, :]
    return tl.reshape(tl.broadcast_to(pairs, (BLOCK_N, SPAN // 2, 2)), (BLOCK_N, SPAN))


@triton.jit
def scaled(acc, matrix, pid_n, form: tl.constexpr, tile: tl.constexpr):
    """Sums float32 [BLOCK_N, BLOCK_M] of a program's rows times what is one number an output channel, of a trellis."""
    if form.KIND == "trellis":
        offs_n = tl.minimum(pid_n * tile.BLOCK_N + natural_rows(tile.BLOCK_N, tile.WARPS), matrix.N - 1)
        acc *= tl.load(matrix.book + offs_n).to(tl.float32)[:, None]
    return acc


@triton.constexpr_function
def tail_tile(form, tile):
    """The tile for the pieces after the last whole block, unpacked in a number that divides them."""
    return tile._replace(DOT=min(tile.DOT, 32 * (form.TAIL & -form.TAIL)))
