"""Inputs of a block's experts over the calibration text, as quantizers want them.

All experts read the same activations, so the choice of salient channels at `gate_up` follows from all tokens; at `down`
the ranks' maxima are those over all experts, and each expert has its own mean squares. Inputs are kept, not their
second moments: those of one expert alone are in memory at a time.

An expert that the text hardly reaches is rounded plainly, because error feedback would fit the few tokens it has seen,
and takes the statistics of all experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from models.calibration import InputStatistics
from models.quantizers import SECOND_MOMENTS
from models.recipe import Recipe
from models.spec import ModelSpec, expert_of, router_of

FEWEST_TOKENS = 16
"""Calibration tokens below which an expert is rounded plainly."""


def reached(tokens: int) -> bool:
    """Whether so many calibration tokens are enough to know an expert's inputs."""
    return tokens >= FEWEST_TOKENS


class ExpertInputs:
    """The inputs of the experts of one block.

    Args:
        spec: The architecture, a mixture.
        layer: Which block.
        recipe: How it will be quantized.
    """

    def __init__(self, spec: ModelSpec, layer: int, recipe: Recipe) -> None:
        assert spec.mixture is not None
        self._recipe = recipe
        self._router = router_of(layer)
        self._layer = layer
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(spec.mixture.held)]
        self._inside: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(spec.mixture.held)]
        self._whole = {
            "gate_up": InputStatistics.empty(spec.hidden_size, expected_k_chunk=recipe.left_out),
            "down": InputStatistics.empty(spec.mixture.width, expected_k_chunk=recipe.left_out),
        }

    def add(
        self,
        inputs: Mapping[str, torch.Tensor],
        rows: Mapping[str, torch.Tensor],
        counts: torch.Tensor,
        added: torch.Tensor,
    ) -> None:
        """Take in a batch.

        Args:
            inputs: Float32, by the name of the layer that reads them: the router's [B, S, C], each expert's [n, K].
            rows: int64 [n], the rows of the batch that an expert's layer reads, by its name.
            counts: float32 [B * S], how much a squared error of a token's activations weighs.
            added: float32 [B * S], how much one of what a token adds to the residual stream weighs.

        Raises:
            QuantizationError: an activation is NaN or infinite.
        """
        whole = inputs[self._router].flatten(0, -2)
        self._whole["gate_up"].add(whole.numpy(), self._router, counts.numpy())
        for name, own in rows.items():
            expert, kind = _expert_of(name), name.rpartition(".")[2]
            if kind == "gate_up":
                self._rows[expert].append((len(self._batches), own))
            else:
                self._whole["down"].add(inputs[name].numpy(), name, added[own].numpy())
                self._inside[expert].append((inputs[name], added[own]))
        self._batches.append((whole, counts))

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [held]: the tokens that reached each expert."""
        return np.array([sum(len(own) for _, own in parts) for parts in self._rows], np.int32)

    def statistics(self, name: str) -> tuple[InputStatistics, Recipe]:
        """Statistics at the input of an expert's layer, and the recipe to quantize it by."""
        expert, kind = _expert_of(name), name.rpartition(".")[2]
        whole = self._whole[kind]
        if not reached(int(self.tokens[expert])):
            return whole, replace(self._recipe, method="rtn")
        own = InputStatistics.empty(
            len(whole.rank_maximum),
            second_moments=self._recipe.method in SECOND_MOMENTS,
            expected_k_chunk=self._recipe.left_out,
        )
        for x, counts in self._parts(expert, kind):
            own.add(x.numpy(), name, counts.numpy())
        own.rank_maximum = whole.rank_maximum
        if kind == "gate_up":
            own.square_sum, own.tokens = whole.square_sum, whole.tokens
        return own, self._recipe

    def _parts(self, expert: int, kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if kind == "down":
            return self._inside[expert]
        return [(self._batches[at][0][own], self._batches[at][1][own]) for at, own in self._rows[expert]]


def _expert_of(name: str) -> int:
    """The expert of one of its layers."""
    expert = expert_of(name)
    assert expert is not None
    return expert
