"""Tensors of experts under one set of names: `mlp.experts.17.gate_proj`, whichever way a checkpoint stores them.

Checkpoints hold a tensor for each expert, or one of all experts, [E, rows, columns], in which gate and up may follow
each other. Of the latter only the rows that are asked for are read. A shared expert, `mlp.shared_expert.gate_proj`,
stands here behind the others; one that is wider than they are is divided into several (`models.routing`). In gpt-oss
gate and up alternate.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch

from models.families.family import CORRECTION, PROJECTIONS, Family
from models.shard import StoredTensor
from models.spec import MixtureSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module's part of a matrix or bias: some outputs and inputs. See `StoredTensor`."""

    tensor: StoredTensor
    """The matrix, or the bias [1, outputs]."""
    shape: tuple[int, ...]
    turned: bool = False
    """Whether the matrix is [inputs, outputs]."""
    outputs: slice = field(default_factory=partial(slice, None))
    """Those of the module."""
    inputs: slice = field(default_factory=partial(slice, None))

    @property
    def path(self) -> Path:
        return self.tensor.path

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    def check_readable(self) -> None:
        self.tensor.check_readable()

    def rows(self, first: int, count: int) -> Self:
        begin, step = (self.outputs.start or 0), (self.outputs.step or 1)
        outputs = slice(begin + first * step, begin + (first + count) * step, step)
        return replace(self, outputs=outputs, shape=(count, *self.shape[1:]))

    def read(self) -> torch.Tensor:
        """Read the whole, and return the part: [outputs, inputs], or [outputs]."""
        whole = self.tensor.read()
        outputs = whole.T if self.turned or len(self.shape) == 1 else whole
        return outputs[self.outputs, self.inputs].reshape(self.shape).contiguous()


_STACKED = re.compile(
    r"(?P<experts>model\.layers\.\d+\.mlp\.experts)\.(?P<name>[a-z_]+?)(?P<weight>\.weight)?(?P<bias>[._]bias)?"
)
_SHARED = re.compile(r"(?P<mlp>model\.layers\.\d+\.mlp)\.shared_expert\.(?P<name>[a-z_]+_proj)\.weight")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_MODULES: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": PROJECTIONS["gate_up"],
    **{module: (module,) for modules in PROJECTIONS.values() for module in modules},
}
"""The modules whose weights a tensor of all experts holds, by its name."""


def separate(
    tensors: Mapping[str, StoredTensor],
    family: Family,
    mixture: MixtureSpec | None,
    places: Mapping[str, str],
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with one for each expert and module.

    Args:
        tensors: By their names in the checkpoint.
        family: Theirs.
        mixture: The experts; None: there are none.
        places: Beginnings of names that are others here (`Family.places`).

    Returns:
        The same by their names here. A tensor of all experts that cannot be divided stays as it is.
    """
    found: dict[str, StoredTensor] = {}
    for own, tensor in tensors.items():
        name = own
        for old, new in family.renamed.items():
            name = name if new in name else name.replace(old, new)
        *begin, last = name.split(".", 4)
        name = places.get(".".join((*begin, "")), ".".join((*begin, ""))) + last
        if name.endswith(CORRECTION):
            # ERNIE has it as a row.
            found[name] = Part(tensor=tensor, shape=tensor.shape[1:]) if len(tensor.shape) > 1 else tensor
            continue
        own_one = _SHARED.fullmatch(name)
        if own_one and (mixture is None or mixture.shared):
            modules = _MODULES.get(own_one["name"], ())
            rows = tensor.shape[0] // len(modules) if modules else 0
            for at, module in enumerate(modules):
                half = tensor.rows(at * rows, rows) if len(modules) > 1 else tensor
                alone = {f"{own_one['mlp']}.{module}.weight": half}  # Granite's, an MLP where there are no others
                found |= _of_shared(half, own_one["mlp"], module, mixture) if mixture else alone
            continue
        match = _STACKED.fullmatch(name)
        modules = _MODULES.get(match["name"], ()) if match else ()
        if match is None or not modules or len(tensor.shape) != (2 if match["bias"] else 3):
            found[name] = tensor
        elif family.alternating:
            found |= _of_alternating(tensor, match, modules)
        elif tensor.shape[1] % len(modules):
            found[name] = tensor
        else:
            found |= _of_all(tensor, match, modules)
    return found


def name_in_checkpoint(name: str, mixture: MixtureSpec | None, places: Mapping[str, str]) -> str:
    """What a checkpoint calls a tensor that is named as a shared expert's here, or whose place is another one."""
    for own, here in places.items():
        if name.startswith(here):
            name = own + name.removeprefix(here)
            break
    match = _EXPERT.search(name)
    if mixture is None or match is None or int(match[1]) < mixture.experts:
        return name
    return name.replace(match[0], ".shared_expert.")


def _of_all(tensor: StoredTensor, match: re.Match[str], modules: tuple[str, ...]) -> dict[str, StoredTensor]:
    """The tensors of experts, of one of all of them, [E, outputs, inputs], or of their biases, [E, outputs]."""
    experts, outputs = tensor.shape[:2]
    count, found = outputs // len(modules), dict[str, StoredTensor]()
    for expert, (at, module) in itertools.product(range(experts), enumerate(modules)):
        name = f"{match['experts']}.{expert}.{module}"
        if match["bias"]:
            own = slice(at * count, (at + 1) * count)
            found[f"{name}.bias"] = Part(tensor=tensor.rows(expert, 1), outputs=own, shape=(count,))
        else:
            found[f"{name}.weight"] = tensor.rows(expert * outputs + at * count, count)
    return found


def _of_alternating(tensor: StoredTensor, match: re.Match[str], modules: tuple[str, ...]) -> dict[str, StoredTensor]:
    """The same where the outputs of the modules alternate.

    Parameters are [E, inputs, outputs], and biases [E, outputs]; a weight, which was MXFP4, is [E, outputs, inputs].
    """
    turned = not match["bias"] and not match["weight"]
    each, kind = 1 if match["bias"] else tensor.shape[1], "bias" if match["bias"] else "weight"
    outputs = tensor.shape[1] if match["weight"] else tensor.shape[-1]
    found: dict[str, StoredTensor] = {}
    for expert in range(tensor.shape[0]):
        own = tensor.rows(expert * each, each)
        for at, module in enumerate(modules):
            count = len(range(at, outputs, len(modules)))
            shape = (count,) if match["bias"] else (count, tensor.shape[1] if turned else tensor.shape[2])
            found[f"{match['experts']}.{expert}.{module}.{kind}"] = Part(
                tensor=own, turned=turned, outputs=slice(at, outputs, len(modules)), shape=shape
            )
    return found


def _of_shared(tensor: StoredTensor, mlp: str, module: str, mixture: MixtureSpec) -> dict[str, StoredTensor]:
    """The tensors of shared experts, of one that holds them all."""
    names = [f"{mlp}.experts.{mixture.experts + at}.{module}.weight" for at in range(mixture.shared)]
    inner = 1 if module in PROJECTIONS["down"] else 0
    if mixture.shared == 1 or len(tensor.shape) != 2 or tensor.shape[inner] != mixture.shared * mixture.width:
        return {names[0]: tensor}
    width = mixture.width
    if not inner:
        return {name: tensor.rows(at * width, width) for at, name in enumerate(names)}
    shape = (tensor.shape[0], width)
    return {
        name: Part(tensor=tensor, shape=shape, inputs=slice(at * width, (at + 1) * width))
        for at, name in enumerate(names)
    }
