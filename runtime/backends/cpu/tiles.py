"""Tiles: the CPU's weight layout, 16 output channels side by side, repacked from the canonical packing at load.

A tile's block of 32 input channels is contiguous and aligned to 64 bytes. With r an output channel of the tile, lane r
of a 64-byte vector holds four bytes, one for each of four consecutive input channels k = 4 j + c:

    4 bits   4 vectors; byte c of lane r in vector i: low nibble k = 8 i + c, high nibble k = 8 i + 4 + c
    3 bits   2 vectors of low bits, byte c of lane r in vector i: bits 2 j and 2 j + 1 are k = 16 i + 4 j + c;
             1 vector of high bits, byte c of lane r: bit j is k = 4 j + c

    5 bits   as at 4 bits with the low four bits; then byte c of lane r of a fifth vector: bit j is the high one of
             k = 4 j + c

    6 bits   for each half of a block, two vectors as at 4 bits with the low four bits; then byte c of lane r of a third
             vector: bits 2 j and 2 j + 1 are the high ones of k = 4 j + c

Scales and zeros stand as [tiles, G, 16]. Rows past N have scale 0. With two levels of factors, scales and negative
minimums of super-groups stand as [tiles, K / 256, 2, 16], those of groups as [tiles, G, 2, 16]. Scales of
floating-point numbers of 4 bits are bytes, exponents plus 127, of those of 8 bits float32.

Matrices with codebooks are looked up by byte shuffles, which stay within 16 bytes, so these hold several input channels
of one or two output channels (`runtime.backends.cpu.kernels.lookup`), again for output channels r and input channels k:

    4 bits   4 vectors; byte 16 r + c of vector i, output channel 4 i + r: low nibble k = c, high nibble k = 16 + c
    3 bits   2 vectors of low bits, byte 8 r + c of vector i, output channel 8 i + r: bits 2 j and 2 j + 1 are
             k = 8 j + c; 1 vector of high bits, byte 8 r + c: bit `HIGH_BITS[i][j]` is k = 8 j + c of output channel
             8 i + r

Their codebooks stand as [tiles, 16, 2^bits], their scales as [tiles, 1, 16].

Streams of a trellis (`runtime.backends.cpu.kernels.trellis`) keep their words where the processor has AVX-512 VBMI:
lane r of a block's vector i is word i of output channel r. Elsewhere byte c of that lane is the stream's byte c * bits
+ i, of channels from 8 c on. Their scales stand as those of codebooks; what follows the last block is a line of zeros.

At 8 bits, byte c of lane r in vector j of the eight is k = 4 j + c, of whole numbers less 128 where a variant
multiplies signed bytes.

Weights in full precision stand as [tiles, K, 16], in bfloat16 as [tiles, K / 2, 16, 2], zero-padded to whole blocks.

Matrices that are multiplied in whole numbers (`runtime.backends.cpu.units.w4a8`) have codes as the first ones, scales
as [tiles, 1, 16], group scales, and zeros times group scales, as [tiles, G, 16].

An `Arena` keeps them in a few large regions, so that the system can map them with huge pages. A token reads every
weight once, and scattered residual rows, in far more 4 KiB pages than the TLB has entries; in a virtual machine each
miss costs two page-table walks. NumPy requests huge pages (`madvise`) only for arrays of 4 MiB and more, but the
matrices of a small model are smaller.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear, PackedResidual
from models.packing import unpack
from runtime.backends.cpu.data.instructions import (
    BYTE,
    CODEBOOK,
    FIVE,
    FLOATS,
    FLOATS_8,
    MINIMUMS,
    PER_TOKEN,
    SIX,
    TRELLIS,
    TWO_LEVELS,
    UNIFORM,
    WHOLE_BITS,
    Weights,
    Whole,
)
from runtime.backends.cpu.data.records import BLOCK, BLOCK_BYTES, LANES, LINE, padded
from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.units import PRODUCTS, REPACK_CODEBOOK, REPACK_UNIFORM

_REGION_BYTES = 32 << 20


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed C-contiguous array in its own memory, aligned to 64 bytes."""
    return Arena(0).zeros(shape, dtype)


class Arena:
    """Allocates adjacent arrays. A region lives as long as any of its arrays.

    Args:
        region_bytes: Size of a region; larger arrays get their own.
    """

    def __init__(self, region_bytes: int = _REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._free = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A zeroed C-contiguous array, aligned to 64 bytes."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        own = size >= self._region_bytes
        region = np.zeros(size + LINE, np.uint8) if own else self._free
        start = -region.ctypes.data % LINE
        if not own and start + size > region.size:
            region = np.zeros(self._region_bytes + LINE, np.uint8)
            start = -region.ctypes.data % LINE
        if not own:
            self._free = region[start + size :]
        return region[start : start + size].view(kind).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class TiledLinear:
    """A low-bit matrix in tiles."""

    bits: int
    """3, 4, 5, 6 or 8."""
    tiles: int
    """ceil(N / 16)."""
    blocks: int
    """ceil(K / 32)."""
    groups: int
    """G, the groups of the activations; of uniform weights too."""
    group_blocks: int
    """group_size / 32; 0 where it is 16."""
    codes: npt.NDArray[np.uint8]
    """uint8 [tiles, blocks, block bytes]."""
    scales: npt.NDArray[np.float16]
    """float16 [tiles, G, 16]; [tiles, 1, 16] with codebooks and with group scales, [tiles, K / 256, 2, 16] with two
    levels."""
    zeros: npt.NDArray[np.uint8] | npt.NDArray[np.float16] | npt.NDArray[np.int8] | None
    """uint8 [tiles, G, 16]; None with codebooks and at 8 bits. Times the group scales, where there are any. With
    minimums, the negative of these, float16. int8 [tiles, G, 2, 16] with two levels."""
    codebooks: npt.NDArray[np.int8] | None
    """int8 [tiles, 16, 2^bits]; None where the matrix is uniform."""
    group_scales: npt.NDArray[np.uint8] | None
    """uint8 [tiles, G, 16]; None where the matrix is not multiplied in whole numbers."""

    form: int = UNIFORM
    """As of `Weights`; of a trellis, `zeros` are a line of them."""

    @property
    def weights(self) -> Weights:
        """Its fields in an instruction."""
        parts = (self.codes, self.scales, self.zeros, self.codebooks)
        codes, scales, zeros, codebooks = (0 if part is None else int(part.ctypes.data) for part in parts)
        sizes = (self.bits, self.tiles, self.blocks, self.groups, self.group_blocks)
        group_scales = 0 if self.group_scales is None else int(self.group_scales.ctypes.data)
        return Weights(codes, scales, zeros, codebooks, *sizes, group_scales, self.form)

    @property
    def whole(self) -> Whole:
        """Its fields where it holds residuals."""
        weights = self.weights
        return Whole(weights.codes, weights.scales, weights.zeros, self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes that one product with a vector reads."""
        parts = (self.codes, self.scales, self.zeros, self.codebooks, self.group_scales)
        return sum(part.nbytes for part in parts if part is not None)


def _tiled_rows(values: npt.NDArray[Any], tiles: int, arena: Arena) -> npt.NDArray[Any]:
    """[N, G] -> [tiles, G, 16], zero-padded."""
    out = arena.zeros((tiles, values.shape[1], LANES), values.dtype)
    full = np.zeros((tiles * LANES, values.shape[1]), values.dtype)
    full[: values.shape[0]] = values
    out[:] = full.reshape(tiles, LANES, -1).transpose(0, 2, 1)
    return out


def _tiled_levels(linear: PackedLinear, tiles: int, arena: Arena) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Factors of super-groups and of groups: [tiles, K / 256, 2, 16] and [tiles, G, 2, 16]."""
    assert linear.minimums is not None
    pairs = ((linear.scales, -linear.minimums), (linear.group_scales, linear.group_minimums))
    found = [_tiled_rows(np.concatenate(pair, axis=1), tiles, Arena(0)) for pair in pairs]
    supers, groups = (each.reshape(tiles, 2, -1, LANES).transpose(0, 2, 1, 3) for each in found)
    out = arena.zeros(supers.shape, supers.dtype), arena.zeros(groups.shape, groups.dtype)
    out[0][:], out[1][:] = supers, groups
    return out


def _planes(words: npt.NDArray[np.int32], bits: int, codes: npt.NDArray[np.uint8]) -> None:
    """Repack codes of 5 or 6 bits: int32 [N, blocks * bits] into uint8 [tiles, blocks, block bytes]."""
    tiles, blocks = codes.shape[:2]
    planes, own = words.reshape(len(words), blocks, bits), bits - 4
    low, parts = np.ascontiguousarray(planes[..., :4]), codes.reshape(tiles, blocks, own, -1)
    nibbles = np.zeros((tiles, blocks, BLOCK_BYTES[4]), np.uint8)
    REPACK_UNIFORM[4](int(low.ctypes.data), len(words), int(nibbles.ctypes.data), tiles, blocks)
    parts[..., :-LINE] = nibbles.reshape(tiles, blocks, own, -1)
    tops = np.zeros((tiles * LANES, blocks, own), np.uint32)  # a word has those of a part, of k = 4 j + c
    tops[: len(words)] = planes[..., 4:].view(np.uint32)
    mask, places = (1 << own) - 1, itertools.product(range(BLOCK // own // 4), range(4))
    turned = sum((tops >> own * (4 * j + c) & mask) << (8 * c + own * j) for j, c in places)
    lanes = np.asarray(turned, np.uint32).reshape(tiles, LANES, blocks, own).transpose(0, 2, 3, 1)
    parts[..., -LINE:] = np.ascontiguousarray(lanes).view(np.uint8)


def _tiled_codebooks(codebook: npt.NDArray[np.int8], tiles: int, arena: Arena) -> npt.NDArray[np.int8]:
    """[N, 2^bits] -> [tiles, 16, 2^bits], zero-padded."""
    out: npt.NDArray[np.int8] = arena.zeros((tiles, LANES, codebook.shape[1]), np.int8)
    out.reshape(tiles * LANES, -1)[: codebook.shape[0]] = codebook
    return out


def matrix_form(linear: PackedLinear) -> int:
    """The form of a stored matrix, as of `Weights`."""
    if linear.minimums is not None:
        return MINIMUMS if linear.group_minimums is None else TWO_LEVELS
    if linear.floats or linear.floats_8:
        return FLOATS if linear.floats else FLOATS_8
    if linear.trellis or linear.per_token:
        return TRELLIS if linear.trellis else PER_TOKEN
    return UNIFORM if linear.codebook is None else CODEBOOK


def tile_linear(linear: PackedLinear, arena: Arena) -> TiledLinear:
    """Repack a matrix.

    Args:
        linear: The stored matrix; 3, 4, 5, 6 or 8 bits, group_size a multiple of 32, or 16 at 6 bits.
        arena: Where the tiles go.

    Raises:
        ValueError: other bits or group size.
    """
    form = matrix_form(linear)
    if linear.bits not in PRODUCTS[form]:
        raise ValueError(f"{linear.name} has {linear.bits} bits; the CPU kernels read {sorted(PRODUCTS[form])}")
    if linear.group_size % BLOCK and not (form == TWO_LEVELS and linear.bits == SIX):
        raise ValueError(f"{linear.name} has groups of {linear.group_size}; the CPU kernels need a multiple of {BLOCK}")
    N, K = linear.shape
    tiles, blocks = padded(N, LANES) // LANES, padded(K, BLOCK) // BLOCK
    codes = arena.zeros((tiles, blocks, BLOCK_BYTES[linear.bits]), np.uint8)
    words = np.ascontiguousarray(linear.codes)
    if form == TRELLIS or linear.bits == BYTE:
        lanes = np.zeros((tiles * LANES, words.shape[1]), np.int32)
        lanes[:N] = words
        by_words = isa.VBMI or form != TRELLIS
        octets = lanes.view(np.uint8).reshape(
            tiles, LANES, blocks, *((linear.bits, 4) if by_words else (4, linear.bits))
        )
        codes[:] = octets.transpose((0, 2, 3, 1, 4) if by_words else (0, 2, 4, 1, 3)).reshape(codes.shape)
        if linear.bits == BYTE and form != FLOATS_8 and not isa.ENTRY_OFFSET:
            codes ^= 128
    elif linear.bits in (FIVE, SIX):
        _planes(words, linear.bits, codes)
    else:
        repack = (REPACK_CODEBOOK if form == CODEBOOK else REPACK_UNIFORM)[linear.bits]
        repack(int(words.ctypes.data), N, int(codes.ctypes.data), tiles, blocks)
    zeros, group_scales = linear.zeros, linear.group_scales
    if form == PER_TOKEN:
        assert zeros is not None
        group_scales = np.ones_like(zeros) if group_scales is None else group_scales
        zeros = zeros * group_scales  # at most 15 * 16
    line = arena.zeros((LINE,), np.uint8) if form == TRELLIS else None
    offsets: npt.NDArray[Any] | None = zeros if linear.minimums is None else -linear.minimums
    if form == TWO_LEVELS:
        group_scales = None
        scales, levels = _tiled_levels(linear, tiles, arena)
    else:
        scales = _tiled_rows(np.asarray(linear.scales), tiles, arena)
        levels = line if offsets is None else _tiled_rows(np.asarray(offsets), tiles, arena)
    return TiledLinear(
        bits=linear.bits,
        tiles=tiles,
        blocks=blocks,
        groups=-(-K // linear.group_size),
        group_blocks=linear.group_size // BLOCK,
        codes=codes,
        scales=scales,
        zeros=levels,
        codebooks=None if linear.codebook is None else _tiled_codebooks(np.asarray(linear.codebook), tiles, arena),
        group_scales=None if group_scales is None else _tiled_rows(np.asarray(group_scales), tiles, arena),
        form=form,
    )


def tile_residual(
    residual: PackedResidual, of: TiledLinear, arena: Arena, channels: npt.NDArray[np.int32] | None = None
) -> TiledLinear:
    """Residuals as a tiled matrix, multiplied as fast as 4-bit weights.

    Residual rows are scattered in memory; reading all of them row by row runs at a quarter of the memory's speed.

    Args:
        residual: Of 4 bits.
        of: The matrix that they belong to; its groups are as large as theirs.
        arena: Where the tiles go.
        channels: int32 [K'], those whose residuals these are, side by side; None: all.
    """
    assert residual.bits == WHOLE_BITS
    assert residual.scales is not None
    rows = np.asarray(residual.codes) if channels is None else np.asarray(residual.codes)[channels]
    N, K = residual.scales.shape[0], rows.shape[0]
    blocks = padded(K, BLOCK) // BLOCK
    groups = -(-blocks // of.group_blocks)
    whole = np.zeros((blocks * BLOCK, of.tiles * LANES), np.uint8)
    whole[:K, :N] = unpack(rows, WHOLE_BITS, N)
    quads = whole.reshape(blocks, BLOCK // 8, 2, 4, of.tiles, LANES)
    codes = arena.zeros((of.tiles, blocks, BLOCK_BYTES[WHOLE_BITS]), np.uint8)
    pairs = quads[:, :, 0] | quads[:, :, 1] << 4  # [blocks, 4, 4, tiles, 16]
    codes[:] = pairs.transpose(3, 0, 1, 4, 2).reshape(codes.shape)
    columns = np.zeros((of.tiles * LANES, groups), np.float16)
    columns[:N] = np.asarray(residual.scales)[:, None]
    return TiledLinear(
        bits=WHOLE_BITS,
        tiles=of.tiles,
        blocks=blocks,
        groups=groups,
        group_blocks=of.group_blocks,
        codes=codes,
        scales=_tiled_rows(columns, of.tiles, arena),
        zeros=_tiled_rows(np.full(columns.shape, 1 << (WHOLE_BITS - 1), np.uint8), of.tiles, arena),
        codebooks=None,
        group_scales=None,
    )


def tile_exact(matrix: npt.NDArray[Any], arena: Arena) -> npt.NDArray[Any]:
    """A matrix in full precision as tiles.

    Args:
        matrix: [N, K], float16, float32, or uint16, the bits of bfloat16.
        arena: Where the tiles go.
    """
    N, K = matrix.shape
    tiles, pair = padded(N, LANES) // LANES, 2 if matrix.dtype == np.uint16 else 1
    out = arena.zeros((tiles, padded(K, BLOCK) // pair, LANES, pair), matrix.dtype)
    for tile in range(tiles):
        rows = matrix[tile * LANES : (tile + 1) * LANES]
        whole = np.zeros((LANES, out.shape[1] * pair), matrix.dtype)
        whole[: len(rows), :K] = rows
        out[tile] = whole.reshape(LANES, -1, pair).transpose(1, 0, 2)
    return out
