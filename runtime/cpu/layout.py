"""Weights as the CPU kernels want them: tiles of 16 output channels, repacked from the canonical packing at load.

A tile's block of 32 input channels is contiguous and aligned to 64 bytes. With r an output channel of the tile, lane r
of a 64-byte vector holds four bytes, one for each of four consecutive input channels k = 4 j + c:

    4 bits   4 vectors; byte c of lane r in vector i: low nibble k = 8 i + c, high nibble k = 8 i + 4 + c
    3 bits   2 vectors of low bits, byte c of lane r in vector i: bits 2 j and 2 j + 1 are k = 16 i + 4 j + c;
             1 vector of high bits, byte c of lane r: bit j is k = 4 j + c

Scales and zeros stand as [tiles, G, 16]. Rows past N have scale 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear
from runtime.cpu.emit import LANES
from runtime.kernels.gemv.cpu import BLOCK, BLOCK_BYTES


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed C-contiguous array that starts at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)


def padded(count: int, multiple: int) -> int:
    """The next multiple, at or above count."""
    return -(-count // multiple) * multiple


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
    """G."""
    group_blocks: int
    """group_size / 32."""
    codes: npt.NDArray[np.uint8]
    """uint8 [tiles, blocks, block bytes]."""
    scales: npt.NDArray[np.float16]
    """float16 [tiles, G, 16]."""
    zeros: npt.NDArray[np.uint8]
    """uint8 [tiles, G, 16]."""

    @property
    def nbytes(self) -> int:
        """Bytes that one product with a vector reads."""
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes


def _tiled_rows(values: npt.NDArray[Any], tiles: int) -> npt.NDArray[Any]:
    """[N, G] -> [tiles, G, 16], zero-padded."""
    out = aligned_zeros((tiles, values.shape[1], LANES), values.dtype)
    full = np.zeros((tiles * LANES, values.shape[1]), values.dtype)
    full[: values.shape[0]] = values
    out[:] = full.reshape(tiles, LANES, -1).transpose(0, 2, 1)
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
    repack = _repack_4 if linear.bits == 4 else _repack_3
    words = np.ascontiguousarray(linear.codes).view(np.uint32)
    repack(words, codes.view(np.uint32))
    return TiledLinear(
        bits=linear.bits,
        tiles=tiles,
        blocks=blocks,
        groups=linear.scales.shape[1],
        group_blocks=linear.group_size // BLOCK,
        codes=codes,
        scales=_tiled_rows(np.asarray(linear.scales), tiles),
        zeros=_tiled_rows(np.asarray(linear.zeros), tiles),
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
