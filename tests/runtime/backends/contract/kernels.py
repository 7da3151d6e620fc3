"""What the contract asks of a backend's kernels: one operation at a time, tensors on the CPU in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from models.packed import PackedLinear
from runtime.backends.operations.channels import Buckets
from tests.close import Tolerance

NO_BUCKETS = Buckets(b0=0.0, b15=0.0, upper_scale=0.0, lower_scale=0.0)


@dataclass(frozen=True, kw_only=True)
class Selector:
    """How salient channels are chosen."""

    mode: Literal["approx", "exact", "static", "random"]
    """One of the four."""
    k_chunk: int
    """Channels of a whole chunk."""
    buckets: Buckets = NO_BUCKETS
    """Of `approx`."""
    static: npt.NDArray[np.int32] | None = None
    """[k], of `static`."""
    seed: int = 0
    """Of `random`, and so below."""
    layer: int = 0
    positions: tuple[int, ...] = ()
    """Of the rows."""


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What happens to the heads of a step."""

    heads: int
    """H."""
    kv_heads: int
    """H_kv."""
    dim: int
    """D."""
    cos: torch.Tensor
    """float32 [context, r / 2]."""
    sin: torch.Tensor
    """Likewise."""
    slots: tuple[int, ...]
    """Of the rows."""
    positions: tuple[int, ...]
    """Likewise; each slot's follow one another from 0 on."""
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    """Weights float32 [D] of the queries' norm and of the keys'."""
    basis: tuple[torch.Tensor, torch.Tensor] | None = None
    """Reflection and mean, float32 [H_kv, D]; None: heads are not turned."""
    eps: float = 1e-6
    """Of the norms."""
    norm_last: bool = False
    """Whether they come behind the rotation."""
    growth: torch.Tensor | None = None
    """float32 [context], factors of the queries."""


class Kernels(Protocol):
    """The operations. Activations that come in are representable in half precision."""

    all_kept: bool
    """Whether there are products with all types of `models.recipe.GGUF_GROUPS`."""
    written: str
    """Tolerance of activations that norms and gates write."""

    def norm(self, h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of float32 [M, C]."""

    def gate(self, y: torch.Tensor, *, gelu: bool = False, limit: float = 0.0) -> torch.Tensor:
        """SiLU(gate) * up, GELU(gate) * up, or with a limit the clamped gate: float32 [M, I] of [M, 2 I]."""

    def heads(self, y: torch.Tensor, how: HeadOptions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [M, H, D], and keys and values [M, H_kv, D] as the cache has them, of y [M, (H + 2 H_kv) D]."""

    def select(self, x: torch.Tensor, how: Selector) -> tuple[torch.Tensor, bool]:
        """Channels int64 [M, k] of x [M, K], and whether a number is not finite."""

    def compensate(self, linear: PackedLinear, x: torch.Tensor, k_chunk: int) -> torch.Tensor:
        """What residuals of channels selected by `approx` add to the product: float32 [M, N]."""

    def product(self, linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        """The product with a low-bit matrix: float32 [M, N]. INT8 with the matrix' groups can represent x exactly."""

    def product_tolerance(self, rows: int) -> str | Tolerance:
        """How near the product of so many rows comes."""

    def whole_product(self, linear: PackedLinear, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The product of INT8 tokens [M, K], scales [M, 1], with a W4A8 matrix: float32 [M, N]."""
