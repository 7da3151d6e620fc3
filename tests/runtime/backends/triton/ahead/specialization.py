"""One specialization of a Triton kernel: the types of its arguments, its constants, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Types: TypeAlias = str | tuple[Any, ...]
"""Type of an argument as Triton writes it, or of each member of a tuple of arguments."""
_KERNELS = "runtime.backends.triton.kernels."


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialization:
    """One specialization of one kernel, as a real model launches it."""

    name: str
    """Unique among all kernels: the operation and what is special, `gemv b3 split`."""
    kernel: Any
    """The function that `triton.jit` made."""
    types: Mapping[str, Types]
    """Type of each argument that is no constant: `*fp16`, `*i32`, `i32`, `fp32`, ... A named tuple of types for a named
    tuple of arguments, in which `constexpr` stands for a tensor that isn't there, None."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Value of each `constexpr` argument."""
    num_warps: int = 4
    """Warps of a program."""
    num_stages: int = 2
    """Stages of a software pipeline, where the kernel has a loop that can be one."""
    weights: int = 0
    """Weights that one warp multiplies in a round of the kernel's main loop, where it is a product with a matrix."""
    cooperative: bool = False
    """Whether all programs of a launch must be resident at the same time, as a barrier between them needs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of the compiler that the kernel is launched with."""

    options_of: Callable[[int], Mapping[str, Any]] = lambda _major: {}
    """Others still, by the device's major compute capability."""
    only: int | None = None
    """The one major compute capability whose devices launch it; None: all do."""

    @property
    def operation(self) -> str:
        """Name of the kernel's module in `runtime.backends.triton.kernels`."""
        return str(self.kernel.fn.__module__).removeprefix(_KERNELS).split(".")[0]
