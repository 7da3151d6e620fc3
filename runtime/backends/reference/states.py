"""Layers with a state on the reference backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from models import recurrent
from models.spec import ModelSpec
from runtime.kv.states import States
from runtime.kv.stores import Int32Array


class StateMixers:
    """The mixers of all layers with a state."""

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
        weight = self._vectors[f"{prefix}.conv"].view(spec.conv_kernel_size, -1)
        bias = self._vectors.get(f"{prefix}.conv_bias")
        before, after, u = x.chunk(3, dim=-1)
        entering = before * u
        y = torch.empty_like(u)
        for slot, rows in _runs(slots):
            start = int(positions[rows.start])
            history = self._states.inputs(layer, slot, start - spec.conv_kernel_size + 1, start)[:, : spec.hidden_size]
            own = torch.cat((torch.from_numpy(history), entering[rows]))
            y[rows] = recurrent.convolve(own, weight, bias)
            self._states.note(layer, slot, start, entering[rows].numpy())
        return after * y

    def absorb(self, slots: Int32Array, positions: Int32Array) -> None:
        """Have the matrices of all layers absorb the tokens before a step, in slots that are to.

        Args:
            slots: int32 [M].
            positions: int32 [M].
        """
        for slot, rows in _runs(torch.from_numpy(slots)):
            start, base = int(positions[rows.start]), int(self._states.absorbed[slot])
            if base < start and self._states.absorbs[slot]:
                for layer in self._states.shapes if self._spec.delta else ():
                    self._matrix(layer, slot).copy_(self._caught_up(layer, slot, base, start))

    def delta_rule(self, x: torch.Tensor, layer: int, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The gated delta rule of a step's rows, which enter the states; see `models.architecture`.

        Many rows of a slot are computed by chunks, few one by one.

        Args:
            x: float32 [M, inputs + Hv * Dv].
            layer: The layer.
            slots: int64 [M].
            positions: int64 [M].

        Returns:
            float32 [M, Hv * Dv].
        """
        delta, states = self._spec.delta, self._states
        assert delta is not None
        entering, gates = x[:, : delta.inputs], x[:, delta.inputs :]
        y = torch.empty(len(x), delta.value_heads, delta.value_dim)
        for slot, rows in _runs(slots):
            start = int(positions[rows.start])
            if states.absorbs[slot]:
                matrix = self._matrix(layer, slot)
            else:
                matrix = self._caught_up(layer, slot, int(states.absorbed[slot]), start)
            whole = states.absorbs[slot] == 2
            read = self._read(layer, slot, start, entering[rows])
            y[rows], last = (recurrent.delta_rule_chunked if whole else recurrent.delta_rule)(read, matrix)
            if whole:
                matrix.copy_(last)
            states.note(layer, slot, start, entering[rows].numpy())
        return recurrent.finish(delta, y, gates, self._vectors.get(f"layers.{layer}.gain"), self._spec.gain_eps)

    def _matrix(self, layer: int, slot: int) -> torch.Tensor:
        """A view of a slot's matrices float32 [Hv, Dk, Dv]."""
        assert self._spec.delta is not None
        return torch.from_numpy(self._states.matrices[layer][slot])[..., : self._spec.delta.value_dim]

    def _caught_up(self, layer: int, slot: int, base: int, start: int) -> torch.Tensor:
        """A slot's matrices once they have absorbed the tokens base .. start - 1."""
        assert self._spec.delta is not None
        rows = torch.from_numpy(self._states.inputs(layer, slot, base, start))[:, : self._spec.delta.inputs]
        return recurrent.delta_rule(self._read(layer, slot, base, rows), self._matrix(layer, slot))[1]

    def _read(self, layer: int, slot: int, start: int, entering: torch.Tensor) -> recurrent.DeltaInputs:
        """What the delta rule reads of rows float32 [n, inputs] from a position on."""
        delta = self._spec.delta
        assert delta is not None
        before = torch.from_numpy(self._states.inputs(layer, slot, start - self._spec.conv_kernel_size + 1, start))
        names = (name for name in self._spec.block_vectors(layer) if not name.endswith("norm"))
        vectors = {name.removeprefix(f"layers.{layer}."): self._vectors[name] for name in names}
        rows = torch.cat((before[:, : delta.inputs], entering))
        return recurrent.delta_inputs(delta, rows, self._spec.conv_kernel_size, vectors)


def _runs(slots: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """The rows of each slot of a step, which are adjacent."""
    start = 0
    for slot, count in zip(
        *(found.tolist() for found in torch.unique_consecutive(slots, return_counts=True)), strict=True
    ):
        yield slot, slice(start, start + count)
        start += count
