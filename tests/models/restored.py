"""A stored model's weights for the oracle, dequantized."""

from __future__ import annotations

import numpy as np
import torch

from models.quantizers.dequantize import restored
from models.store import StoredModel


class Restored:
    """A source of weights (`models.oracle.Weights`)."""

    def __init__(self, model: StoredModel, residuals: bool) -> None:
        self.model, self.residuals, self.spec = model, residuals, model.spec

    def vector(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.model.vector(name).copy())

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        linear = self.model.linear(name)
        bias = None if linear.bias is None else torch.from_numpy(linear.bias.copy())
        return torch.from_numpy(restored(linear, self.residuals)), bias

    def embedding(self) -> torch.Tensor:
        return torch.from_numpy(self.model.embedding().astype(np.float32))
