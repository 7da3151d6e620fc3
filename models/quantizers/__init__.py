"""Quantizers: base methods that turn a weight matrix into group codes, and the residual quantizer.

`quantizer` finds a base method by the name that a recipe carries, and prepares it for one linear layer.
"""

from __future__ import annotations

from collections.abc import Callable

from models.errors import QuantizationError
from models.quantizers import gptq, rtn
from models.quantizers.groups import FloatArray, GroupCodes
from models.recipe import METHOD_BITS

Quantizer = Callable[[FloatArray, int, int], GroupCodes]
"""A base method: weight float32 [n, K] of some or all rows of a layer, bits, group_size -> codes."""

SECOND_MOMENTS = frozenset({"gptq"})
"""The methods that need the layer's Hessian, the second moments of its inputs."""


def quantizer(method: str, hessian: FloatArray | None = None) -> Quantizer:
    """The function `quantize(weight, bits, group_size)` of a base method for one layer.

    Args:
        method: A key of `models.recipe.METHOD_BITS`.
        hessian: float32 [K, K], see `models.calibration.InputStatistics`; for a method of `SECOND_MOMENTS`.

    Raises:
        QuantizationError: no such method, or the Hessian is missing or damaged.
    """
    if method == "rtn":
        return rtn.quantize
    if method != "gptq":
        raise QuantizationError(f"unknown method {method!r}; choose one of: {', '.join(METHOD_BITS)}")
    if hessian is None:
        raise QuantizationError(f"{method} needs a calibration text; give one, or choose rtn")
    handed = gptq.feedback(hessian)
    return lambda weight, bits, group_size: gptq.quantize(weight, bits, group_size, handed)
