"""Kernels compiled ahead of time, for devices that are not here: what a compiler makes of each, and that it compiles.

No device and no driver is needed: Triton brings ptxas and cuobjdump along. Kernels that were decorated while
`TRITON_INTERPRET` was set belong to the interpreter and can't be compiled; compile in a process without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WARPS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """One specialization of one kernel, as a real model launches it."""

    name: str
    """Unique among all kernels: the operation and what is special, `gemv b3 split`."""
    kernel: Any
    """The function that `triton.jit` made."""
    signature: dict[str, str]
    """Type of each argument in the kernel's order: `*fp16`, `*i32`, `i32`, `fp32`, ...; `constexpr` for constants."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Value of each `constexpr` argument."""
    num_warps: int = 4
    """Warps of a program."""
    num_stages: int = 2
    """Stages of a software pipeline, where the kernel has a loop that can be one."""
    cooperative: bool = False
    """Whether all programs of a launch must be resident at the same time, as a barrier between them needs."""

    def __post_init__(self) -> None:
        """Check what would otherwise surface as an obscure compiler error."""
        named = {argument for argument, kind in self.signature.items() if kind == "constexpr"}
        if named != set(self.constants):
            odd = sorted(named ^ set(self.constants))
            raise ValueError(
                f"{self.name}: {', '.join(odd)} must be in both the signature (constexpr) and the constants"
            )
        if self.num_warps not in WARPS:
            raise ValueError(f"{self.name}: num_warps is {self.num_warps}; it is one of {WARPS}")
