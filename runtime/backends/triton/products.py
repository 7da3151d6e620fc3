"""Base product of a linear layer, and its compensation beside it."""

from __future__ import annotations

import torch

from runtime.backends.triton.buffers import Buffers, Value
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate
from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.kernels.gemv import ROWS, few_rows
from runtime.backends.triton.kernels.w4a8 import gemm_w4a8
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.model import Linear
from runtime.backends.triton.w4a8_layout import W4A8Linear


def product(linear: Linear, x: Value, out: torch.Tensor, buffers: Buffers) -> None:
    """The base product.

    Args:
        linear: The layer.
        x: float16 [M, K], with the sums of its pieces if known; or its INT8 tokens.
        out: float32 [M, N]; overwritten.
        buffers: For the workspace.
    """
    if isinstance(linear.weight, W4A8Linear):
        assert x.rounded is not None
        gemm_w4a8(x.rounded, linear.weight, out, buffers.main)
        return
    assert isinstance(linear.weight, GpuLinear)
    if x.tensor.shape[0] <= ROWS:
        few_rows(x.tensor, linear.weight, out, buffers.main, sums=x.sums)
    else:
        gemm(x.tensor, linear.weight, out, buffers.main)


def compensated_product(
    linear: Linear,
    x: Value,
    positions: torch.Tensor,
    out: torch.Tensor,
    dec: torch.Tensor | None,
    buffers: Buffers,
    side: torch.cuda.Stream | None,
    *,
    copied: torch.Tensor | None = None,
) -> None:
    """The base product, and concurrently its compensation on another stream; the current stream waits for both.

    The bits do not depend on where the two are added: each output is one sum of the two.

    Args:
        linear: The layer, with residual and selection.
        x: As in `product`.
        positions: int32 [M].
        out: float32 [M, N], receives the base product.
        dec: float32 [M, N], receives the compensation; None adds it to `out`, after the product.
        buffers: Workspaces and the flag.
        side: Stream of the compensation; None runs it before the product.
        copied: As in `LaunchConfig`.
    """
    assert linear.selection is not None
    assert linear.residual is not None
    selection, residual, rest = linear.selection, linear.residual, {"flag": buffers.flag, "positions": positions}
    if dec is None:
        product(linear, x, out, buffers)
        config, output = LaunchConfig(n_tb=linear.n_tb, fused=False, copied=copied), Output(out, out)
        compensate(x.tensor, selection, residual, output, config, buffers.main, **rest)
        return
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # first, so that its blocks find room before the product occupies the device
        compensate(
            x.tensor,
            selection,
            residual,
            Output(dec),
            LaunchConfig(n_tb=linear.n_tb, fused=buffers.alone is None and x.tensor.shape[0] == 1, copied=copied),
            buffers.side,
            **rest,
        )
    product(linear, x, out, buffers)
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
