"""A block's low-bit linear layers as the streams run through them: restored once for a block, not for each batch.

Where the processor has instructions for bfloat16, products are in it, several times as fast, and summed in float32.
That is precise enough for input statistics, for the losses of layer types and for the perplexities that `quantize`
shows: it moves SmolLM2's from 20.09 to 20.10. Weights and the results of `eval` are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch

from models import per_token
from models.packed import PackedLinear, PackedResidual, rows_of
from models.packing import RUN
from models.quantize.calibration import without_salient
from models.quantizers.dequantize import dequantize, dequantize_residual
from models.spec import LAYER_TYPES, ModelSpec
from models.threads import CHUNK, each

SMALL = 1 << 20
"""Weights of a block below which products stay in float32: they are not what takes the time."""


@contextmanager
def fast_products(spec: ModelSpec) -> Iterator[None]:
    """Allow torch to multiply float32 matrices in bfloat16 within the context, unless the model is small."""
    if _small(spec):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def products(spec: ModelSpec) -> torch.dtype:
    """The dtype of the operands of a block's linear layers: weights are converted once, not for each product."""
    return torch.float32 if _small(spec) or not _has_bfloat16() else torch.bfloat16


def _small(spec: ModelSpec) -> bool:
    return sum(math.prod(spec.linear_shape(kind)) for kind in LAYER_TYPES) < SMALL


@cache
def _has_bfloat16() -> bool:
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(found.get("avx512_bf16"))


class LoweredLinear:
    """A low-bit linear layer with its weights restored where a product asks for them."""

    def __init__(self, linear: PackedLinear, dtype: torch.dtype) -> None:
        self.linear = linear
        self._dtype = dtype
        self._weight: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [..., N] of inputs float32 [..., K] without compensation."""
        if self._weight is None:
            self._weight = _weight(self.linear, self._dtype)
        bias = None if self.linear.bias is None else torch.from_numpy(self.linear.bias).to(self._dtype)
        seen = per_token.rounded(x) if self.linear.per_token else x
        return torch.nn.functional.linear(seen.to(self._dtype), self._weight, bias)

    def restored(self, x: torch.Tensor, k_chunk: int) -> torch.Tensor:
        """What compensation of so many salient channels per 1024 adds to the outputs, [..., N]; 0 without residuals."""
        if self.linear.residual is None:
            return x.new_zeros(())
        if self._residual is None:
            self._residual = _residual(self.linear.residual, self.linear.shape, self._dtype)
        return salient(x, k_chunk).to(self._dtype) @ self._residual

    def release(self) -> None:
        self._weight = self._residual = None


def salient(x: torch.Tensor, k_chunk: int) -> torch.Tensor:
    """Activations float32 [..., K] of which the salient ones alone are left."""
    rows = x.reshape(-1, x.shape[-1])
    return (rows - torch.from_numpy(without_salient(rows.numpy(), k_chunk))).view_as(x)


def _weight(linear: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
    """Ŵ [N, K]."""
    found = torch.empty(linear.shape, dtype=dtype)
    bare = replace(linear, residual=None)

    @torch.inference_mode()  # of each thread for itself
    def restore(rows: slice) -> None:
        found[rows].copy_(torch.from_numpy(dequantize(rows_of(bare, rows))))

    each(restore, _chunks(*linear.shape))
    return found


def _residual(residual: PackedResidual, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """R [K, N]."""
    found = torch.empty((shape[1], shape[0]), dtype=dtype)

    @torch.inference_mode()
    def restore(rows: slice) -> None:
        part = replace(residual, codes=residual.codes[rows])
        found[rows].copy_(torch.from_numpy(dequantize_residual(part, (shape[0], rows.stop - rows.start))))

    each(restore, _chunks(shape[1], shape[0]))
    return found


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(RUN, CHUNK // max(1, width) // RUN * RUN)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
