"""Trellis-coded weights: how a code stream and a scale for each output channel stand for a matrix.

A matrix W [N, K] is rotated along its input channels (`rotate`), K being filled up with zeros to a multiple of 32. The
codes of an output channel are a stream of `bits` bits a weight, channel 0 in the lowest bits. A weight's *state* are
the 8 bits of the stream from its own code on, so that it overlaps with the codes of the channels behind it; behind the
last one, bits are 0. The state chooses one of 256 levels, and levels times the channel's scale are the rotated weights:

    Ŵ Q = scale[n] * level(state[n, k]),   level(s) = C(h + m l + m / 2 mod 16) + 2 l - 15

with h and l the high and low four bits of s, and m = `MULTIPLIERS[bits]`. So a level has a coarse part, which rises as
Gaussian quantiles do, in whole numbers, and a fine part:

    C(u) = 48 (t + g t⁹) / (1 + g), t = (2 u - 15) / 15, g = `GROWTH`

No part is a function of more than four bits: a processor that can only look up among sixteen bytes does so twice. Level
~s is level s with the other sign: who can look up among 128 needs no more. And all levels fit 7 bits with an offset of
64: two products with INT8 activations add up within 16 bits.

Successive states differ by a shift and a new code. A good multiplier makes the levels that the codes can reach from any
state lie evenly spread, and elsewhere for every state. That is what a trellis is for:
many more levels than codes, of which the path that fits best is chosen. On Gaussian weights the squared error is
0.0218 of the variance at 3 bits, where rounding to 8 levels has 0.0345 and no code has less than 0.0156
(`tests/models/test_trellis.py`).

Sources: Marcellin & Fischer 1990 (trellis-coded quantization); Tseng et al. 2024 (QTIP: bit-shift trellis, levels
computed from states, §3.1, sums of uniform numbers among them; rotation, §2.2). These levels are our own.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from models.packing import RUN

FloatArray = npt.NDArray[np.float32]

STATE_BITS = 8
"""L, the bits of a state."""
LARGEST_LEVEL = 63
MULTIPLIERS = {2: 6, 3: 2, 4: 14}
"""m, by the bits of a code; found by trying all even numbers on Gaussian weights."""
GROWTH = 0.6
"""g: how much steeper the coarse part rises at its ends."""
ROTATED = 64
"""Input channels that are rotated together; the last ones may be 32."""


def coarse() -> npt.NDArray[np.int8]:
    """C, int8 [16]."""
    t = np.arange(-15, 16, 2) / 15
    exact = (LARGEST_LEVEL - 15) * (t + GROWTH * t**9) / (1 + GROWTH)
    found: npt.NDArray[np.int8] = np.rint(exact).astype(np.int8)
    return found


@cache
def levels(bits: int) -> npt.NDArray[np.int8]:
    """The level of every state, int8 [256], for codes of 2, 3 or 4 bits."""
    high, low = np.divmod(np.arange(1 << STATE_BITS), 16)
    multiplier = MULTIPLIERS[bits]
    places = (high + multiplier * low + multiplier // 2) % 16
    found: npt.NDArray[np.int8] = (coarse()[places] + 2 * low - 15).astype(np.int8)
    found.flags.writeable = False
    return found


def padded_width(width: int) -> int:
    """Codes of an output channel with so many weights."""
    return -(-width // RUN) * RUN


def states(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """The states of codes uint8 [N, K], K a multiple of 32: uint8 [N, K]."""
    found = codes.copy()
    for behind in range(1, -(-STATE_BITS // bits)):
        found[:, :-behind] |= codes[:, behind:] << np.uint8(bits * behind)
    return found


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """The streams int32 [N, K / 32 * bits] of codes uint8 [N, K], K a multiple of 32."""
    eights = codes.reshape(len(codes), -1, 8)
    words = np.zeros(eights.shape[:2], "<u4")
    for place in range(8):
        words |= eights[:, :, place].astype(np.uint32) << np.uint32(bits * place)
    octets = words.view(np.uint8).reshape(*words.shape, 4)[:, :, :bits]
    return np.ascontiguousarray(octets).reshape(len(codes), -1).view("<i4").astype(np.int32, copy=False)


def unpack(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
    """Undo `pack`: codes uint8 [N, K]."""
    octets = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8).reshape(len(words), -1, bits)
    eights = np.zeros((*octets.shape[:2], 4), np.uint8)
    eights[:, :, :bits] = octets
    found = eights.view("<u4") >> (bits * np.arange(8, dtype=np.uint32)) & np.uint32((1 << bits) - 1)
    return found.reshape(len(words), -1).astype(np.uint8)


@cache
def rotation(width: int) -> FloatArray:
    """The orthogonal matrix Q, float32 [width, width], of 64 or 32 input channels: signs, then Sylvester's matrix.

    The signs are those of a bent function, i0 i1 + i2 i3 + i4 i5 of the channel's bits: what is constant, or as regular
    as one of the matrix's own columns, is spread evenly too. Random signs do so on average only.
    """
    places = np.arange(width)
    bit = [places >> place & 1 for place in range(6)]
    signs = 1 - 2 * ((bit[0] & bit[1]) ^ (bit[2] & bit[3]) ^ (bit[4] & bit[5]))
    sylvester = 1 - 2 * (np.bitwise_count(places[:, None] & places).astype(np.int64) % 2)
    found: FloatArray = (signs[:, None] * sylvester / width**0.5).astype(np.float32)
    found.flags.writeable = False
    return found


def rotate(x: FloatArray) -> FloatArray:
    """The product x Q, float32 [..., K filled up to a multiple of 32], of x float32 [..., K].

    Q has `rotation` along its diagonal, of 64 channels each, and of 32 where no more are left.
    """
    width = padded_width(x.shape[-1])
    filled = np.zeros((*x.shape[:-1], width), x.dtype)
    filled[..., : x.shape[-1]] = x
    for channels, block in _blocks(width):
        part = filled[..., channels]
        filled[..., channels] = (part.reshape(-1, block) @ rotation(block)).reshape(part.shape)
    return filled


def unrotate(x: FloatArray, width: int) -> FloatArray:
    """Undo `rotate`, for K = width."""
    found = np.empty_like(x)
    for channels, block in _blocks(x.shape[-1]):
        part = x[..., channels]
        found[..., channels] = (part.reshape(-1, block) @ rotation(block).T).reshape(part.shape)
    return np.ascontiguousarray(found[..., :width])


def _blocks(width: int) -> list[tuple[slice, int]]:
    whole = width // ROTATED * ROTATED
    return [(slice(whole), ROTATED), (slice(whole, None), RUN)]


def dequantize(words: npt.NDArray[np.int32], scales: npt.NDArray[np.float16], bits: int, width: int) -> FloatArray:
    """Ŵ float32 [N, K] of streams int32 [N, ceil(K / 32) * bits] and scales float16 [N, 1], in the original basis."""
    values = levels(bits)[states(unpack(words, bits), bits)].astype(np.float32)
    values *= scales.astype(np.float32)
    return unrotate(values, width)
