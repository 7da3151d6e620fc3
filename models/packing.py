"""Canonical packing: unsigned codes of 2, 3, 4, 5, 6 or 8 bits in 32-bit words, the same on every machine.

A row of L codes is cut into runs of 32; each run takes `bits` little-endian 32-bit words, so a row takes
ceil(L / 32) * bits words. The tail of the last run is filled with zeros. Inside a run (value i in 0..31):

====  =====  ==========================================================================================
bits  words  where value i lies
====  =====  ==========================================================================================
2     2      word i // 16, bits 2 * (i % 16) and up
3     3      low two bits: words 0 and 1, as in 2-bit packing; high bit: word 2, bit i
4     4      word i // 8, bits 4 * (i % 8) and up (low nibble first)
5     5      low four bits: words 0 to 3, as in 4-bit packing; high bit: word 4, bit i
6     6      low four bits: words 0 to 3, as in 4-bit packing; high two: words 4 and 5, as in 2-bit packing
8     8      word i // 4, bits 8 * (i % 4) and up (low byte first)
====  =====  ==========================================================================================

The same layout holds weight codes ([N, K], packed along K) and residual codes ([K, N], packed along N).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]

RUN = 32
"""Codes that are packed together."""
PACKED_BITS = (2, 3, 4, 5, 6, 8)
"""Bit widths this packing knows."""


def packed_width(length: int, bits: int) -> int:
    """Number of 32-bit words that hold `length` codes of `bits` bits.

    Raises:
        ValueError: `bits` is not a packed width or `length` is negative.
    """
    if bits not in PACKED_BITS:
        raise ValueError(f"bits must be one of {PACKED_BITS}, not {bits}")
    if length < 0:
        raise ValueError(f"length must not be negative, not {length}")
    return -(-length // RUN) * bits


def pack(codes: UInt8Array, bits: int) -> Int32Array:
    """Pack rows of codes.

    Args:
        codes: uint8 [R, L], each below 2^bits.
        bits: One of `PACKED_BITS`.

    Returns:
        int32 [R, ceil(L / 32) * bits], contiguous.

    Raises:
        ValueError: wrong dtype, number of axes or bit width, or a code that does not fit.
    """
    if codes.dtype != np.uint8 or codes.ndim != 2:
        raise ValueError(f"codes must be uint8 [R, L], not {codes.dtype} with shape {codes.shape}")
    rows, length = codes.shape
    words = packed_width(length, bits)
    if codes.size and int(codes.max()) >= 1 << bits:
        raise ValueError(f"a code of {int(codes.max())} does not fit {bits} bits")
    padded = words // bits * RUN
    if padded != length:
        wide = np.zeros((rows, padded), dtype=np.uint8)
        wide[:, :length] = codes
        codes = wide
    codes = np.ascontiguousarray(codes)
    if bits in (5, 6):
        low, high = pack(codes & np.uint8(15), 4), codes >> np.uint8(4)
        top = pack(high, 2) if bits == 6 else np.packbits(high, axis=1, bitorder="little").view("<i4")
        shape = rows, padded // RUN
        runs = low.reshape(*shape, 4), top.astype(np.int32, copy=False).reshape(*shape, bits - 4)
        return np.concatenate(runs, axis=-1).reshape(rows, words)
    if bits == 8:
        packed = codes
    elif bits == 4:
        packed = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    elif bits == 2:
        packed = _pack_pairs(codes)
    else:
        packed = np.empty((rows, padded // RUN, 12), dtype=np.uint8)
        packed[:, :, :8] = _pack_pairs(codes & np.uint8(3)).reshape(rows, padded // RUN, 8)
        high = np.packbits(codes >> np.uint8(2), axis=1, bitorder="little")
        packed[:, :, 8:] = high.reshape(rows, padded // RUN, 4)
    return packed.reshape(rows, words * 4).view("<i4").astype(np.int32, copy=False)


def unpack(words: Int32Array, bits: int, length: int) -> UInt8Array:
    """Undo `pack`.

    Args:
        words: int32 [R, ceil(length / 32) * bits].
        bits: One of `PACKED_BITS`.
        length: codes in each row (L).

    Returns:
        uint8 [R, length], contiguous.

    Raises:
        ValueError: wrong dtype or bit width, or a width that does not belong to `length`.
    """
    width = packed_width(length, bits)
    if words.dtype != np.int32 or words.ndim != 2 or words.shape[1] != width:
        raise ValueError(
            f"{length} codes of {bits} bits need int32 [R, {width}], not {words.dtype} with shape {words.shape}"
        )
    rows = words.shape[0]
    if bits in (5, 6):
        runs = words.reshape(rows, width // bits, bits)
        low, tops = (
            runs[..., :4].reshape(rows, width // bits * 4),
            runs[..., 4:].reshape(rows, width // bits * (bits - 4)),
        )
        if bits == 6:
            return unpack(low, 4, length) | unpack(tops, 2, length) << np.uint8(4)
        octets = np.ascontiguousarray(tops.astype("<i4", copy=False)).view(np.uint8)
        return unpack(low, 4, length) | np.unpackbits(octets, axis=1, count=length, bitorder="little") << np.uint8(4)
    octets = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    if bits == 8:
        codes = octets
    elif bits == 4:
        codes = np.empty((rows, width * 8), dtype=np.uint8)
        codes[:, 0::2] = octets & np.uint8(15)
        codes[:, 1::2] = octets >> np.uint8(4)
    elif bits == 2:
        codes = _unpack_pairs(octets)
    else:
        triples = octets.reshape(rows, width // 3, 12)
        codes = _unpack_pairs(triples[:, :, :8].reshape(rows, width // 3 * 8))
        top = np.unpackbits(triples[:, :, 8:].reshape(rows, width // 3 * 4), axis=1, bitorder="little")
        codes |= top << np.uint8(2)
    return np.ascontiguousarray(codes[:, :length])


def _pack_pairs(codes: UInt8Array) -> UInt8Array:
    """2-bit codes [R, L] -> bytes [R, L / 4], first code in the lowest bits."""
    packed = codes[:, 0::4].copy()
    for place in range(1, 4):
        packed |= codes[:, place::4] << np.uint8(2 * place)
    return packed


def _unpack_pairs(octets: UInt8Array) -> UInt8Array:
    """Bytes [R, B] -> 2-bit codes [R, 4 * B]."""
    codes = np.empty((octets.shape[0], octets.shape[1] * 4), dtype=np.uint8)
    for place in range(4):
        codes[:, place::4] = octets >> np.uint8(2 * place) & np.uint8(3)
    return codes
