"""Tensors of experts under one set of names: `mlp.experts.17.gate_proj`, whichever way a checkpoint stores them.

Checkpoints hold a tensor for each expert, or one of all experts, [E, rows, columns], in which gate and up may follow
each other. Of the latter only the rows that are asked for are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, Self, TypeVar

from models.families.family import PROJECTIONS


class Divisible(Protocol):
    """A tensor of a checkpoint, of which some rows can be read alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def rows(self, first: int, count: int) -> Self:
        """Rows of the tensor as a matrix: all dimensions but the last count rows."""
        ...


T = TypeVar("T", bound=Divisible)

_STACKED = re.compile(r"(?P<experts>model\.layers\.\d+\.mlp\.experts)\.(?P<name>[a-z_]+)(?:\.weight)?")
_MODULES: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": PROJECTIONS["gate_up"],
    **{module: (module,) for modules in PROJECTIONS.values() for module in modules},
}
"""The modules whose weights a tensor of all experts holds, by its name."""


def separate(tensors: Mapping[str, T], renamed: Mapping[str, str]) -> dict[str, T]:
    """The tensors of a checkpoint with one for each expert and module.

    Args:
        tensors: By their names in the checkpoint.
        renamed: Parts of those names, and what stands for them here; tried in order.

    Returns:
        The same by their names here. A tensor of all experts that cannot be divided stays as it is.
    """
    found: dict[str, T] = {}
    for own, tensor in tensors.items():
        name = own
        for old, new in renamed.items():
            name = name.replace(old, new)
        match = _STACKED.fullmatch(name)
        modules = _MODULES.get(match["name"], ()) if match else ()
        if match is None or not modules or len(tensor.shape) != _DIMENSIONS or tensor.shape[1] % len(modules):
            found[name] = tensor
            continue
        experts, rows, _ = tensor.shape
        count = rows // len(modules)
        for expert in range(experts):
            for at, module in enumerate(modules):
                found[f"{match['experts']}.{expert}.{module}.weight"] = tensor.rows(expert * rows + at * count, count)
    return found


_DIMENSIONS = 3
"""Of a tensor of all experts."""
