"""Weights as the CPU kernels want them: tiles of 16 output channels, repacked from the canonical packing at load.

A tile's block of 32 input channels is contiguous and aligned to 64 bytes. With r an output channel of the tile, lane r
of a 64-byte vector holds four bytes, one for each of four consecutive input channels k = 4 j + c:

    4 bits   4 vectors; byte c of lane r in vector i: low nibble k = 8 i + c, high nibble k = 8 i + 4 + c
    3 bits   2 vectors of low bits, byte c of lane r in vector i: bits 2 j and 2 j + 1 are k = 16 i + 4 j + c;
             1 vector of high bits, byte c of lane r: bit j is k = 4 j + c

Scales and zeros stand as [tiles, G, 16]. Rows past N have scale 0.

Matrices with codebooks are looked up by byte shuffles, which stay within 16 bytes, so these hold several input channels
of one or two output channels (`runtime.backends.cpu.kernels.lookup`), again for output channels r and input channels k:

    4 bits   4 vectors; byte 16 r + c of vector i, output channel 4 i + r: low nibble k = c, high nibble k = 16 + c
    3 bits   2 vectors of low bits, byte 8 r + c of vector i, output channel 8 i + r: bits 2 j and 2 j + 1 are
             k = 8 j + c; 1 vector of high bits, byte 8 r + c: bit `HIGH_BITS[i][j]` is k = 8 j + c of output channel
             8 i + r

Their codebooks stand as [tiles, 16, 2^bits], their scales as [tiles, 1, 16].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear
from runtime.backends.cpu.data.arrangements import padded as padded
from runtime.backends.cpu.data.instructions import Weights
from runtime.backends.cpu.kernels.gemv import BLOCK, BLOCK_BYTES
from runtime.backends.cpu.kernels.lookup import HIGH_BITS
from runtime.backends.cpu.machine.emit import LANES


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed C-contiguous array that starts at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledLinear:
    """A low-bit matrix in tiles."""

    bits: int
    """3 or 4."""
    tiles: int
    """ceil(N / 16)."""
    blocks: int
    """ceil(K / 32)."""
    groups: int
    """G, the groups of the activations; of uniform weights too."""
    group_blocks: int
    """group_size / 32."""
    codes: npt.NDArray[np.uint8]
    """uint8 [tiles, blocks, block bytes]."""
    scales: npt.NDArray[np.float16]
    """float16 [tiles, G, 16]; [tiles, 1, 16] with codebooks."""
    zeros: npt.NDArray[np.uint8] | None
    """uint8 [tiles, G, 16]; None with codebooks."""
    codebooks: npt.NDArray[np.int8] | None
    """int8 [tiles, 16, 2^bits]; None where the matrix is uniform."""

    @property
    def weights(self) -> Weights:
        """What an instruction says of it."""
        parts = (self.codes, self.scales, self.zeros, self.codebooks)
        codes, scales, zeros, codebooks = (0 if part is None else int(part.ctypes.data) for part in parts)
        sizes = (self.bits, self.tiles, self.blocks, self.groups, self.group_blocks)
        return Weights(codes, scales, zeros, codebooks, *sizes)

    @property
    def nbytes(self) -> int:
        """Bytes that one product with a vector reads."""
        parts = (self.codes, self.scales, self.zeros, self.codebooks)
        return sum(part.nbytes for part in parts if part is not None)


def _tiled_rows(values: npt.NDArray[Any], tiles: int) -> npt.NDArray[Any]:
    """[N, G] -> [tiles, G, 16], zero-padded."""
    out = aligned_zeros((tiles, values.shape[1], LANES), values.dtype)
    full = np.zeros((tiles * LANES, values.shape[1]), values.dtype)
    full[: values.shape[0]] = values
    out[:] = full.reshape(tiles, LANES, -1).transpose(0, 2, 1)
    return out


def _tiled_codebooks(codebook: npt.NDArray[np.int8], tiles: int) -> npt.NDArray[np.int8]:
    """[N, 2^bits] -> [tiles, 16, 2^bits], zero-padded."""
    out: npt.NDArray[np.int8] = aligned_zeros((tiles, LANES, codebook.shape[1]), np.int8)
    out.reshape(tiles * LANES, -1)[: codebook.shape[0]] = codebook
    return out


def tile_linear(linear: PackedLinear) -> TiledLinear:
    """Repack a matrix.

    Args:
        linear: The stored matrix; 3 or 4 bits, group_size a multiple of 32.

    Raises:
        ValueError: other bits or group size.
    """
    if linear.bits not in BLOCK_BYTES:
        raise ValueError(f"{linear.name} has {linear.bits} bits; the CPU kernels read {sorted(BLOCK_BYTES)}")
    if linear.group_size % BLOCK:
        raise ValueError(f"{linear.name} has groups of {linear.group_size}; the CPU kernels need a multiple of {BLOCK}")
    N, K = linear.shape
    tiles, blocks = padded(N, LANES) // LANES, padded(K, BLOCK) // BLOCK
    codes = aligned_zeros((tiles, blocks, BLOCK_BYTES[linear.bits]), np.uint8)
    words = np.ascontiguousarray(linear.codes).view(np.uint32)
    if linear.codebook is None:
        (_repack_4 if linear.bits == 4 else _repack_3)(words, codes.view(np.uint32))
    else:
        (_repack_codebook_4 if linear.bits == 4 else _repack_codebook_3)(words, codes.view(np.uint64))
    return TiledLinear(
        bits=linear.bits,
        tiles=tiles,
        blocks=blocks,
        groups=-(-K // linear.group_size),
        group_blocks=linear.group_size // BLOCK,
        codes=codes,
        scales=_tiled_rows(np.asarray(linear.scales), tiles),
        zeros=None if linear.zeros is None else _tiled_rows(np.asarray(linear.zeros), tiles),
        codebooks=None if linear.codebook is None else _tiled_codebooks(np.asarray(linear.codebook), tiles),
    )


@numba.njit(nogil=True, cache=True)
def _repack_4(words: npt.NDArray[np.uint32], out: npt.NDArray[np.uint32]) -> None:
    """Words [N, blocks * 4] -> out [tiles, blocks, 64]: nibbles 0..3 to low, 4..7 to high halves of bytes."""
    N = words.shape[0]
    for tile in range(out.shape[0]):
        for r in range(min(16, N - 16 * tile)):
            for block in range(out.shape[1]):
                for i in range(4):
                    word = words[16 * tile + r, 4 * block + i]
                    low, high = word & np.uint32(0xFFFF), word >> np.uint32(16)
                    low = (low | (low << np.uint32(8))) & np.uint32(0x00FF00FF)
                    low = (low | (low << np.uint32(4))) & np.uint32(0x0F0F0F0F)
                    high = (high | (high << np.uint32(8))) & np.uint32(0x00FF00FF)
                    high = (high | (high << np.uint32(4))) & np.uint32(0x0F0F0F0F)
                    out[tile, block, 16 * i + r] = low | (high << np.uint32(4))


@numba.njit(nogil=True, cache=True)
def _repack_3(words: npt.NDArray[np.uint32], out: npt.NDArray[np.uint32]) -> None:
    """Words [N, blocks * 3] -> out [tiles, blocks, 48]: fields transposed, 4 x 4 pairs and 8 x 4 single bits."""
    N = words.shape[0]
    for tile in range(out.shape[0]):
        for r in range(min(16, N - 16 * tile)):
            for block in range(out.shape[1]):
                for i in range(2):
                    word, spread = words[16 * tile + r, 3 * block + i], np.uint32(0)
                    for j in range(4):
                        pairs = (word >> np.uint32(8 * j)) & np.uint32(0xFF)
                        pairs = (pairs | (pairs << np.uint32(12))) & np.uint32(0x000F000F)
                        pairs = (pairs | (pairs << np.uint32(6))) & np.uint32(0x03030303)
                        spread |= pairs << np.uint32(2 * j)
                    out[tile, block, 16 * i + r] = spread
                word, spread = words[16 * tile + r, 3 * block + 2], np.uint32(0)
                for j in range(8):
                    bits = (word >> np.uint32(4 * j)) & np.uint32(0xF)
                    bits = (bits | (bits << np.uint32(14))) & np.uint32(0x00030003)
                    bits = (bits | (bits << np.uint32(7))) & np.uint32(0x01010101)
                    spread |= bits << np.uint32(j)
                out[tile, block, 32 + r] = spread


@numba.njit(nogil=True, cache=True)
def _nibbles_apart(word: np.uint32) -> np.uint64:
    """Eight nibbles -> the low halves of eight bytes."""
    wide = np.uint64(word)
    wide = (wide | (wide << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    wide = (wide | (wide << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    return (wide | (wide << np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)


@numba.njit(nogil=True, cache=True)
def _pairs_apart(pairs: np.uint32) -> np.uint64:
    """Eight pairs of bits -> the lowest bits of eight bytes."""
    wide = np.uint64(pairs)
    wide = (wide | (wide << np.uint64(24))) & np.uint64(0x000000FF000000FF)
    wide = (wide | (wide << np.uint64(12))) & np.uint64(0x000F000F000F000F)
    return (wide | (wide << np.uint64(6))) & np.uint64(0x0303030303030303)


@numba.njit(nogil=True, cache=True)
def _bits_apart(bits: np.uint32) -> np.uint64:
    """Eight bits -> the lowest bits of eight bytes."""
    wide = np.uint64(bits)
    wide = (wide | (wide << np.uint64(28))) & np.uint64(0x0000000F0000000F)
    wide = (wide | (wide << np.uint64(14))) & np.uint64(0x0003000300030003)
    return (wide | (wide << np.uint64(7))) & np.uint64(0x0101010101010101)


@numba.njit(nogil=True, cache=True)
def _repack_codebook_4(words: npt.NDArray[np.uint32], out: npt.NDArray[np.uint64]) -> None:
    """Words [N, blocks * 4] -> out [tiles, blocks, 32]: 16 nibbles of a row to low, the next 16 to high halves."""
    N = words.shape[0]
    for tile in range(out.shape[0]):
        for r in range(min(16, N - 16 * tile)):
            for block in range(out.shape[1]):
                for i in range(2):
                    low = _nibbles_apart(words[16 * tile + r, 4 * block + i])
                    high = _nibbles_apart(words[16 * tile + r, 4 * block + 2 + i])
                    out[tile, block, 2 * r + i] = low | (high << np.uint64(4))


@numba.njit(nogil=True, cache=True)
def _repack_codebook_3(words: npt.NDArray[np.uint32], out: npt.NDArray[np.uint64]) -> None:
    """Words [N, blocks * 3] -> out [tiles, blocks, 24]: fields of a row's 8 input channels, 4 pairs and 4 bits."""
    N = words.shape[0]
    for tile in range(out.shape[0]):
        for r in range(min(16, N - 16 * tile)):
            for block in range(out.shape[1]):
                row, at = 16 * tile + r, 3 * block
                low, high = np.uint64(0), np.uint64(0)
                for j in range(4):
                    pairs = (words[row, at + j // 2] >> np.uint32(16 * (j % 2))) & np.uint32(0xFFFF)
                    low |= _pairs_apart(pairs) << np.uint64(2 * j)
                    bits = (words[row, at + 2] >> np.uint32(8 * j)) & np.uint32(0xFF)
                    high |= _bits_apart(bits) << np.uint64(HIGH_BITS[r // 8][j])
                out[tile, block, r] = low
                out[tile, block, 16 + r % 8] |= high
