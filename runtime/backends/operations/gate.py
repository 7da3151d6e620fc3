"""The gate of the MLP in plain torch."""

from __future__ import annotations

import torch


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up = gate / (1 + exp(-gate)) * up. Both float32 [M, width], and so is the result."""
    return torch.nn.functional.silu(gate) * up
