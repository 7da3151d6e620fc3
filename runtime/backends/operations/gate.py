"""The gate of the MLP in plain torch."""

from __future__ import annotations

import torch


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up = gate / (1 + exp(-gate)) * up. Both float32 [M, width], and so is the result."""
    return torch.nn.functional.silu(gate) * up


def gelu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, where gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³))); shapes as above.

    Source: Hendrycks and Gimpel 2016 (GELU), §2.
    """
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
