"""The optimizer Muon: momentum whose matrices are made nearly orthogonal before they are applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def orthogonalized(matrix: Tensor) -> Tensor:
    """The matrix [M, N] with its singular values moved near 1, by Newton-Schulz iterations in bfloat16."""
    a, b, c = _COEFFICIENTS
    x = matrix.to(torch.bfloat16)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = (x if wide else x.T).to(matrix.dtype)
    return out


class Muon(torch.optim.Optimizer):
    """Muon for matrices.

    Args:
        matrices: Weights [M, N].
        lr: Learning rate; a step changes a weight by about that much times the square root of M / N.
        momentum: Share of the old momentum that is kept.
        weight_decay: Share of a weight, times the learning rate, that a step takes away.
    """

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change the weights by their gradients."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                change = orthogonalized(weight.grad.lerp(state["momentum"], group["momentum"]))
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(change, alpha=-group["lr"] * scale)
        return loss
