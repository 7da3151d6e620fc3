"""Workspace: auxiliary memory of kernels, counters that return to zero and scratch."""

from __future__ import annotations

import torch


class Workspace:
    """Counters and scratch of the kernels that run on one stream, one after another.

    Allocations stay at their addresses for the lifetime of the workspace, so a captured graph may use them. Concurrent
    kernels on two streams need separate workspaces.

    Args:
        device: Device of the memory.
        scratch: Initial values of float32 scratch; larger requests make it grow, and earlier allocations stay.
    """

    def __init__(self, device: torch.device | str, scratch: int = 0) -> None:
        self.device = torch.device(device)
        self._held: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
        if scratch:
            self.scratch(scratch)

    def counters(self, n: int) -> torch.Tensor:
        """int32 [n], zero. A kernel that counts in them must reset them to zero."""
        return self._take("counters", n, torch.int32)

    def scratch(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[numel] of a type; contents are only valid for the call that requested it."""
        return self._take("scratch", numel, dtype)

    def sums(self, M: int, pieces: int) -> torch.Tensor:
        """float32 [M, pieces], for the sums of the pieces of a product's activations."""
        return self._take("sums", M * pieces, torch.float32).view(M, pieces)

    def lists(self, n: int) -> torch.Tensor:
        """int32 [n], for lists of channels beside other scratch."""
        return self._take("lists", n, torch.int32)

    @property
    def nbytes(self) -> int:
        """Bytes handed out."""
        return sum(tensor.nbytes for tensors in self._held.values() for tensor in tensors)

    def _take(self, purpose: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        held = self._held.setdefault((purpose, dtype), [])
        if not held or held[-1].numel() < numel:
            held.append(torch.zeros(max(numel, 64), dtype=dtype, device=self.device))
        return held[-1][:numel]
