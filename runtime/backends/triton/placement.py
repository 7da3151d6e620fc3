"""Which experts are on the device, in each block that has some: those used last, and how often they were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from models.spec import MixtureSpec
from runtime.backends.triton.experts import GpuExperts
from runtime.backends.triton.kernels.expert_cache import Cached, Records, admit
from tuner.placement import ExpertPlacement

WINDOW = 64
"""Rows over which hits are counted."""


class Placement:
    """Where experts are, in each block that has some; see `runtime.backends.triton.kernels.expert_cache`."""

    def __init__(self, blocks: Mapping[int, Sequence[GpuExperts]], mixture: MixtureSpec, device: torch.device) -> None:
        self._blocks, self._shared = blocks, mixture.shared
        last = torch.zeros(len(blocks), mixture.num_experts, dtype=torch.int32, device=device)
        resident = [own[0].resident for own in blocks.values()]
        here = torch.tensor(resident, dtype=torch.int32, device=device)
        moves = torch.zeros(1 + 2 * mixture.num_experts, dtype=torch.int32, device=device)
        self._found = torch.zeros(2, dtype=torch.int32, device=device)
        self._cached = {block: Cached(last[at], here[at], moves, self._found) for at, block in enumerate(blocks)}
        self._rows = 0
        self._hit_rate: float | None = None
        self.whole = all(map(all, resident))
        """Whether all experts are on the device."""

    @property
    def report(self) -> ExpertPlacement:
        layers = [layer for own in self._blocks.values() for layer in own]
        return ExpertPlacement(
            on_device=sum(layers[0].resident),
            held=layers[0].count,
            host_bytes=sum(layer.host_bytes for layer in layers),
            hit_rate=self._hit_rate,
        )

    def admit(self, block: int, chosen: torch.Tensor) -> None:
        """Have experts on the device that a few rows chose, int32 [M, each]; launches only."""
        if not self.whole:
            layers = self._blocks[block]
            gate_up, down = (Records(layer.first.codes, layer.places, layer.sizes.words) for layer in layers)
            admit(chosen, self._cached[block], gate_up, down, shared=self._shared)

    def after(self, rows: int) -> None:
        """Count a step's rows, of those that `admit` is for; the step is done."""
        if self.whole:
            return
        self._rows += rows
        if self._rows < WINDOW:
            return
        self._rows = 0
        chosen, found = self._found.tolist()
        self._hit_rate = found / max(1, chosen)
        self._found.zero_()
