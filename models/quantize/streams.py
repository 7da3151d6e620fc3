"""The hidden states that pass through the model, block by block, while it is quantized.

Four streams: the calibration text and the evaluation text in full precision, the evaluation text through the low-bit
blocks, and a part of the calibration text through copies of the model of which one layer type is low-bit. After every
block they are saved, so that a killed run goes on from the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from models.calibration import InputStatistics
from models.checkpoint import Checkpoint
from models.oracle import Oracle, Weights
from models.packed import PackedLinear
from models.quantize.keys import KeyMoments
from models.quantizers import SECOND_MOMENTS
from models.quantizers.dequantize import dequantize
from models.quantizers.groups import FloatArray
from models.recipe import Recipe
from models.spec import LAYER_TYPES, ModelSpec
from models.store.tensors import Array, MappedTensors

Batches = list[torch.Tensor]

_STREAMS = ("calibration", "full", "low", "copies")


@dataclass(slots=True, kw_only=True)
class Streams:
    """Inputs of the next block, each batch float32 [B, S, C]."""

    calibration: Batches
    """The calibration text in full precision."""
    full: Batches
    """The evaluation text in full precision."""
    low: Batches
    """The evaluation text through the low-bit blocks."""
    copies: Batches = field(default_factory=list)
    """A part of the calibration text through copies of the model (see `models.quantize.copies`)."""

    @classmethod
    def start(cls, checkpoint: Checkpoint, calibration: Batches, evaluation: Batches, copies: Batches) -> Streams:
        """Embed tokens.

        Args:
            checkpoint: Has the embedding table.
            calibration: int64 [B, S] token windows.
            evaluation: The same.
            copies: Embedded already.
        """
        table = checkpoint.embedding()
        full = [table[tokens].to(torch.float32) for tokens in evaluation]
        return cls(
            calibration=[table[tokens].to(torch.float32) for tokens in calibration],
            full=full,
            low=[x.to(torch.float16).to(torch.float32) for x in full],
            copies=copies,
        )

    def tensors(self) -> dict[str, Array]:
        """The streams as they are saved."""
        return {f"{stream}.{index}": x.numpy() for stream in _STREAMS for index, x in enumerate(getattr(self, stream))}

    @classmethod
    def load(cls, file: MappedTensors) -> Streams:
        """Undo `tensors`.

        Raises:
            StoreError: the file is damaged.
        """
        streams: dict[str, Batches] = {stream: [] for stream in _STREAMS}
        for name in sorted(file.entries, key=lambda name: int(name.rpartition(".")[2])):
            streams[name.rpartition(".")[0]].append(torch.from_numpy(np.array(file[name])))
        return cls(**streams)

    def observe(
        self, weights: Weights, layer: int, recipe: Recipe, watch: Callable[[], None]
    ) -> dict[str, InputStatistics]:
        """Look at the inputs of a block's linear layers over the calibration text, which stays before the block.

        Args:
            weights: Have the block.
            layer: Which block.
            recipe: Says what the statistics are for.
            watch: Called after each batch; may raise to stop.

        Returns:
            Statistics at the input of each of the block's linear layers.

        Raises:
            QuantizationError: an activation is NaN or infinite.
        """
        statistics = _no_statistics(weights.spec, layer, recipe)
        oracle = _observing(weights, statistics)
        for x in self.calibration:
            oracle.block(layer, x)
            watch()
        return statistics

    def largest_keys(self, weights: Weights, layer: int, watch: Callable[[], None]) -> FloatArray:
        """Look at a block's keys over the calibration text, which stays before the block.

        Args:
            weights: Have the block.
            layer: Which block.
            watch: Called after each batch; may raise to stop.

        Returns:
            float32 [H_kv, D]: the largest magnitude of each channel of the rotated keys; NaN or infinite where the
            model computes that.
        """
        spec = weights.spec
        largest = torch.zeros(spec.num_kv_heads, spec.head_dim)

        def look(_: int, _queries: torch.Tensor, keys: torch.Tensor) -> None:
            torch.maximum(largest, keys.abs().amax((0, 2)), out=largest)

        oracle = Oracle(weights, resident=False, observe_keys=look)
        for x in self.calibration:
            oracle.block(layer, x)
            watch()
        return largest.numpy()

    def run_full(
        self, weights: Weights, layer: int, recipe: Recipe, keys: KeyMoments, watch: Callable[[], None]
    ) -> dict[str, InputStatistics]:
        """Pass the full-precision streams through a block.

        Args:
            weights: Have the block.
            layer: Which block.
            recipe: Says what the statistics are for.
            keys: Counts the calibration text's keys and queries.
            watch: Called after each batch; may raise to stop.

        Returns:
            Statistics of the calibration text at the input of each of the block's linear layers.

        Raises:
            QuantizationError: an activation is NaN or infinite.
        """
        statistics = _no_statistics(weights.spec, layer, recipe)
        oracle = _observing(weights, statistics)
        oracle.observe_keys = keys.observe
        self.calibration = _pass(oracle, layer, self.calibration, watch)
        oracle.observe = oracle.observe_keys = None
        self.full = _pass(oracle, layer, self.full, watch)
        return statistics

    def run_low(
        self, weights: Weights, layer: int, linears: Mapping[str, PackedLinear], watch: Callable[[], None]
    ) -> None:
        """Pass the low-bit stream through a block.

        Args:
            weights: Have the norms.
            layer: Which block.
            linears: The block's linear layers.
            watch: Called after each batch; may raise to stop.
        """
        oracle = Oracle(LowBitWeights(weights, linears), resident=False)
        self.low = _pass(oracle, layer, self.low, watch)


class LowBitWeights:
    """Weights for the oracle: low-bit linear layers, dequantized when asked for, and the norms of others."""

    def __init__(self, others: Weights, linears: Mapping[str, PackedLinear]) -> None:
        self._others = others
        self._linears = linears

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        return self._others.spec

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32 [width]."""
        return self._others.vector(name)

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer's weight float32 [N, K] and bias float32 [N] or None."""
        linear = self._linears[name]
        bias = None if linear.bias is None else torch.from_numpy(linear.bias)
        return torch.from_numpy(dequantize(linear)), bias

    def embedding(self) -> torch.Tensor:
        """The embedding table [V, C] as it will be stored."""
        return self._others.embedding().to(torch.float16)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm. [..., C] -> the same."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _pass(oracle: Oracle, layer: int, batches: Batches, watch: Callable[[], None]) -> Batches:
    outputs = []
    for x in batches:
        outputs.append(oracle.block(layer, x))
        watch()
    return outputs


def _no_statistics(spec: ModelSpec, layer: int, recipe: Recipe) -> dict[str, InputStatistics]:
    return {
        f"layers.{layer}.{kind}": InputStatistics.empty(
            spec.linear_shape(kind)[1],
            second_moments=recipe.method in SECOND_MOMENTS,
            expected_k_chunk=recipe.left_out,
        )
        for kind in LAYER_TYPES
    }


def _observing(weights: Weights, statistics: Mapping[str, InputStatistics]) -> Oracle:
    """A decoder that adds the inputs of linear layers to their statistics."""
    return Oracle(weights, resident=False, observe=lambda name, x: statistics[name].add(x.numpy(), name))
