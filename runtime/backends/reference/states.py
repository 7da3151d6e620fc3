"""Layers with a state on the reference backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from models import recurrent
from models.spec import ModelSpec
from runtime.kv.states import States


class StateMixers:
    """The mixers of all layers with a state.

    Args:
        spec: The model.
        vectors: Its vectors, by name.
        states: What they remember.
    """

    def __init__(self, spec: ModelSpec, vectors: Mapping[str, torch.Tensor], states: States) -> None:
        self._spec, self._vectors, self._states = spec, vectors, states

    def convolve(self, x: torch.Tensor, layer: int, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The gated short convolution of a step's rows, which enter the states; see `models.architecture`.

        Args:
            x: float32 [M, 3 C].
            layer: The layer.
            slots: int64 [M].
            positions: int64 [M].

        Returns:
            float32 [M, C].
        """
        spec, prefix = self._spec, f"layers.{layer}"
        weight = self._vectors[f"{prefix}.conv"].view(spec.taps, -1)
        bias = self._vectors.get(f"{prefix}.conv_bias")
        before, after, u = x.chunk(3, dim=-1)
        entering = before * u
        y = torch.empty_like(u)
        for slot, rows in _runs(slots):
            start = int(positions[rows.start])
            history = self._states.inputs(layer, slot, start - spec.taps + 1, start)[:, : spec.hidden_size]
            own = torch.cat((torch.from_numpy(history), entering[rows]))
            y[rows] = recurrent.convolve(own, weight, bias)
            self._states.note(layer, slot, start, entering[rows].numpy())
        return after * y


def _runs(slots: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """The rows of each slot of a step, which are adjacent."""
    start = 0
    for slot, count in zip(
        *(found.tolist() for found in torch.unique_consecutive(slots, return_counts=True)), strict=True
    ):
        yield slot, slice(start, start + count)
        start += count
