"""Matrices of integers in groups as other programs pack them: AWQ, GPTQ and compressed-tensors, read and written.

Every format keeps a weight as (code - zero) * scale, with groups along the input channels, and differs in the order of
its codes. With 4 bits:

- AWQ ("gemm"): `qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], eight neighbouring outputs a word, in the order
  0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up; `scales` float16 [G, N].
- GPTQ: `qweight` int32 [K / 8, N], eight neighbouring inputs a word; `qzeros` int32 [G, N / 8], each zero-point less
  one, or in the format's second version as it is; `scales` float16 [G, N]; `g_idx` int32 [K], the group of an input.
  Codes of 2, 3 and 8 bits follow each other in the words of 32 neighbours, lowest bit first.
- compressed-tensors ("pack-quantized"): `weight_packed` int32 [N, K / 8], eight neighbouring inputs a word;
  `weight_zero_point` int32 [N / 8, G], eight neighbouring outputs a word; `weight_scale` float16 [N, G];
  `weight_shape` int64 [2]. Codes and zero-points are signed numbers plus 8, which changes no difference; without
  zero-points they are 0, so 8. `weight_g_idx` int32 [K] is the group of an input where groups do not follow each other.

Here files are written with 4 bits only. Sources: the loaders of vLLM, vllm/model_executor/layers/quantization (awq,
gptq, compressed_tensors), and the packing of AutoGPTQ and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.quantizers.groups import GroupCodes

Array = npt.NDArray[Any]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_IN_ORDER = tuple(range(8))


def awq(groups: GroupCodes) -> dict[str, Array]:
    """Tensors of a module by their last names."""
    return {
        "qweight": _words(groups.codes.T, _AWQ_ORDER),
        "qzeros": _words(groups.zeros.T, _AWQ_ORDER),
        "scales": np.ascontiguousarray(groups.scales.T),
    }


def gptq(groups: GroupCodes, *, less_one: bool) -> dict[str, Array]:
    """Tensors of a module by their last names.

    Args:
        groups: The matrix.
        less_one: Whether zero-points are stored less one, which is possible if none is 0.
    """
    zeros = groups.zeros - np.uint8(less_one)
    return {
        "qweight": np.ascontiguousarray(_words(groups.codes, _IN_ORDER).T),
        "qzeros": _words(zeros.T, _IN_ORDER),
        "scales": np.ascontiguousarray(groups.scales.T),
        "g_idx": (np.arange(groups.codes.shape[1]) // groups.group_size).astype(np.int32),
    }


def compressed_tensors(groups: GroupCodes) -> dict[str, Array]:
    return {
        "weight_packed": _words(groups.codes, _IN_ORDER),
        "weight_zero_point": np.ascontiguousarray(_words(groups.zeros.T, _IN_ORDER).T),
        "weight_scale": groups.scales,
        "weight_shape": np.array(groups.codes.shape, np.int64),
    }


def _words(codes: npt.NDArray[np.uint8], order: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """Pack eight neighbouring codes of a row in a word: uint8 [R, L] -> int32 [R, L / 8].

    Args:
        codes: Below 16; L is a multiple of 8.
        order: Which of the eight is in each nibble, from the lowest up.
    """
    rows, length = codes.shape
    eights = codes.reshape(rows, length // 8, 8)
    octets = np.empty((rows, length // 8, 4), np.uint8)
    for place in range(4):
        octets[:, :, place] = eights[:, :, order[2 * place]] | eights[:, :, order[2 * place + 1]] << np.uint8(4)
    return octets.view("<i4")[:, :, 0].astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """A matrix of such integers."""

    codes: npt.NDArray[np.uint8]
    """[K, N]."""
    zeros: Array
    """Integers [G, N], at most 2^bits."""
    scales: Array
    """float32 [G, N]."""
    of: Array
    """[K], the group of an input."""

    def dequantize(self) -> npt.NDArray[np.float32]:
        """(codes - zeros) * scales, float32 [N, K].

        Raises:
            IndexError: an input's group is none.
        """
        found = self.codes.astype(np.float32)
        found -= self.zeros.astype(np.float32)[self.of]
        found *= self.scales[self.of]
        return found.T


def from_awq(parts: Mapping[str, Array]) -> Integers:
    """A matrix of its tensors, as `awq` gives them; scales are float32 already."""
    codes, zeros = (_codes(parts[name], 4, _AWQ_ORDER) for name in ("qweight", "qzeros"))
    of = np.arange(len(codes)) // (len(codes) // len(zeros))
    return Integers(codes=codes, zeros=zeros, scales=parts["scales"], of=of)


def from_gptq(parts: Mapping[str, Array], bits: int, *, less_one: bool) -> Integers:
    """A matrix of its tensors, as `gptq` gives them; scales are float32 already, and `g_idx` may lack.

    Raises:
        IndexError: `g_idx` has a negative group.
    """
    codes, scales = _codes(parts["qweight"].T, bits).T, parts["scales"]
    zeros = _codes(parts["qzeros"], bits)[:, : scales.shape[1]].astype(np.int16) + less_one
    of = parts.get("g_idx", np.arange(len(codes)) // -(-len(codes) // len(scales)))
    if np.any(of < 0):
        raise IndexError(f"the group {of.min()} of an input is negative")
    return Integers(codes=codes, zeros=zeros, scales=scales, of=of)


def from_compressed_tensors(parts: Mapping[str, Array], bits: int) -> Integers:
    """A matrix of its tensors, as `compressed_tensors` gives them; scales are float32 already."""
    codes, scales = _codes(parts["weight_packed"], bits), parts["weight_scale"]
    rows, width = codes.shape
    zeros: Array = np.full((1, 1), 1 << bits - 1, np.uint8)
    if "weight_zero_point" in parts:
        zeros = _codes(parts["weight_zero_point"].T, bits)[:, :rows].T
    of = parts.get("weight_g_idx")
    if of is None or np.any(of < 0):
        of = np.arange(width) // -(-width // scales.shape[1])
    return Integers(codes=codes.T, zeros=np.broadcast_to(zeros, scales.shape).T, scales=scales.T, of=of)


def _codes(words: Array, bits: int, order: tuple[int, ...] = _IN_ORDER) -> npt.NDArray[np.uint8]:
    """The codes of words: int32 [R, W] -> uint8 [R, 32 W / bits].

    Args:
        words: The words.
        bits: 2, 3, 4 or 8.
        order: Which of eight codes of 4 bits is in each nibble.
    """
    octets = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    if bits == 4:
        nibbles = np.stack((octets & np.uint8(15), octets >> np.uint8(4)), axis=-1).reshape(len(words), -1, 8)
        return nibbles[:, :, np.argsort(order)].reshape(len(words), -1)
    each = np.unpackbits(octets, axis=1, bitorder="little").reshape(len(words), -1, bits)
    return np.packbits(each, axis=-1, bitorder="little")[:, :, 0]
