"""The gate of the MLP in plain torch."""

from __future__ import annotations

import torch

from models.spec import CLAMPED_GAIN


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up = gate / (1 + exp(-gate)) * up. Both float32 [M, width], and so is the result."""
    return torch.nn.functional.silu(gate) * up


def gelu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, where gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³))); shapes as above.

    Source: Hendrycks and Gimpel 2016 (GELU), §2.
    """
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def clamped_gate(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """(u + 1) * g * sigmoid(1.702 g), where g = min(gate, limit), and u is up within -limit and limit; shapes as above.

    Source: gpt-oss's model card (OpenAI 2025), §2.2.
    """
    gate = gate.clamp(max=limit)
    return gate * (CLAMPED_GAIN * gate).sigmoid() * (up.clamp(-limit, limit) + 1)
