"""The GPU's weight layout: codes in the order in which a thread loads its tensor core operands.

K is cut into pieces of 32 input channels, the last filled up with zeros, and 16 pieces are a block. A piece has 16
lanes that hold two channels each, one in the low and one in the high half of a 32-bit word. Piece `i`, lane `l`, half
`h` holds channel

    32 * i + 16 * (l // 2 % 2) + 4 * (l // 4) + 2 * (l % 2) + h

of the block: four neighbouring lanes, which one thread loads together as 128 bits, hold the channels 4q .. 4q + 3 and
16 + 4q .. 16 + 4q + 3 of a piece, and these are the operands of thread q of a quad in two `mma.m16n8k16`. Codes
therefore go from memory to the tensor core without a shuffle, in pairs: one AND-OR turns two codes of a word into two
halves of known exponent (`runtime.backends.triton.kernels.gemv`).

At 4 bits a block has four words: piece i is in word i // 4, at bits 4 * (i % 4) and up of both halves. At 3 bits it has
three: pieces 0 to 14 are in word i // 5, at bits 3 * (i % 5) and up, and bit b of piece 15 is in the top bit (15) of
word b.

For one block and one word, the [N, 16] lanes of all output channels are contiguous: 64 bytes an output channel, 512
bytes a warp's load.

Pieces after the last whole block are stored in as many words as needed, in the same way. If only one or two are left
for the last word, it is a short one, 16 bits a lane: the low byte holds the contents of the low half, the high byte
those of the high half. So 576 channels take 224 bytes at 3 bits and 288 at 4, as close to their codes alone, 216 and
288, as whole lanes allow.

Of a trellis (`models.trellis`), a lane's half holds 16 channels of a block that follow each other: half `h` of lane `l`
has the block's channels 16 (2 l + h) and up, rotated, of which the first is in piece 0, the next in piece 1. So the
stream of a row lies in the words as it is, 16 bits of it in a half, and a piece's states are windows at the same bits
of all lanes; those of its last pieces end in the next lane's first word. After the last whole block, with P pieces
left, a half holds P channels, and behind them the bits of the next ones that its states need. Activations are put into
that order where they are rotated (`runtime.backends.triton.kernels.activations`).

Codes of 8 bits are signed bytes, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from models import trellis
from models.packed import PackedLinear
from models.packing import RUN, packed_width
from models.trellis import STATE_BITS
from runtime.backends.triton.sizes import BLOCK, BYTE, LANES, PIECE, WORDS, code_words, pieces, tail_words
from runtime.errors import BackendError

SPARE_PIECE = 15
"""The piece of a block whose bits are in the top bits of the three words, at 3 bits."""
_VALUES = 4 << 20
"""Codes unpacked at a time, 4 bytes each: with what is made of them, some 64 MB of the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinear:
    """A low-bit matrix on the device: uniform groups, one codebook an output channel, a trellis, or bytes.

    Source: design decision on formats; QDEC §5.1 for the two kinds of quantizers (AWQ, SqueezeLLM).
    """

    name: str  # For example `layers.3.qkv`
    shape: tuple[int, int]  # (N, K)
    bits: int  # 3 or 4, of a trellis also 2, and 8
    group_size: int  # Input channels that share a scale, a multiple of 32; 0 if all of an output channel do
    codes: torch.Tensor
    """int32 [words]: [K // 512, bits, N, 16], followed by the rest of K, [whole words, N, 16] and, 16 bits each, [short
    word, N, 16]; see the module. At 8 bits int8 [N, K]."""
    groups: torch.Tensor | None
    """int32 [G, N]: the scale, a half, in the low half of a word, and -(2^bits + zero), a half, in the high one, of
    uniform groups; with `minimums` the minimum is in the high one. At 8 bits float16 [G, N], scales. None else."""
    codebook: torch.Tensor | None  # float16 [N, 2^bits], the values of codes; None without
    scales: torch.Tensor | None = None  # float16 [N] of a trellis; None else
    bias: torch.Tensor | None  # float32 [N] or None
    other_tail: int = 0
    """The `tail` of other matrices of the model, used if this one has none, so that they share kernels."""
    minimums: bool = False
    """Whether groups have minimums instead of zero-points."""

    @property
    def tail(self) -> int:
        """Pieces of 32 input channels after the last whole block, or those of other matrices."""
        return pieces(self.shape[1]) % (BLOCK // PIECE) or self.other_tail

    @property
    def trellis(self) -> bool:
        return self.scales is not None

    @property
    def kind(self) -> Literal["uniform", "minimums", "codebook", "trellis"]:
        if self.trellis or self.codebook is not None:
            return "trellis" if self.trellis else "codebook"
        return "minimums" if self.minimums else "uniform"

    @property
    def width(self) -> int:
        """Activations of a row that a product reads: K, or those that a trellis's are rotated to."""
        return PIECE * pieces(self.shape[1]) if self.trellis else self.shape[1]

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.groups, self.codebook, self.scales, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def repack(packed: PackedLinear, device: torch.device | str) -> GpuLinear:
    """Copy a stored matrix to the device in the kernels' layout.

    The words are made on the device: a card moves the bits of a model of 8 billion weights faster than they arrive, and
    one thread of numpy takes 20 to 30 seconds for them.

    Args:
        packed: Codes in canonical packing, uniform or with codebooks, whose entries become half precision values; those
            of W4A8 are `runtime.backends.triton.kernels.w4a8.repack_w4a8`'s.
        device: The destination.

    Raises:
        BackendError: unsupported bits, group size or shape.
    """
    if packed.bits == BYTE and packed.zeros is None and not packed.floats_8:
        return _bytes(packed, device)
    (N, K), bits, group_size = packed.shape, packed.bits, 0
    groups = book = scales = None
    if packed.trellis:
        scales = packed.scales.reshape(N)
    elif packed.codebook is not None:
        if packed.codebook.shape != (N, 1 << bits):
            raise BackendError(
                f"{packed.name}: the codebook is {packed.codebook.shape}; {N} output channels need 2^{bits} values each"
            )
        book = (packed.codebook.astype(np.float32) * packed.scales.astype(np.float32)).astype(np.float16)
    else:
        group_size = packed.group_size
        if packed.group_minimums is not None or packed.floats or packed.floats_8:
            raise BackendError(f"{packed.name}: there are no GPU kernels for Q4_K, Q6_K, MXFP4 and FP8 as they are")
        if group_size <= 0 or group_size % PIECE:
            raise BackendError(
                f"{packed.name}: groups of {group_size} channels; the GPU takes multiples of {PIECE}: "
                "quantize the model again with --group-size 128"
            )
        factors = np.ascontiguousarray(packed.scales.T).astype(np.float16, copy=False).view(np.uint16)
        if packed.minimums is None:
            assert packed.zeros is not None
            offset = (-(float(1 << bits) + packed.zeros.T.astype(np.float32))).astype(np.float16).view(np.uint16)
        else:
            offset = np.ascontiguousarray(packed.minimums.T).view(np.uint16)
        groups = (factors.astype(np.uint32) | offset.astype(np.uint32) << np.uint32(16)).view(np.int32)
    if bits not in WORDS or (bits == 2 and not packed.trellis):
        raise BackendError(f"{packed.name} has {bits} bits; the GPU computes with 3 and 4, with 2 those of a trellis")
    if min(N, K) < 1 or packed.codes.shape != (N, packed_width(K, bits)):
        raise BackendError(f"{packed.name}: codes of shape {packed.codes.shape} don't belong to a matrix of {N} by {K}")
    if code_words(packed.shape, bits, trellis=packed.trellis) >= 1 << 31:
        raise BackendError(f"{packed.name}: {N} by {K} is more than the kernels can address")
    return GpuLinear(
        name=packed.name,
        shape=packed.shape,
        bits=bits,
        group_size=group_size,
        codes=(_repack_streams if packed.trellis else _repack_codes)(packed, device),
        groups=_moved(groups, np.int32, device),
        codebook=_moved(book, np.float16, device),
        scales=_moved(scales, np.float16, device),
        bias=_moved(packed.bias, np.float32, device),
        minimums=packed.minimums is not None,
    )


def _bytes(packed: PackedLinear, device: torch.device | str) -> GpuLinear:
    """A matrix of 8 bits whose zero-points are 128."""
    codes = np.ascontiguousarray(packed.codes).view(np.uint8) ^ np.uint8(128)
    return GpuLinear(
        name=packed.name,
        shape=packed.shape,
        bits=packed.bits,
        group_size=packed.group_size,
        codes=torch.from_numpy(codes.view(np.int8)).to(device),
        groups=_moved(packed.scales.T, np.float16, device),
        codebook=None,
        bias=_moved(packed.bias, np.float32, device),
    )


def _moved(array: npt.NDArray[Any] | None, kind: type, device: torch.device | str) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(np.array(array, kind, order="C")).to(device)


def _repack_codes(packed: PackedLinear, device: torch.device | str) -> torch.Tensor:
    """The words of `GpuLinear.codes`, made on the device."""
    bits, each = packed.bits, 16 // packed.bits
    result = torch.empty(code_words(packed.shape, bits), dtype=torch.int32, device=device)
    inside, tail, short = parts_of(result, packed.shape, bits)
    for start, stop, values in unpacked_rows(packed.codes, bits, device):
        padded = torch.nn.functional.pad(values, (0, 0, 0, -values.shape[1] % (BLOCK // PIECE)))
        pairs = (padded[..., 0::2] | padded[..., 1::2] << 16).view(stop - start, -1, BLOCK // PIECE, LANES)
        words = torch.zeros(*pairs.shape[:2], WORDS[bits], LANES, dtype=torch.int32, device=device)
        for piece in range(each * WORDS[bits]):
            words[:, :, piece // each] |= pairs[:, :, piece] << bits * (piece % each)
        if bits == 3:
            for bit in range(3):
                words[:, :, bit] |= (pairs[:, :, SPARE_PIECE] >> bit & 0x00010001) << 15
        # [R, block, word, l // 2 % 2, l // 4, l % 2] -> [block, word, R, l // 4, l // 2 % 2, l % 2]
        lanes = words.view(*words.shape[:3], 2, 4, 2).permute(1, 2, 0, 4, 3, 5).flatten(3)
        inside[:, :, start:stop] = lanes[: len(inside)]
        if len(lanes) > len(inside):
            tail[:, start:stop] = lanes[-1, : len(tail)]
            for word in lanes[-1, len(tail) : len(tail) + len(short)]:
                short[0, start:stop] = (word & 0xFF | word >> 8 & 0xFF00).to(torch.int16)
    return result


def _repack_streams(packed: PackedLinear, device: torch.device | str) -> torch.Tensor:
    """The words of `GpuLinear.codes` of a trellis."""
    (N, K), bits = packed.shape, packed.bits
    blocks, left = divmod(pieces(K), BLOCK // PIECE)
    streams = np.ascontiguousarray(packed.codes.astype("<i4", copy=False))
    inside, rest = streams[:, : blocks * LANES * bits], streams[:, blocks * LANES * bits :]
    # [N, block, lane, half, word] -> [block, word, N, lane, half], 16 bits each
    parts = [inside.view("<u2").reshape(N, blocks, LANES, 2, bits).transpose(1, 4, 0, 2, 3).reshape(-1)]
    if left:
        codes = trellis.unpack(rest, bits).astype(np.uint64)
        words, _ = tail_words(bits, left, trellis=True)
        held = np.zeros((N, codes.shape[1] + STATE_BITS), np.uint64)
        held[:, : codes.shape[1]] = codes
        strings = np.zeros((N, 2 * LANES), np.uint64)
        for code in range(min(left + -(-STATE_BITS // bits), 64 // bits)):
            strings |= held[:, code : code + codes.shape[1] : left] << np.uint64(bits * code)
        halves = strings.astype("<u8").view("<u2").reshape(N, LANES, 2, 4)[..., :words]
        parts.append(halves.transpose(3, 0, 1, 2).reshape(-1))
    return torch.from_numpy(np.concatenate(parts).view("<i4").astype(np.int32, copy=False)).to(device)


def parts_of(words: torch.Tensor, shape: tuple[int, int], bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of `GpuLinear.codes`: int32 [blocks, words, N, 16], int32 [words, N, 16] and int16 [0 or 1, N, 16]."""
    N, K = shape
    blocks, left = divmod(pieces(K), BLOCK // PIECE)
    whole, short = tail_words(bits, left)
    first, second = blocks * WORDS[bits] * N * LANES, (blocks * WORDS[bits] + whole) * N * LANES
    inside, tail = words[:first].view(blocks, WORDS[bits], N, LANES), words[first:second].view(whole, N, LANES)
    return inside, tail, words[second:].view(torch.int16).view(short, N, LANES)


def unpacked_rows(
    codes: npt.NDArray[np.int32], bits: int, device: torch.device | str
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Unpack rows of codes [N, ceil(K / 32) * bits], canonical packing of 3 or 4 bits, on the device, some at a time.

    Yields:
        The first row, the one behind the last, and their codes, int32 [rows, ceil(K / 32), 32]; 0 from K on.
    """

    def steps(count: int, step: int) -> torch.Tensor:
        return step * torch.arange(count, dtype=torch.int32, device=device)

    N, runs = codes.shape[0], codes.shape[1] // bits
    rows = max(1, _VALUES // (runs * RUN))
    for start in range(0, N, rows):
        words = torch.from_numpy(np.array(codes[start : start + rows])).to(device).view(-1, runs, bits)
        if bits == 4:
            values = (words[..., None] >> steps(8, 4) & 15).flatten(2)
        else:
            low = (words[..., :2, None] >> steps(16, 2) & 3).flatten(2)
            values = low | (words[..., 2:] >> steps(32, 1) & 1) << 2
        yield start, start + len(words), values
