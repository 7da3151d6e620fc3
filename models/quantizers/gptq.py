"""GPTQ: round-to-nearest whose errors are handed on to the channels that are still to be rounded.

Channels are rounded one after the other, those with the largest mean square activation first. What rounding a channel
does to the layer's output is made up for, as far as the inputs are correlated, by moving the weights of the channels
that follow: with U the upper Cholesky factor of the inverse of the damped Hessian H = E[x xᵀ], the error of channel j
divided by U[j, j] is taken off along row j of U. Scales and zero-points are those of a clip search on the original
weights, found before (static groups), so groups stay contiguous whatever the order.

Source: Frantar et al. 2023 (OPTQ), §3: Cholesky form (step 3), lazy batches (step 2), order by activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.quantizers import rtn
from models.quantizers.groups import FloatArray, GroupCodes
from models.quantizers.rows import each_chunk

if TYPE_CHECKING:
    import torch

DAMPING = 0.01
"""Added to the diagonal of H, in units of its mean."""
_BLOCK = 128
"""Channels whose errors are handed on to all that follow in one matrix product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """How errors are handed on: what `quantize` needs of a layer's inputs."""

    order: npt.NDArray[np.intp]
    """[K]: the channels in the order in which they are rounded."""
    factor: FloatArray
    """float32 [K, K], upper triangular, in that order: U with Uᵀ U = (H + damping)⁻¹."""


def feedback(hessian: FloatArray) -> Feedback:
    """Prepare for a layer.

    Args:
        hessian: float32 [K, K], sum or mean of x xᵀ over calibration tokens; any positive multiple gives the same.

    Raises:
        QuantizationError: it holds NaN or infinity, or is not positive semidefinite.
    """
    import torch

    if not np.isfinite(hessian).all():
        raise QuantizationError("the calibration's activations are too large for their products to be summed up")
    diagonal = np.diag(hessian).astype(np.float64)
    order = np.argsort(-diagonal, kind="stable")
    mean = float(diagonal.mean()) or 1.0
    # U = J L⁻¹ J, with J the reversal of the order and L the lower Cholesky factor of the reversed, damped H. The
    # Hessian of a wide layer takes gigabytes, so one matrix in double precision is worked on in place.
    backwards = order[::-1].copy()
    work = torch.empty(len(order), len(order), dtype=torch.float64)
    for channel, source in enumerate(backwards):
        work[channel] = torch.from_numpy(hessian[source, backwards])
    work /= mean
    work.diagonal().add_(DAMPING)
    _, failed = torch.linalg.cholesky_ex(work.mT, out=(work.mT, torch.empty((), dtype=torch.int32)))
    if int(failed):
        raise QuantizationError("the second moments of the calibration's activations are not positive semidefinite")
    lower = work.mT
    _invert_lower(lower)
    return Feedback(order=order, factor=np.ascontiguousarray(lower.numpy()[::-1, ::-1], np.float32))


def _invert_lower(matrix: torch.Tensor) -> None:
    """Replace a lower triangular matrix by its inverse, block column by block column from the right."""
    import torch

    width = len(matrix)
    for start in reversed(range(0, width, _BLOCK)):
        inner, below = slice(start, min(start + _BLOCK, width)), slice(min(start + _BLOCK, width), width)
        unit = torch.eye(inner.stop - start, dtype=matrix.dtype)
        corner = torch.linalg.solve_triangular(matrix[inner, inner], unit, upper=False)
        matrix[below, inner] = -(matrix[below, below] @ (matrix[below, inner] @ corner))
        matrix[inner, inner] = corner


def quantize(
    weight: FloatArray, bits: int, group_size: int, handed: Feedback, start: GroupCodes | None = None
) -> GroupCodes:
    """Quantize a matrix in groups along its input channels.

    Args:
        weight: float32 [N, K].
        bits: Width of a code, 2 to 8.
        group_size: Input channels that share a scale.
        handed: From `feedback`.
        start: Has the scales and zero-points to use; those of round-to-nearest's clip search if None.

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    if start is None:
        start = rtn.quantize(weight, bits, group_size)
    codes = np.empty_like(start.codes)

    def work(rows: slice) -> None:
        # Channels as rows, in the order of rounding: a channel is then contiguous.
        left = np.ascontiguousarray(weight[rows].T[handed.order])
        groups = handed.order // group_size
        scales = start.scales[rows].astype(np.float32).T
        zeros = start.zeros[rows].astype(np.float32).T
        for first in range(0, len(left), _BLOCK):
            last = min(first + _BLOCK, len(left))
            errors = np.empty_like(left[first:last])
            for j in range(first, last):
                scale, zero = scales[groups[j]], zeros[groups[j]]
                code = np.clip(np.rint(left[j] / scale) + zero, 0, 2**bits - 1)
                codes[rows, handed.order[j]] = code
                error = (left[j] - (code - zero) * scale) / handed.factor[j, j]
                errors[j - first] = error
                left[j + 1 : last] -= handed.factor[j, j + 1 : last, None] * error
            left[last:] -= handed.factor[first:last, last:].T @ errors

    each_chunk(weight.shape[0], weight.shape[1], work)
    return GroupCodes(codes=codes, scales=start.scales, zeros=start.zeros, group_size=group_size)
