"""Shapes of a model's linear layers, through which each decoded token passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.errors import ShapeError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One type of linear layer."""

    kind: str
    """`qkv`, `o`, `gate_up`, `down`, or `head`; `layers.3.qkv` if it is chosen apart from the other blocks."""
    n: int
    """Output channels N."""
    k: int
    """Input channels K."""
    count: int
    """Number of such layers per token."""

    def __post_init__(self) -> None:
        if not self.kind or min(self.n, self.k, self.count) < 1:
            raise ShapeError(f"a layer needs a name and sizes of at least 1, not {self}")

    @property
    def type(self) -> str:
        """The layer type without its block."""
        return self.kind.rsplit(".", 1)[-1]

    @property
    def weights(self) -> int:
        """Number of weights of one such layer."""
        return self.n * self.k


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The linear layers of a model."""

    name: str
    """Its name on the command line."""
    layers: tuple[LayerShape, ...]
    """Its layer types."""


def check_layers(layers: Sequence[LayerShape]) -> None:
    """Check that layers can be tuned.

    Raises:
        ShapeError: there are none, or a type occurs twice.
    """
    if not layers:
        raise ShapeError("there are no layers to tune; a model without residuals has nothing to compensate")
    kinds = [layer.kind for layer in layers]
    if len(set(kinds)) != len(kinds):
        raise ShapeError(f"a layer type occurs twice in {', '.join(kinds)}; add up the counts")


def shape_of(name: str) -> ModelShape:
    """A shape by name.

    Raises:
        ShapeError: no shape has that name.
    """
    if name not in SHAPES:
        raise ShapeError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def _decoder(
    name: str, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, blocks: int
) -> ModelShape:
    """The four layer types of a decoder block with a gated MLP; like the paper, without the head."""
    return ModelShape(
        name,
        (
            LayerShape("qkv", (heads + 2 * kv_heads) * head_dim, hidden, blocks),
            LayerShape("o", hidden, heads * head_dim, blocks),
            LayerShape("gate_up", 2 * intermediate, hidden, blocks),
            LayerShape("down", hidden, intermediate, blocks),
        ),
    )


SHAPES = {
    shape.name: shape
    for shape in (
        _decoder("llama-3-8b", 4096, 14336, 32, 8, 128, 32),
        _decoder("phi-3-medium", 5120, 17920, 40, 10, 128, 40),
        _decoder("llama-3.2-1b", 2048, 8192, 32, 8, 64, 16),
        _decoder("llama-3.2-3b", 3072, 8192, 24, 8, 128, 28),
        _decoder("phi-3-mini", 3072, 8192, 32, 32, 96, 32),
        _decoder("qwen-2.5-7b", 3584, 18944, 28, 4, 128, 28),
        _decoder("qwen-3-8b", 4096, 12288, 32, 8, 128, 36),
    )
}
"""The shapes that can be simulated, by name. Source: the models' published configurations."""
