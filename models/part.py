"""Some consecutive blocks of a model as a model of its own, so that several backends can share one model's blocks.

What the first part leaves is the residual stream, float32 [M, C], from which the next one goes on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from models.packed import KeyStatistics, PackedLinear, Weights
from models.recipe import Recipe
from models.spec import ModelSpec


def seams(spec: ModelSpec) -> tuple[int, ...]:
    """Numbers of blocks that a first part can have: a block stays with the one whose cache it reads, ascending.

    None where the stream is several, which does not cross over.
    """
    if spec.altup is not None:
        return ()
    apart = {
        seam
        for layer in range(spec.num_layers)
        if spec.mixer(layer) == "shared"
        for seam in range(spec.cache_of(layer) + 1, layer + 1)
    }
    return tuple(seam for seam in range(1, spec.num_layers) if seam not in apart)


def part_of(spec: ModelSpec, first: int, last: int) -> ModelSpec:
    """The blocks from `first` up to `last`, each of which is a seam or an end of the model."""
    inside, ends = range(first, last), last == spec.num_layers
    mixture = spec.mixture
    if mixture is not None:
        mixture = replace(mixture, dense=tuple(layer - first for layer in mixture.dense if layer in inside))
    return replace(
        spec,
        num_layers=last - first,
        windows=spec.windows[first:last],
        nope_layers=tuple(layer - first for layer in spec.nope_layers if layer in inside),
        mixers=spec.mixers[first:last],
        query_heads=spec.query_heads[first:last],
        mlp_widths=spec.mlp_widths[first:last],
        sparsity=spec.sparsity[first:last],
        bare=tuple(layer - first for layer in spec.bare if layer in inside),
        mixture=mixture,
        embeds=spec.embeds and first == 0,
        has_head=spec.has_head and ends,
        logit_cap=spec.logit_cap if ends else None,
    )


def recipe_of(recipe: Recipe, first: int, last: int) -> Recipe:
    """The recipe of those blocks of a model."""
    return recipe if recipe.block_bits is None else replace(recipe, block_bits=recipe.block_bits[first:last])


class Part(Weights):
    """The weights of some consecutive blocks. Implements `models.packed.Weights`."""

    def __init__(self, model: Weights, first: int, last: int) -> None:
        self._model, self._first = model, first
        self._spec = part_of(model.spec, first, last)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def linear(self, name: str) -> PackedLinear:
        return replace(self._model.linear(self._whole(name)), name=name)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        return self._model.vector(self._whole(name))

    def key_statistics(self, layer: int) -> KeyStatistics | None:
        return self._model.key_statistics(self._first + layer)

    def embedding(self) -> npt.NDArray[np.float16]:
        return self._model.embedding()

    def token_table(self) -> npt.NDArray[np.float16]:
        P = self._spec.token_width
        return self._model.token_table()[:, self._first * P : (self._first + self._spec.num_layers) * P]

    def expert_tokens(self, layer: int) -> npt.NDArray[np.int32]:
        return self._model.expert_tokens(self._first + layer)

    def release(self) -> None:
        self._model.release()

    def _whole(self, name: str) -> str:
        """The whole model's name of a tensor, `layers.3.qkv`."""
        if not name.startswith("layers."):
            return name
        _, layer, kind = name.split(".", 2)
        return f"layers.{self._first + int(layer)}.{kind}"
