"""Units that repack stored codes into tiles (`runtime.backends.cpu.tiles` shows them), a matrix at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from runtime.backends.cpu.kernels.lookup import HIGH_BITS
from runtime.backends.cpu.machine.emit import I32, I64, Builder, define
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.unit import compiled_unit


@define(types.CPointer(types.uint32), types.int64)
def _words_at(b: Builder, address: Any) -> Any:
    """The address of 32-bit words."""
    return b.inttoptr(address, I32.as_pointer())


@define(types.CPointer(types.uint64), types.int64)
def _pairs_at(b: Builder, address: Any) -> Any:
    """The address of 64-bit words."""
    return b.inttoptr(address, I64.as_pointer())


@kernel
def _repack_4(words: Any, rows: int, out: Any, tiles: int, blocks: int) -> None:
    """Words [N, blocks * 4] -> out [tiles, blocks, 64]: nibbles 0..3 to low, 4..7 to high halves of bytes."""
    for tile in range(tiles):
        for r in range(min(16, rows - 16 * tile)):
            for block in range(blocks):
                for i in range(4):
                    word = words[4 * (blocks * (16 * tile + r) + block) + i]
                    low, high = word & np.uint32(0xFFFF), word >> np.uint32(16)
                    low = (low | (low << np.uint32(8))) & np.uint32(0x00FF00FF)
                    low = (low | (low << np.uint32(4))) & np.uint32(0x0F0F0F0F)
                    high = (high | (high << np.uint32(8))) & np.uint32(0x00FF00FF)
                    high = (high | (high << np.uint32(4))) & np.uint32(0x0F0F0F0F)
                    out[64 * (blocks * tile + block) + 16 * i + r] = low | (high << np.uint32(4))


@kernel
def _repack_3(words: Any, rows: int, out: Any, tiles: int, blocks: int) -> None:
    """Words [N, blocks * 3] -> out [tiles, blocks, 48]: fields transposed, 4 x 4 pairs and 8 x 4 single bits."""
    for tile in range(tiles):
        for r in range(min(16, rows - 16 * tile)):
            for block in range(blocks):
                for i in range(2):
                    word, spread = words[3 * (blocks * (16 * tile + r) + block) + i], np.uint32(0)
                    for j in range(4):
                        pairs = (word >> np.uint32(8 * j)) & np.uint32(0xFF)
                        pairs = (pairs | (pairs << np.uint32(12))) & np.uint32(0x000F000F)
                        pairs = (pairs | (pairs << np.uint32(6))) & np.uint32(0x03030303)
                        spread |= pairs << np.uint32(2 * j)
                    out[48 * (blocks * tile + block) + 16 * i + r] = spread
                word, spread = words[3 * (blocks * (16 * tile + r) + block) + 2], np.uint32(0)
                for j in range(8):
                    bits = (word >> np.uint32(4 * j)) & np.uint32(0xF)
                    bits = (bits | (bits << np.uint32(14))) & np.uint32(0x00030003)
                    bits = (bits | (bits << np.uint32(7))) & np.uint32(0x01010101)
                    spread |= bits << np.uint32(j)
                out[48 * (blocks * tile + block) + 32 + r] = spread


@kernel
def _nibbles_apart(word: np.uint32) -> np.uint64:
    """Eight nibbles -> the low halves of eight bytes."""
    wide = np.uint64(word)
    wide = (wide | (wide << np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    wide = (wide | (wide << np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    return (wide | (wide << np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)


@kernel
def _pairs_apart(pairs: np.uint32) -> np.uint64:
    """Eight pairs of bits -> the lowest bits of eight bytes."""
    wide = np.uint64(pairs)
    wide = (wide | (wide << np.uint64(24))) & np.uint64(0x000000FF000000FF)
    wide = (wide | (wide << np.uint64(12))) & np.uint64(0x000F000F000F000F)
    return (wide | (wide << np.uint64(6))) & np.uint64(0x0303030303030303)


@kernel
def _bits_apart(bits: np.uint32) -> np.uint64:
    """Eight bits -> the lowest bits of eight bytes."""
    wide = np.uint64(bits)
    wide = (wide | (wide << np.uint64(28))) & np.uint64(0x0000000F0000000F)
    wide = (wide | (wide << np.uint64(14))) & np.uint64(0x0003000300030003)
    return (wide | (wide << np.uint64(7))) & np.uint64(0x0101010101010101)


@kernel
def _repack_codebook_4(words: Any, rows: int, out: Any, tiles: int, blocks: int) -> None:
    """Words [N, blocks * 4] -> out [tiles, blocks, 32]: 16 nibbles of a row to low, the next 16 to high halves."""
    for tile in range(tiles):
        for r in range(min(16, rows - 16 * tile)):
            for block in range(blocks):
                for i in range(2):
                    low = _nibbles_apart(words[4 * (blocks * (16 * tile + r) + block) + i])
                    high = _nibbles_apart(words[4 * (blocks * (16 * tile + r) + block) + 2 + i])
                    out[32 * (blocks * tile + block) + 2 * r + i] = low | (high << np.uint64(4))


@kernel
def _repack_codebook_3(words: Any, rows: int, out: Any, tiles: int, blocks: int) -> None:
    """Words [N, blocks * 3] -> out [tiles, blocks, 24]: fields of a row's 8 input channels, 4 pairs and 4 bits."""
    for tile in range(tiles):
        for r in range(min(16, rows - 16 * tile)):
            for block in range(blocks):
                at, to = 3 * (blocks * (16 * tile + r) + block), 24 * (blocks * tile + block)
                low, high = np.uint64(0), np.uint64(0)
                for j in range(4):
                    pairs = (words[at + j // 2] >> np.uint32(16 * (j % 2))) & np.uint32(0xFFFF)
                    low |= _pairs_apart(pairs) << np.uint64(2 * j)
                    bits = (words[at + 2] >> np.uint32(8 * j)) & np.uint32(0xFF)
                    high |= _bits_apart(bits) << np.uint64(HIGH_BITS[r // 8][j])
                out[to + r] = low
                out[to + 16 + r % 8] |= high


@compiled_unit
def repack_uniform_4(codes: int, rows: int, out: int, tiles: int, blocks: int) -> None:
    """Repack uniform codes of 4 bits.

    Args:
        codes: Address of uint32 [rows, 4 * blocks], in canonical packing.
        rows: Output channels.
        out: Address of zeroed bytes [tiles, blocks, 256].
        tiles: Tiles of 16 output channels.
        blocks: Blocks of 32 input channels.
    """
    _repack_4(_words_at(codes), rows, _words_at(out), tiles, blocks)


@compiled_unit
def repack_uniform_3(codes: int, rows: int, out: int, tiles: int, blocks: int) -> None:
    """Repack uniform codes of 3 bits: uint32 [rows, 3 * blocks] to bytes [tiles, blocks, 192]."""
    _repack_3(_words_at(codes), rows, _words_at(out), tiles, blocks)


@compiled_unit
def repack_codebook_4(codes: int, rows: int, out: int, tiles: int, blocks: int) -> None:
    """Repack places in codebooks of 16 entries: uint32 [rows, 4 * blocks] to bytes [tiles, blocks, 256]."""
    _repack_codebook_4(_words_at(codes), rows, _pairs_at(out), tiles, blocks)


@compiled_unit
def repack_codebook_3(codes: int, rows: int, out: int, tiles: int, blocks: int) -> None:
    """Repack places in codebooks of 8 entries: uint32 [rows, 3 * blocks] to bytes [tiles, blocks, 192]."""
    _repack_codebook_3(_words_at(codes), rows, _pairs_at(out), tiles, blocks)
