"""Packings of 4-bit groups in the folders that vLLM and SGLang read.

Every format keeps a weight as (code - zero) * scale, with groups along the input channels, and differs in the order of
its nibbles:

- AWQ ("gemm"): `qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], eight neighbouring outputs a word, in the order
  0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up; `scales` float16 [G, N].
- GPTQ: `qweight` int32 [K / 8, N], eight neighbouring inputs a word; `qzeros` int32 [G, N / 8], each zero-point less
  one, or in the format's second version as it is; `scales` float16 [G, N]; `g_idx` int32 [K], the group of an input.
- compressed-tensors ("pack-quantized"): `weight_packed` int32 [N, K / 8], eight neighbouring inputs a word;
  `weight_zero_point` int32 [N / 8, G], eight neighbouring outputs a word; `weight_scale` float16 [N, G];
  `weight_shape` int64 [2]. Codes and zero-points are signed numbers plus 8, which changes no difference.

Source: the loaders of vLLM, vllm/model_executor/layers/quantization (awq, gptq, compressed_tensors).
"""

from __future__ import annotations

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
    """Tensors of a module by their last names."""
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
