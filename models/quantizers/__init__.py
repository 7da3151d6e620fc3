"""Quantizers: base methods that turn a weight matrix into group codes, and the residual quantizer.

A base method is a module with a function `quantize(weight, bits, group_size) -> GroupCodes`; `quantizer` finds it by
the name that a recipe carries. The methods are plain numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from models.errors import QuantizationError
from models.quantizers.groups import FloatArray, GroupCodes

Quantizer = Callable[[FloatArray, int, int], GroupCodes]
"""A base method: weight float32 [N, K], bits, group_size -> codes."""

_MODULES = {"rtn": "models.quantizers.rtn"}


def quantizer(method: str) -> Quantizer:
    """The function `quantize(weight, bits, group_size)` of a base method.

    Raises:
        QuantizationError: no such method.
    """
    if method not in _MODULES:
        raise QuantizationError(f"unknown method {method!r}; choose one of: {', '.join(_MODULES)}")
    function: Quantizer = import_module(_MODULES[method]).quantize
    return function
