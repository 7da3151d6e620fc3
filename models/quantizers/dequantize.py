"""Stored matrices as float32: for references, tests, inspection and measurements while a model is quantized."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear, PackedResidual
from models.packing import unpack
from models.quantizers.groups import GroupCodes


def dequantize(linear: PackedLinear) -> npt.NDArray[np.float32]:
    """Ŵ of a stored linear layer, float32 [N, K]."""
    width = linear.shape[1]
    codes = unpack(linear.codes, linear.bits, width)
    if linear.codebook is not None:
        values = linear.codebook.astype(np.float32) * linear.scales.astype(np.float32)
        return np.take_along_axis(values, codes.astype(np.intp), axis=1)
    assert linear.zeros is not None
    scales: npt.NDArray[Any] = linear.scales if linear.group_scales is None else linear.group_scales
    weight = GroupCodes(codes=codes, scales=scales, zeros=linear.zeros, group_size=linear.group_size).dequantize()
    if linear.group_scales is not None:
        weight *= linear.scales.astype(np.float32)
    return weight


def dequantize_residual(residual: PackedResidual, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """R of a stored linear layer of the given shape (N, K), float32 [K, N] (input-channel-major, as stored)."""
    if residual.scales is None:
        return residual.codes.astype(np.float32)
    codes = unpack(residual.codes.view(np.int32), residual.bits, shape[0]).astype(np.float32)
    codes -= 2 ** (residual.bits - 1)
    codes *= residual.scales.astype(np.float32)
    return codes
