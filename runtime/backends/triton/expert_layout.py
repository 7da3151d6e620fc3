"""Matrices of a block's experts on the GPU, one behind the other, so that a kernel finds each by its number.

An expert's matrix is laid out as any other (`runtime.backends.triton.layout`). All experts of a block have the same
shape, bits and groups, so that one launch multiplies with those that the router chose, whose numbers it reads on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.packed import PackedLinear
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.sizes import EXPERT_WORDS, expert_words
from runtime.errors import BackendError

Repack = Callable[[PackedLinear, torch.device], GpuLinear]
"""`runtime.backends.triton.layout.repack`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuExperts:
    """The matrices of one layer type of a block's experts."""

    first: GpuLinear
    """That of the first expert without its bias, a view; all have its shape, bits and group size."""
    codes: torch.Tensor
    """int32 [E, words], words a multiple of `EXPERT_WORDS`: each expert's `GpuLinear.codes`, padded."""
    groups: torch.Tensor
    """int32 [E, G, N]: each expert's `GpuLinear.groups`."""
    bias: torch.Tensor | None = None
    """float32 [E, N], always on the device; None: they have none."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of an expert's matrix."""
        return self.first.shape

    @property
    def count(self) -> int:
        """E, experts."""
        return self.codes.shape[0]

    @property
    def strides(self) -> tuple[int, int]:
        """From one expert to the next: runs of `EXPERT_WORDS` words of codes, and words of groups."""
        return self.codes.shape[1] // EXPERT_WORDS, self.groups[0].numel()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.codes.nbytes + self.groups.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def of(self, expert: int) -> GpuLinear:
        """An expert's matrix, a view."""
        codes = self.codes[expert, : self.first.codes.numel()]
        bias = None if self.bias is None else self.bias[expert]
        return replace(self.first, codes=codes, groups=self.groups[expert], bias=bias)


def stack(experts: Sequence[PackedLinear], device: torch.device, repack: Repack) -> GpuExperts:
    """Copy the matrices of a block's experts to the device, one at a time.

    Args:
        experts: The stored matrices, by the experts' numbers.
        device: The destination.
        repack: Lays out one of them.

    Raises:
        BackendError: they differ in shape, bits, groups or having a bias, or have what only other layers have.
    """
    one = experts[0]
    if one.per_token or one.codebook is not None:
        raise BackendError(f"{one.name}: the GPU takes experts of uniform codes: use the CPU backend")
    if len({(each.shape, each.bits, each.group_size, each.bias is None) for each in experts}) > 1:
        raise BackendError(
            f"{one.name}: experts of a block differ in shape, bits, groups or having a bias: use the CPU backend"
        )
    biases = [each.bias for each in experts if each.bias is not None]
    bias = torch.from_numpy(np.stack(biases)).to(device) if biases else None
    codes = groups = torch.empty(0)
    for number, packed in enumerate(experts):
        placed = repack(replace(packed, bias=None), device)
        assert placed.groups is not None
        if not number:
            codes = torch.zeros(len(experts), expert_words(one.shape, one.bits), dtype=torch.int32, device=device)
            groups = torch.empty(len(experts), *placed.groups.shape, dtype=torch.int32, device=device)
        codes[number, : placed.codes.numel()].copy_(placed.codes)
        groups[number].copy_(placed.groups)
    first = replace(placed, name=one.name, codes=codes[0, : placed.codes.numel()], groups=groups[0])
    return GpuExperts(first=first, codes=codes, groups=groups, bias=bias)
