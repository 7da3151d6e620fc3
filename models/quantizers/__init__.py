"""Quantizers: base methods that turn a weight matrix into group codes, and the residual quantizer.

A base method is a module with a function `quantize(weight, bits, group_size) -> GroupCodes`; `quantizer` finds it by
the name that a recipe carries. Nothing here imports torch until a method is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from models.errors import QuantizationError

if TYPE_CHECKING:
    import torch

    from models.quantizers.groups import GroupCodes

_MODULES = {"rtn": "models.quantizers.rtn"}


def quantizer(method: str) -> Callable[[torch.Tensor, int, int], GroupCodes]:
    """The function `quantize(weight, bits, group_size)` of a base method.

    Raises:
        QuantizationError: no such method.
    """
    if method not in _MODULES:
        raise QuantizationError(f"unknown method {method!r}; choose one of: {', '.join(_MODULES)}")
    function: Callable[[torch.Tensor, int, int], GroupCodes] = import_module(_MODULES[method]).quantize
    return function
