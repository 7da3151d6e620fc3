"""A block's low-bit linear layers as the streams run through them: restored once for a block, not for each batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from models import per_token
from models.packed import PackedLinear, PackedResidual, rows_of
from models.packing import RUN
from models.quantizers.dequantize import dequantize, dequantize_residual
from models.quantizers.rows import CHUNK
from models.salience import without_salient
from models.threads import each


class LoweredLinear:
    """A low-bit linear layer with its weights restored where a product asks for them.

    Args:
        linear: The layer.
        dtype: Of the operands of products.
    """

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
        """Let go of what was restored."""
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
