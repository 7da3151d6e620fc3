"""The GPU's weight layout: codes in the order in which a thread loads its tensor core operands.

K is cut into pieces of 32 input channels, the last filled up with zeros, and 16 pieces are a block. A piece has 16
lanes that hold two channels each, one in the low and one in the high half of a 32-bit word. Piece `i`, lane `l`, half
`h` holds channel

    32 * i + 16 * (l // 2 % 2) + 4 * (l // 4) + 2 * (l % 2) + h

of the block: four neighbouring lanes, which one thread loads together as 128 bits, hold the channels 4q .. 4q + 3 and
16 + 4q .. 16 + 4q + 3 of a piece, and these are the operands of thread q of a quad in two `mma.m16n8k16`. Codes
therefore go from memory to the tensor core without a shuffle, in pairs: one AND-OR turns two codes of a word into two
halves of known exponent (`runtime.backends.triton.kernels.gemv`).

====  =====  =========================================================================================================
bits  words  where piece i lies, in both halves of a word alike ====  =====
========================================================================================================= 4     4 word i
// 4, bits 4 * (i % 4) and up 3     3      pieces 0 .. 14: word i // 5, bits 3 * (i % 5) and up; piece 15: its bit b in
the top bit (15) of word b ====  =====
=========================================================================================================

For one block and one word, the [N, 16] lanes of all output channels are contiguous: 64 bytes an output channel, 512
bytes a warp's load.

Pieces after the last whole block are stored in as many words as needed, in the same way. If only one or two are left
for the last word, it is a short one, 16 bits a lane: the low byte holds the contents of the low half, the high byte
those of the high half. So 576 channels take 224 bytes at 3 bits and 288 at 4, as close to their codes alone, 216 and
288, as whole lanes allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.packed import PackedLinear
from models.packing import packed_width, unpack
from runtime.backends.triton import on_card
from runtime.backends.triton.sizes import BLOCK, LANES, PIECE, WORDS, code_words, pieces, tail_words
from runtime.errors import BackendError

SPARE_PIECE = 15
"""The piece of a block whose bits are in the top bits of the three words, at 3 bits."""
ROWS_AT_ONCE = 128
"""Output channels repacked together: their words stay in the cache, which makes it several times as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinear:
    """A low-bit matrix on the device: uniform groups, or one codebook an output channel.

    Source: design decision on formats; QDEC §5.1 for the two kinds of quantizers (AWQ, SqueezeLLM).
    """

    name: str
    """For example `layers.3.qkv`."""
    shape: tuple[int, int]
    """(N, K)."""
    bits: int
    """3 or 4."""
    group_size: int
    """Input channels that share a scale, a multiple of 32; 0 with a codebook."""
    codes: torch.Tensor
    """int32 [words]: [K // 512, bits, N, 16], followed by the rest of K, [whole words, N, 16] and, 16 bits each, [short
    word, N, 16]; see the module."""
    groups: torch.Tensor | None
    """int32 [G, N]: the scale, a half, in the low half of a word, and -(2^bits + zero), a half, in the high one. None
    with a codebook."""
    codebook: torch.Tensor | None
    """float16 [N, 2^bits], the values of codes; None with uniform groups."""
    bias: torch.Tensor | None
    """float32 [N] or None."""
    other_tail: int = 0
    """The `tail` of other matrices of the model, used if this one has none, so that they share kernels."""

    @property
    def tail(self) -> int:
        """Pieces of 32 input channels after the last whole block, or those of other matrices."""
        return pieces(self.shape[1]) % (BLOCK // PIECE) or self.other_tail

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        parts = (self.codes, self.groups, self.codebook, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def repack(packed: PackedLinear, device: torch.device | str) -> GpuLinear:
    """Copy a stored matrix to the device in the kernels' layout.

    Args:
        packed: Codes in canonical packing, uniform or with codebooks, whose entries become half precision values; those
            of W4A8 are `runtime.backends.triton.w4a8_layout.repack_w4a8`'s.
        device: The destination.

    Raises:
        BackendError: unsupported bits, group size or shape.
    """
    if packed.codebook is not None:
        return repack_codebook(
            name=packed.name,
            shape=packed.shape,
            bits=packed.bits,
            codes=packed.codes,
            codebook=(packed.codebook.astype(np.float32) * packed.scales.astype(np.float32)).astype(np.float16),
            bias=packed.bias,
            device=device,
        )
    N, K = packed.shape
    assert packed.zeros is not None
    if packed.group_size <= 0 or packed.group_size % PIECE:
        raise BackendError(
            f"{packed.name}: groups of {packed.group_size} channels; the GPU takes multiples of {PIECE}: "
            "quantize the model again with --group-size 128"
        )
    scales = np.ascontiguousarray(packed.scales.T).astype(np.float16, copy=False).view(np.uint16)
    offset = (-(float(1 << packed.bits) + packed.zeros.T.astype(np.float32))).astype(np.float16).view(np.uint16)
    groups = scales.astype(np.uint32) | offset.astype(np.uint32) << np.uint32(16)
    return GpuLinear(
        name=packed.name,
        shape=(N, K),
        bits=packed.bits,
        group_size=packed.group_size,
        codes=_place_codes(packed.name, packed.shape, packed.bits, packed.codes, device),
        groups=_to_device(groups.view(np.int32), device),
        codebook=None,
        bias=None if packed.bias is None else _to_device(packed.bias.astype(np.float32), device),
    )


def repack_codebook(
    *,
    name: str,
    shape: tuple[int, int],
    bits: int,
    codes: npt.NDArray[np.int32],
    codebook: npt.NDArray[np.float16],
    bias: npt.NDArray[np.float32] | None,
    device: torch.device | str,
) -> GpuLinear:
    """Copy a matrix with one codebook per output channel to the device.

    Args:
        name: Name for messages, `layers.3.qkv`.
        shape: (N, K).
        bits: 3 or 4.
        codes: int32 [N, ceil(K / 32) * bits], indices in canonical packing.
        codebook: float16 [N, 2^bits].
        bias: float32 [N] or None.
        device: The destination.

    Raises:
        BackendError: unsupported bits or shapes.

    Source: SqueezeLLM's non-uniform quantization, QDEC §5.1.
    """
    if codebook.shape != (shape[0], 1 << bits):
        raise BackendError(
            f"{name}: the codebook is {codebook.shape}; {shape[0]} output channels need 2^{bits} values each"
        )
    return GpuLinear(
        name=name,
        shape=shape,
        bits=bits,
        group_size=0,
        codes=_place_codes(name, shape, bits, codes, device),
        groups=None,
        codebook=_to_device(codebook.astype(np.float16, copy=False), device),
        bias=None if bias is None else _to_device(bias.astype(np.float32), device),
    )


def dequantize(weight: GpuLinear) -> torch.Tensor:
    """Dequantize a matrix on the device.

    Returns:
        float32 [N, K] on the CPU.
    """
    K = weight.shape[1]
    codes = _read_codes(weight)
    if weight.codebook is not None:
        return weight.codebook.cpu().float().gather(1, codes.long())
    assert weight.groups is not None
    words = weight.groups.cpu().numpy().view(np.uint32)
    scales = (words & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
    offsets = (words >> np.uint32(16)).astype(np.uint16).view(np.float16).astype(np.float32)
    spread = [np.repeat(part.T, weight.group_size, axis=1)[:, :K] for part in (scales, offsets + (1 << weight.bits))]
    return (codes.float() + torch.from_numpy(spread[1])) * torch.from_numpy(spread[0])


def _to_device(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _place_codes(
    name: str, shape: tuple[int, int], bits: int, codes: npt.NDArray[np.int32], device: torch.device | str
) -> torch.Tensor:
    """Canonical packing [N, ceil(K / 32) * bits] -> int32 [words] on the device, as `GpuLinear.codes` says."""
    N, K = shape
    if bits not in WORDS:
        raise BackendError(f"{name} has {bits} bits; the GPU computes with 3 and 4")
    if min(N, K) < 1 or codes.shape != (N, packed_width(K, bits)):
        raise BackendError(f"{name}: codes of shape {codes.shape} don't belong to a matrix of {N} by {K}")
    if code_words(shape, bits) >= 1 << 31:
        raise BackendError(f"{name}: {N} by {K} is more than the kernels can address")
    if torch.device(device).type == "cpu":
        return torch.from_numpy(_repack_codes(shape, bits, codes))
    return repack_there(shape, bits, codes, device)


def repack_there(
    shape: tuple[int, int], bits: int, codes: npt.NDArray[np.int32], device: torch.device | str
) -> torch.Tensor:
    """The words of `GpuLinear.codes`, made on the device; arguments as they were checked."""
    (N, K), each = shape, 16 // bits
    result = torch.empty(code_words(shape, bits), dtype=torch.int32, device=device)
    blocks, left = divmod(pieces(K), BLOCK // PIECE)
    whole, short = tail_words(bits, left)
    first, second = blocks * WORDS[bits] * N * LANES, (blocks * WORDS[bits] + whole) * N * LANES
    inside, tail = result[:first].view(blocks, WORDS[bits], N, LANES), result[first:second].view(whole, N, LANES)
    shorts = result[second:].view(torch.int16).view(short, N, LANES)
    for start, stop, values in on_card.parts(codes, bits, device):
        padded = torch.nn.functional.pad(values, (0, 0, 0, -values.shape[1] % (BLOCK // PIECE)))
        pairs = (padded[..., 0::2] | padded[..., 1::2] << 16).view(stop - start, -1, BLOCK // PIECE, LANES)
        words = torch.zeros(*pairs.shape[:2], WORDS[bits], LANES, dtype=torch.int32, device=device)
        for piece in range(each * WORDS[bits]):
            words[:, :, piece // each] |= pairs[:, :, piece] << bits * (piece % each)
        if bits == 3:
            for bit in range(3):
                words[:, :, bit] |= (pairs[:, :, SPARE_PIECE] >> bit & 0x00010001) << 15
        lanes = words.view(*words.shape[:3], 2, 4, 2).permute(1, 2, 0, 4, 3, 5).flatten(3)
        inside[:, :, start:stop] = lanes[:blocks]
        if left:
            tail[:, start:stop] = lanes[blocks, :whole]
            if short:
                shorts[0, start:stop] = (lanes[blocks, whole] & 0xFF | lanes[blocks, whole] >> 8 & 0xFF00).to(
                    torch.int16
                )
    return result


def _repack_codes(shape: tuple[int, int], bits: int, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The same on the host."""
    N, K = shape
    result = np.empty(code_words(shape, bits), dtype=np.uint32)
    blocks, tail, short = _parts(result, shape, bits)
    for start in range(0, N, ROWS_AT_ONCE):
        rows = unpack(np.ascontiguousarray(codes[start : start + ROWS_AT_ONCE]), bits, K)
        stop, inside = start + rows.shape[0], blocks.shape[0] * BLOCK
        if inside:
            blocks[:, :, start:stop] = _interleave(rows[:, :inside], bits)
        if inside < K:
            words = _interleave(rows[:, inside:], bits)[0]
            tail[:, start:stop] = words[: tail.shape[0]]
            for word in words[tail.shape[0] : tail.shape[0] + short.shape[0]]:
                short[0, start:stop] = word & np.uint32(0xFF) | word >> np.uint32(8) & np.uint32(0xFF00)
    return result.view(np.int32)


def _parts(
    words: npt.NDArray[np.uint32], shape: tuple[int, int], bits: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """Views of `GpuLinear.codes`: uint32 [blocks, words, N, 16], uint32 [words, N, 16] and uint16 [0 or 1, N, 16]."""
    N, K = shape
    blocks, left = divmod(pieces(K), BLOCK // PIECE)
    whole, short = tail_words(bits, left)
    first, second = blocks * WORDS[bits] * N * LANES, (blocks * WORDS[bits] + whole) * N * LANES
    return (
        words[:first].reshape(blocks, WORDS[bits], N, LANES),
        words[first:second].reshape(whole, N, LANES),
        words[second:].view(np.uint16).reshape(short, N, LANES),
    )


def _interleave(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """Codes uint8 [R, K] -> words uint32 [blocks, words, R, 16], the last block padded with zeros."""
    rows, K = codes.shape
    blocks = -(-K // BLOCK)
    codes = np.ascontiguousarray(np.pad(codes, ((0, 0), (0, blocks * BLOCK - K))))
    bytes_of_pairs = codes.view("<u2").reshape(rows, blocks, BLOCK // PIECE, LANES).astype(np.uint32)
    pairs = bytes_of_pairs & np.uint32(0xFF) | bytes_of_pairs >> np.uint32(8) << np.uint32(16)
    words = np.zeros((rows, blocks, WORDS[bits], LANES), dtype=np.uint32)
    each = 16 // bits
    for piece in range(each * WORDS[bits]):
        words[:, :, piece // each] |= pairs[:, :, piece] << np.uint32(bits * (piece % each))
    if bits == 3:
        for bit in range(3):
            words[:, :, bit] |= (pairs[:, :, SPARE_PIECE] >> np.uint32(bit) & np.uint32(0x00010001)) << np.uint32(15)
    # [R, block, word, l // 2 % 2, l // 4, l % 2] -> [block, word, R, l // 4, l // 2 % 2, l % 2]
    lanes = words.reshape(rows, blocks, WORDS[bits], 2, 4, 2).transpose(1, 2, 0, 4, 3, 5)
    return lanes.reshape(blocks, WORDS[bits], rows, LANES)


def _read_codes(weight: GpuLinear) -> torch.Tensor:
    """Undo the order of codes. Returns uint8 [N, K]."""
    (rows, K), bits = weight.shape, weight.bits
    inside, tail, short = _parts(weight.codes.cpu().numpy().view(np.uint32), weight.shape, bits)
    blocks = -(-K // BLOCK)
    words = np.zeros((blocks, WORDS[bits], rows, LANES), dtype=np.uint32)
    words[: inside.shape[0]] = inside
    words[inside.shape[0] :, : tail.shape[0]] = tail
    for word in short.astype(np.uint32):
        words[-1, tail.shape[0]] = word & np.uint32(0xFF) | (word & np.uint32(0xFF00)) << np.uint32(8)
    halves = np.stack((words & np.uint32(0xFFFF), words >> np.uint32(16)), axis=-1).astype(np.uint16)
    codes = np.empty((blocks, BLOCK // PIECE, rows, LANES, 2), dtype=np.uint8)
    each = 16 // bits
    for piece in range(each * WORDS[bits]):
        codes[:, piece] = halves[:, piece // each] >> np.uint16(bits * (piece % each)) & np.uint16((1 << bits) - 1)
    if bits == 3:
        top = halves >> np.uint16(15)
        codes[:, SPARE_PIECE] = top[:, 0] | top[:, 1] << np.uint16(1) | top[:, 2] << np.uint16(2)
    natural = codes.reshape(blocks, BLOCK // PIECE, rows, 4, 2, 2, 2).transpose(2, 0, 1, 4, 3, 5, 6)
    return torch.from_numpy(natural.reshape(rows, blocks * BLOCK)[:, :K].copy())
