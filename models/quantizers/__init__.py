"""Quantizers: base methods that turn a weight matrix into codes, and the residual quantizer.

`quantizer` finds a base method by the name that a recipe carries, and prepares it for one linear layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.quantizers import gptq, progressive, squeezellm, trellis
from models.quantizers.groups import FloatArray, GroupCodes, clipped, rtn
from models.quantizers.progressive import ProgressiveCodes, Rounding
from models.quantizers.squeezellm import CodebookCodes
from models.quantizers.trellis import TrellisCodes
from models.recipe import METHODS

Codes = GroupCodes | CodebookCodes | ProgressiveCodes | TrellisCodes
"""The result of a base method."""
Quantizer = Callable[[FloatArray, slice, int, int], Codes]
"""A base method: weight float32 [n, K], the layer's rows that these are, bits, group_size -> codes."""

SECOND_MOMENTS = frozenset({"trellis", "gptq", "awq", "awq-gptq", "qoq"})
"""The methods that need the layer's Hessian, the second moments of its inputs."""
SCALED = frozenset({"awq", "awq-gptq"})
"""The methods whose matrices have their input channels scaled first."""
MATRIX_BY_MATRIX = ("gptq", "rtn")
"""The methods that quantize experts, the best first."""
SENSITIVITIES = frozenset({"squeezellm"})
"""The methods that need the sensitivity of the loss to each weight."""


def quantizer(
    method: str,
    *,
    hessian: FloatArray | None = None,
    sensitivity: npt.NDArray[np.floating] | None = None,
    rounding: Rounding | None = None,
) -> Quantizer:
    """The function `quantize(weight, rows, bits, group_size)` of a base method for one layer.

    Args:
        method: One of `models.recipe.METHODS`.
        hessian: float32 [K, K], see `models.quantize.calibration.InputStatistics`; for a method of `SECOND_MOMENTS`.
            Where the matrix has had its channels scaled first, of the scaled inputs.
        sensitivity: floating point [N, K], see `models.quantize.fisher`; for a method of `SENSITIVITIES`.
        rounding: How `qoq` rounds; None: as `Rounding` has it.

    Raises:
        QuantizationError: no such method, or what it needs is missing or damaged.
    """
    if method not in METHODS:
        raise QuantizationError(f"unknown method {method!r}; choose one of: {', '.join(METHODS)}")
    if (method in SECOND_MOMENTS and hessian is None) or (method in SENSITIVITIES and sensitivity is None):
        raise QuantizationError(f"{method} needs a calibration text; give one, or choose rtn")
    if method == "squeezellm":
        assert sensitivity is not None
        channels = squeezellm.channel_importance(sensitivity)
        return lambda weight, rows, bits, _: squeezellm.quantize(weight, sensitivity[rows], bits, channels)
    if method == "rtn":
        return lambda weight, _, bits, group_size: rtn(weight, bits, group_size)
    assert hessian is not None
    if method == "qoq":
        how = Rounding() if rounding is None else rounding
        return lambda weight, rows, _, group_size: progressive.quantize(weight, group_size, hessian, how.part(rows))
    if method == "awq":
        return lambda weight, _, bits, group_size: clipped(weight, bits, group_size, hessian)
    if method == "trellis":
        prepared = trellis.feedback(hessian)
        return lambda weight, _, bits, _group_size: trellis.quantize(weight, bits, prepared)
    handed = gptq.feedback(hessian)
    return lambda weight, _, bits, group_size: gptq.quantize(weight, bits, group_size, handed)
