"""Rows of a stored matrix, as the codes of uniform groups or as restored weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from models.families.family import Family
from models.packed import PackedLinear
from models.packing import RUN, unpack
from models.quantizers.dequantize import dequantize, dequantize_residual
from models.quantizers.groups import FloatArray, GroupCodes
from models.spec import ModelSpec

_PIECE = 1 << 22
"""Number of weights restored at a time."""


def pieces(linear: PackedLinear) -> Iterator[slice]:
    """Ranges of rows that make up a matrix; all but the last are whole runs of the residual's packing."""
    rows, width = linear.shape
    step = max(RUN, _PIECE // width // RUN * RUN)
    yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def restored(linear: PackedLinear, residuals: bool) -> FloatArray:
    """Weights of a matrix, or of `rows_of` it: float32 [N, K].

    Args:
        linear: The matrix.
        residuals: Whether its residuals are added.
    """
    weight = dequantize(linear)
    if residuals and linear.residual is not None:
        weight += dequantize_residual(linear.residual, linear.shape).T
    return weight


def uniform_groups(linear: PackedLinear) -> GroupCodes | None:
    """Codes, scales and zero-points of a matrix; None where it has a codebook.

    Both levels of progressive scales are multiplied, and rounded to half precision.
    """
    if linear.codebook is not None:
        return None
    assert linear.zeros is not None
    scales = linear.scales
    if linear.group_scales is not None:
        scales = (linear.group_scales * linear.scales.astype(np.float32)).astype(np.float16)
    codes = unpack(linear.codes, linear.bits, linear.shape[1])
    return GroupCodes(codes=codes, scales=scales, zeros=linear.zeros, group_size=linear.group_size)


def parts(spec: ModelSpec, family: Family, kind: str) -> list[tuple[str, slice]]:
    """Modules of a checkpoint of this family that make up a fused matrix, with their rows of it.

    Args:
        spec: The architecture.
        family: The model's family.
        kind: `qkv`, `o`, `gate_up` or `down`.
    """
    modules = family.linear_sources[kind]
    widths = [spec.linear_shape(kind)[0]]
    if len(modules) > 1:
        widths = {"qkv": [spec.q_width, spec.kv_width, spec.kv_width], "gate_up": [spec.intermediate_size] * 2}[kind]
    ends = np.cumsum(widths).tolist()
    return [(module, slice(end - width, end)) for module, width, end in zip(modules, widths, ends, strict=True)]
