"""GPTQ: round-to-nearest with error feedback to the channels that are not yet rounded.

Channels are rounded one after the other, those with the largest second moment first. What rounding a channel does to
the layer's output is made up for, as far as the inputs are correlated, by moving the weights of the channels that
follow: with U the upper Cholesky factor of the inverse of the damped Hessian H, the error e of channel j divided by
U[j, j] is taken off along row j of U. What is left of the output error is the sum of (e / U[j, j])², so scales and
zero-points, which are found before (static groups, contiguous whatever the order), are those of the clip search with
1 / U[j, j]² as importance.

Source: Frantar et al. 2023 (OPTQ), §3: Cholesky form (step 3), lazy batches (step 2), order by activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.quantizers.groups import FloatArray, GroupCodes, search, stored
from models.threads import each_chunk

if TYPE_CHECKING:
    import torch

DAMPING = 0.5
"""Added to the diagonal of H, in units of its mean. The usual 0.01 overfits a few thousand tokens: on other text, the
errors of compensated SmolLM2 layers were 2 % above those of plain rounding, but 7 % below with 0.5."""
_INVERTED = 128
"""Number of channels inverted together."""
_GATHERED = 256
"""Rows of the Hessian put into order together."""
_FEEDBACK_BLOCK = 64
"""Number of channels whose errors are propagated to later channels in one matrix product."""
_ROW_WORK = 256
"""What a row of such a block counts for where rows are divided among threads, in weights of other loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """The distribution of errors to later channels: all that `quantize` needs of a layer's inputs."""

    order: npt.NDArray[np.intp]
    """[K]: the channels in the order in which they are rounded."""
    factor: FloatArray
    """float32 [K, K], upper triangular, in that order: U with Uᵀ U = (H + damping)⁻¹, each row divided by U[j, j]."""
    curvature: FloatArray
    """float32 [K]: 1 / U[j, j]² of each channel, in the matrix's order."""


def feedback(hessian: FloatArray, order: npt.NDArray[np.intp] | None = None, damping: float = DAMPING) -> Feedback:
    """Prepare for a layer.

    Args:
        hessian: float32 [K, K], sum or mean of x xᵀ over calibration tokens; any positive multiple gives the same.
        order: [K], the channels in the order of rounding; None: those with the largest second moment first.
        damping: Added to the diagonal, in units of its mean.

    Raises:
        QuantizationError: it holds NaN or infinity, or is not positive semidefinite.
    """
    import torch

    if not np.isfinite(hessian).all():
        raise QuantizationError("the calibration's activations are too large for their products to be summed up")
    diagonal = np.diag(hessian).astype(np.float64)
    if order is None:
        order = np.argsort(-diagonal, kind="stable")
    mean = float(diagonal.mean()) or 1.0
    # U = J L⁻¹ J, with J the reversal of the order and L the lower Cholesky factor of the reversed, damped H.
    backwards = order[::-1].copy()
    lower = _factor(hessian, backwards, mean, damping, torch.float32)
    if lower is None:
        lower = _factor(hessian, backwards, mean, damping, torch.float64)
    if lower is None:
        raise QuantizationError("the second moments of the calibration's activations are not positive semidefinite")
    _invert_lower(lower)
    turned, width = lower.numpy()[::-1, ::-1], len(order)
    roots = turned.diagonal()
    curvature = np.empty(width, np.float32)
    curvature[order] = 1 / roots**2
    factor = np.empty((width, width), np.float32)

    def divide(rows: slice) -> None:
        factor[rows] = turned[rows] / roots[rows, None]

    each_chunk(width, width, divide)
    return Feedback(order=order, factor=factor, curvature=curvature)


def _factor(
    hessian: FloatArray, order: npt.NDArray[np.intp], mean: float, damping: float, dtype: torch.dtype
) -> torch.Tensor | None:
    """The lower Cholesky factor of the damped Hessian in units of its mean; None if the precision does not suffice.

    The damping keeps the condition below 2 K, so single precision does as a rule. The Hessian of a wide layer takes
    gigabytes, so one matrix is worked on in place.
    """
    import torch

    work = torch.empty(len(order), len(order), dtype=dtype)
    places = torch.from_numpy(order)
    for rows in range(0, len(order), _GATHERED):
        part = torch.from_numpy(hessian[order[rows : rows + _GATHERED]])
        work[rows : rows + _GATHERED] = part[:, places]
    work /= mean
    work.diagonal().add_(damping)
    _, failed = torch.linalg.cholesky_ex(work.mT, out=(work.mT, torch.empty((), dtype=torch.int32)))
    return None if int(failed) else work.mT


def _invert_lower(matrix: torch.Tensor) -> None:
    """Replace a lower triangular matrix by its inverse, block column by block column from the right."""
    import torch

    width = len(matrix)
    for start in reversed(range(0, width, _INVERTED)):
        inner, below = slice(start, min(start + _INVERTED, width)), slice(min(start + _INVERTED, width), width)
        unit = torch.eye(inner.stop - start, dtype=matrix.dtype)
        corner = torch.linalg.solve_triangular(matrix[inner, inner], unit, upper=False)
        matrix[below, inner] = -(matrix[below, below] @ (matrix[below, inner] @ corner))
        matrix[inner, inner] = corner


def quantize(weight: FloatArray, bits: int, group_size: int, handed: Feedback) -> GroupCodes:
    """Quantize a matrix in groups along its input channels.

    Args:
        weight: float32 [N, K].
        bits: Width of a code, 2 to 8.
        group_size: Input channels that share a scale.
        handed: From `feedback`.
    """
    import torch

    from models.quantizers.compiled import feed_back

    scales, zeros = search(weight, handed.curvature[None], bits, group_size)
    grids = np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T)
    codes = np.empty(weight.shape, np.uint8)
    left = np.empty(weight.shape[::-1], np.float32)  # [K, N] in the order of rounding, as what is found
    found = np.empty(left.shape, np.uint8)
    errors = np.empty((_FEEDBACK_BLOCK, len(weight)), np.float32)

    def turn(rows: slice) -> None:
        left[:, rows] = np.take(weight[rows], handed.order, axis=1).T

    def turn_back(rows: slice) -> None:
        codes[rows] = np.take(found[:, rows], places, axis=0).T

    each_chunk(len(weight), weight.shape[1], turn)
    groups, top = handed.order // group_size, np.float32(2**bits - 1)
    for first in range(0, len(left), _FEEDBACK_BLOCK):
        block = slice(first, min(first + _FEEDBACK_BLOCK, len(left)))

        def work(rows: slice, block: slice = block) -> None:
            own = grids[0][:, rows], grids[1][:, rows]
            channels = left[block, rows], groups[block], handed.factor[block, block]
            feed_back(*channels, top, own, (found[block, rows], errors[:, rows]))

        each_chunk(weight.shape[0], _ROW_WORK, work)
        if block.stop < len(left):  # then the block is whole
            handed_on = torch.from_numpy(handed.factor[block, block.stop :]).mT
            torch.from_numpy(left[block.stop :]).addmm_(handed_on, torch.from_numpy(errors), alpha=-1)
    places = np.argsort(handed.order)
    each_chunk(len(weight), weight.shape[1], turn_back)
    return stored(codes, scales, zeros, group_size)
