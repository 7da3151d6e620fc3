"""Memory that kernels need beside their operands: counters that return to zero, and scratch."""

from __future__ import annotations

import torch


class Workspace:
    """Counters and scratch of the kernels that run on one stream, one after another.

    What was handed out stays where it is as long as the workspace lives, so a captured graph may hold its address.
    Kernels on two streams at the same time need a workspace each.

    Args:
        device: Where the memory lies.
        scratch: Values of float32 scratch that are held from the beginning; what asks for more makes it grow, and what
            was held before stays.
    """

    def __init__(self, device: torch.device | str, scratch: int = 0) -> None:
        self.device = torch.device(device)
        self._held: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
        if scratch:
            self.scratch(scratch)

    def counters(self, n: int) -> torch.Tensor:
        """int32 [n], zero. A kernel that counts in them has to leave them at zero."""
        return self._take("counters", n, torch.int32)

    def scratch(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[numel] of a type; what it holds is only meant for the call that asked."""
        return self._take("scratch", numel, dtype)

    def sums(self, M: int, pieces: int) -> torch.Tensor:
        """float32 [M, pieces], for the sums of the pieces of a product's activations."""
        return self._take("sums", M * pieces, torch.float32).view(M, pieces)

    @property
    def nbytes(self) -> int:
        """Bytes handed out."""
        return sum(tensor.nbytes for tensors in self._held.values() for tensor in tensors)

    def _take(self, purpose: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        held = self._held.setdefault((purpose, dtype), [])
        if not held or held[-1].numel() < numel:
            held.append(torch.zeros(max(numel, 64), dtype=dtype, device=self.device))
        return held[-1][:numel]
