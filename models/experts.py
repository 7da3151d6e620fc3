"""Tensors of experts under one set of names: `mlp.experts.17.gate_proj`, whichever way a checkpoint stores them.

Checkpoints hold a tensor for each expert, or one of all experts, [E, rows, columns], in which gate and up may follow
each other. Of the latter only the rows that are asked for are read. A shared expert, `mlp.shared_expert.gate_proj`,
stands here behind the others; one that is wider than they are is divided into several (`models.routing`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, Self, TypeVar

from models.families.family import PROJECTIONS
from models.spec import MixtureSpec


class Divisible(Protocol):
    """A tensor of a checkpoint, of which some rows can be read alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def rows(self, first: int, count: int) -> Self:
        """Rows of the tensor as a matrix: all dimensions but the last count rows."""
        ...

    def columns(self, first: int, count: int) -> Self:
        """Columns of a matrix."""
        ...


T = TypeVar("T", bound=Divisible)

_STACKED = re.compile(r"(?P<experts>model\.layers\.\d+\.mlp\.experts)\.(?P<name>[a-z_]+)(?:\.weight)?")
_SHARED = re.compile(r"(?P<mlp>model\.layers\.\d+\.mlp)\.shared_expert\.(?P<name>[a-z]+_proj)\.weight")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_MODULES: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": PROJECTIONS["gate_up"],
    **{module: (module,) for modules in PROJECTIONS.values() for module in modules},
}
"""The modules whose weights a tensor of all experts holds, by its name."""


def separate(tensors: Mapping[str, T], renamed: Mapping[str, str], mixture: MixtureSpec | None) -> dict[str, T]:
    """The tensors of a checkpoint with one for each expert and module.

    Args:
        tensors: By their names in the checkpoint.
        renamed: Parts of those names, and what stands for them here; tried in order.
        mixture: The experts; None: there are none.

    Returns:
        The same by their names here. A tensor of all experts that cannot be divided stays as it is.
    """
    found: dict[str, T] = {}
    for own, tensor in tensors.items():
        name = own
        for old, new in renamed.items():
            name = name.replace(old, new)
        if mixture is not None and mixture.shared and (own_one := _SHARED.fullmatch(name)):
            found |= _of_shared(tensor, own_one["mlp"], own_one["name"], mixture)
            continue
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


def name_in_checkpoint(name: str, mixture: MixtureSpec | None) -> str:
    """What a checkpoint calls a shared expert's tensor that is named as an expert's here; other names stay."""
    match = _EXPERT.search(name)
    if mixture is None or match is None or int(match[1]) < mixture.experts:
        return name
    return name.replace(match[0], ".shared_expert.")


def _of_shared(tensor: T, mlp: str, module: str, mixture: MixtureSpec) -> dict[str, T]:
    """The tensors of shared experts, of one that holds them all."""
    names = [f"{mlp}.experts.{mixture.experts + at}.{module}.weight" for at in range(mixture.shared)]
    inner = 1 if module in PROJECTIONS["down"] else 0
    if mixture.shared == 1 or len(tensor.shape) != 2 or tensor.shape[inner] != mixture.shared * mixture.width:
        return {names[0]: tensor}
    part = tensor.columns if inner else tensor.rows
    return {name: part(at * mixture.width, mixture.width) for at, name in enumerate(names)}


_DIMENSIONS = 3
"""Of a tensor of all experts."""
