"""Stored matrices as float32, or as codes of uniform groups: for exports, references, tests and measurements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from models import trellis
from models.families.family import Family
from models.packed import E4M3_STEPS, HALF_STEPS, PackedLinear, PackedResidual
from models.packing import RUN, unpack
from models.quantizers.groups import FloatArray, GroupCodes
from models.spec import ModelSpec


def dequantize(linear: PackedLinear) -> npt.NDArray[np.float32]:
    """Ŵ of a stored linear layer, float32 [N, K]."""
    width = linear.shape[1]
    if linear.trellis:
        return trellis.dequantize(linear.codes, linear.scales, linear.bits, width)
    codes = unpack(linear.codes, linear.bits, width)
    if linear.codebook is not None:
        values = linear.codebook.astype(np.float32) * linear.scales.astype(np.float32)
        return np.take_along_axis(values, codes.astype(np.intp), axis=1)
    if linear.zeros is None:
        return _kept(linear, codes)
    scales: npt.NDArray[Any] = linear.scales if linear.group_scales is None else linear.group_scales
    weight = GroupCodes(codes=codes, scales=scales, zeros=linear.zeros, group_size=linear.group_size).dequantize()
    if linear.group_scales is not None:
        weight *= linear.scales.astype(np.float32)
    return weight


def _kept(linear: PackedLinear, codes: npt.NDArray[np.uint8]) -> FloatArray:
    """Ŵ of a matrix without zero-points, as the `gguf` package or `models.low_bit_source` computes it, bit for bit."""
    scales, minimums = linear.factors
    if linear.floats:
        weight = HALF_STEPS[codes].astype(np.float32)
    elif linear.floats_8:
        weight = E4M3_STEPS[codes].astype(np.float32)
    else:
        weight = codes.astype(np.float32) if minimums is not None else codes.astype(np.float32) - np.float32(128)
    groups = weight.reshape(len(weight), -1, linear.group_size)
    groups *= scales[..., None]
    if minimums is not None:
        groups += minimums[..., None]
    return weight


def dequantize_residual(residual: PackedResidual, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """R of a stored linear layer of the given shape (N, K), float32 [K, N] (input-channel-major, as stored)."""
    if residual.scales is None:
        return residual.codes.astype(np.float32)
    codes = unpack(residual.codes.view(np.int32), residual.bits, shape[0]).astype(np.float32)
    codes -= 2 ** (residual.bits - 1)
    codes *= residual.scales.astype(np.float32)
    return codes


_PIECE = 1 << 22
"""Number of weights restored at a time."""


def pieces(linear: PackedLinear) -> Iterator[slice]:
    """Ranges of rows that make up a matrix; all but the last are whole runs of the residual's packing."""
    rows, width = linear.shape
    step = max(RUN, _PIECE // width // RUN * RUN)
    yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def restored(linear: PackedLinear, residuals: bool) -> FloatArray:
    """Weights of a matrix, or of `rows_of` it: float32 [N, K]."""
    weight = dequantize(linear)
    if residuals and linear.residual is not None:
        weight += dequantize_residual(linear.residual, linear.shape).T
    return weight


def uniform_groups(linear: PackedLinear) -> GroupCodes | None:
    """Codes, scales and zero-points of a matrix; None where its codes are not uniform.

    Both levels of progressive scales are multiplied, and rounded to half precision.
    """
    if linear.zeros is None:
        return None
    scales = linear.scales
    if linear.group_scales is not None:
        scales = (linear.group_scales * linear.scales.astype(np.float32)).astype(np.float16)
    codes = unpack(linear.codes, linear.bits, linear.shape[1])
    return GroupCodes(codes=codes, scales=scales, zeros=linear.zeros, group_size=linear.group_size)


def parts(spec: ModelSpec, family: Family, kind: str) -> list[tuple[str, slice]]:
    """Modules of a checkpoint of this family that make up a fused matrix, with their rows of it."""
    modules = family.linear_sources[kind]
    widths = [spec.linear_shape(kind)[0]]
    if len(modules) > 1:
        widths = {
            "qkv": [spec.q_width, spec.kv_width, spec.kv_width],
            "gate_up": [spec.intermediate_size] * spec.mlp_parts,
        }[kind]
    ends = np.cumsum(widths).tolist()
    return [(module, slice(end - width, end)) for module, width, end in zip(modules, widths, ends, strict=True)]
