"""The hidden states of the calibration text, block by block, while a model is quantized.

Five streams: the calibration text and the evaluation text in full precision, the evaluation text through the low-bit
blocks as a chat would and through finer ones to compare, and a part of the calibration text through copies of the model
of which one layer type is low-bit. They are saved between blocks, so that a killed run goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from models import carried
from models.checkpoint import Checkpoint
from models.oracle import Oracle, Weights
from models.quantize.calibration import ExpertInputs, InputStatistics, KeyMoments
from models.quantize.lowered import LoweredLinear, fast_products, products
from models.quantize.quality import ChatLinear, Layout, Trial, branched
from models.quantizers import SECOND_MOMENTS
from models.quantizers.groups import FloatArray
from models.recipe import Recipe
from models.spec import ModelSpec, expert_of
from models.store.tensors import Array, MappedTensors

Batches = list[torch.Tensor]
OBSERVED = 4
"""One of so many batches is enough to find scales by."""

_TOGETHER = 1024
"""Tokens that pass through a block at once: their activations are the largest thing in memory."""
_STREAMS = ("calibration", "full", "low", "finer", "copies")


@dataclass(slots=True, kw_only=True)
class Streams:
    """Inputs of the next block, each batch float32 [B, S, C], or wider: see `models.carried`."""

    calibration: Batches
    """The calibration text in full precision."""
    full: Batches
    """The evaluation text in full precision."""
    low: Batches
    """The evaluation text through the low-bit blocks, once for every trial (`models.quantize.quality`): [B, P + trials
    * D, C]."""
    finer: Batches = field(default_factory=list)
    """The same through blocks of more bits, for the trial that asks for them; nothing where none does."""
    copies: Batches = field(default_factory=list)
    """A part of the calibration text through copies of the model (see `models.quantize.copies`)."""

    @classmethod
    def start(
        cls, checkpoint: Checkpoint, calibration: Batches, evaluation: Batches, copies: Batches, tried: Sequence[Trial]
    ) -> Streams:
        """Embed tokens.

        Args:
            checkpoint: Has the embedding table.
            calibration: int64 [B, S] token windows.
            evaluation: The same.
            copies: Embedded already.
            tried: How the low-bit model is tried.
        """
        spec, finer = checkpoint.spec, sum(trial.finer for trial in tried)
        rows = [checkpoint.embedded(tokens) for tokens in evaluation]
        full, stored = (
            [carried.begin(spec, tokens, x.to(dtype)) for tokens, x in zip(evaluation, rows, strict=True)]
            for dtype in (torch.float32, torch.float16)
        )
        return cls(
            calibration=[carried.begin(spec, tokens, checkpoint.embedded(tokens)) for tokens in calibration],
            full=full,
            low=[branched(x, len(tried) - finer) for x in stored],
            finer=[branched(x, finer) for x in stored] if finer else [],
            copies=copies,
        )

    def alone(self, spec: ModelSpec) -> Streams:
        """The residual streams, [..., C], without what passes beside them."""
        parts = {stream: [x[..., : spec.hidden_size] for x in getattr(self, stream)] for stream in _STREAMS}
        return Streams(**parts)

    def tensors(self) -> dict[str, Array]:
        return {f"{stream}.{index}": x.numpy() for stream in _STREAMS for index, x in enumerate(getattr(self, stream))}

    @classmethod
    def load(cls, file: MappedTensors) -> Streams:
        """Undo `tensors`."""
        streams: dict[str, Batches] = {stream: [] for stream in _STREAMS}
        for name in sorted(file.entries, key=lambda name: int(name.rpartition(".")[2])):
            streams[name.rpartition(".")[0]].append(torch.from_numpy(np.array(file[name])))
        return cls(**streams)

    def observe(
        self, weights: Weights, layer: int, recipe: Recipe, watch: Callable[[], None]
    ) -> dict[str, InputStatistics]:
        """Look at the inputs of a block's linear layers over a part of the calibration text, which stays before it.

        Returns:
            Statistics at the input of each of the block's linear layers.
        """
        statistics = _no_statistics(weights.spec, layer, recipe)
        oracle = Oracle(weights, resident=False, products=products(weights.spec))
        _look(oracle, layer, self.calibration[::OBSERVED], statistics, watch)
        return statistics

    def largest_keys(self, weights: Weights, layer: int, watch: Callable[[], None]) -> FloatArray:
        """Look at a block's keys over the calibration text, which stays before the block.

        Returns:
            float32 [H_kv, D]: the largest magnitude of each channel of the rotated keys; NaN or infinite where the
            model computes that.
        """
        heads = weights.spec.heads_of(layer)
        largest = torch.zeros(heads.kv_heads, heads.dim)

        def look(_: int, _queries: torch.Tensor, keys: torch.Tensor) -> None:
            torch.maximum(largest, keys.abs().amax((0, 2)), out=largest)

        oracle = Oracle(weights, resident=False, observe_keys=look)
        for x in self.calibration:
            oracle.block(layer, x)
            watch()
        return largest.numpy()

    def run_full(
        self, oracle: Oracle, layer: int, recipe: Recipe, keys: KeyMoments, watch: Callable[[], None]
    ) -> tuple[dict[str, InputStatistics], ExpertInputs | None]:
        """Pass the full-precision streams through a block.

        Returns:
            Statistics of the calibration text at the input of each of the block's linear layers but experts, and the
            inputs of those, if it has any.
        """
        statistics = _no_statistics(oracle.spec, layer, recipe)
        experts = ExpertInputs(oracle.spec, layer, recipe) if oracle.spec.has_experts(layer) else None
        self.calibration = _look(oracle, layer, self.calibration, statistics, watch, keys, experts)
        self.full = _pass(oracle, layer, self.full, watch)
        return statistics, experts


def run_low(
    oracle: Oracle,
    layer: int,
    batches: Batches,
    linears: Mapping[str, LoweredLinear],
    tried: Sequence[Trial],
    watch: Callable[[], None],
) -> None:
    """Pass a low-bit stream through a block, in place."""
    oracle.replace = {name: ChatLinear(linear, tried, oracle) for name, linear in linears.items()}
    for x in batches:
        places = Layout.of(x.shape[1], len(tried)).places(len(tried))
        for part in torch.split(x, max(1, _TOGETHER // x.shape[1])):
            with fast_products(oracle.spec):
                part.copy_(oracle.block(layer, part, places[0], branches=places[1]))
            watch()
    oracle.replace = {}


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm. [..., C] -> the same."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _pass(oracle: Oracle, layer: int, batches: Batches, watch: Callable[[], None]) -> Batches:
    outputs = []
    for x in batches:
        with fast_products(oracle.spec):
            outputs.append(oracle.block(layer, x))
        watch()
    return outputs


def _no_statistics(spec: ModelSpec, layer: int, recipe: Recipe) -> dict[str, InputStatistics]:
    return {
        name: InputStatistics.empty(
            spec.linear_shape(name)[1],
            second_moments=recipe.method in SECOND_MOMENTS,
            products=products(spec),
            expected_k_chunk=recipe.left_out,
        )
        for name in spec.block_linears(layer)
        if expert_of(name) is None
    }


def _look(
    oracle: Oracle,
    layer: int,
    batches: Batches,
    statistics: Mapping[str, InputStatistics],
    watch: Callable[[], None],
    keys: KeyMoments | None = None,
    experts: ExpertInputs | None = None,
) -> Batches:
    """Pass batches through a block, and count the inputs of its linear layers, queries and keys in their statistics.

    Tokens count by `models.quantize.calibration`: as often as they are looked at, once by themselves and then by the
    attention they receive, if there is any; and what a layer adds to the residual stream is relative to the stream, the
    output of `o` to the block's input and that of `down` to its output. A norm behind such a layer divides by the size
    of the layer's output.
    """
    inputs: dict[str, torch.Tensor] = {}
    rows: dict[str, torch.Tensor] = {}
    received: list[torch.Tensor] = []

    def observe(name: str, x: torch.Tensor) -> None:
        inputs[name] = x
        if oracle.rows is not None:
            rows[name] = oracle.rows.places

    oracle.observe = observe
    oracle.observe_keys = None if keys is None else keys.observe
    oracle.observe_attention = lambda _, attention: received.append(attention)
    outputs = []
    for x in batches:
        with fast_products(oracle.spec):
            y = oracle.block(layer, x)
        looked_at = 1 + received.pop() if received else torch.ones(x.shape[:2])  # [B, S]
        C = oracle.spec.hidden_size
        streams = {"o": x[..., :C], "down": y[..., :C]}
        behind = {name.removesuffix("_norm"): inputs.pop(name) for name in list(inputs) if name.endswith("_norm")}

        with fast_products(oracle.spec):
            for name, own in statistics.items():
                own.add(inputs[name].numpy(), name, _counts(name, looked_at, streams, behind).numpy())
            if experts is not None:
                kinds = (f"layers.{layer}.gate_up", f"layers.{layer}.down")
                experts.add(inputs, rows, *(_counts(kind, looked_at, streams, behind).flatten() for kind in kinds))
        inputs.clear()
        rows.clear()
        outputs.append(y)
        watch()
    oracle.observe = oracle.observe_keys = oracle.observe_attention = None
    return outputs


def _counts(
    name: str, looked_at: torch.Tensor, streams: Mapping[str, torch.Tensor], behind: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """How much a squared error of each token's output of a layer weighs, float32 [B, S].

    Args:
        name: The layer.
        looked_at: float32 [B, S], how often the token is looked at.
        streams: The residual stream float32 [B, S, C] that a layer adds to, by its type.
        behind: The output float32 [B, S, C] of layers with a norm behind them, by name.
    """
    stream = streams.get(name.rpartition(".")[2])
    square = torch.ones(()) if stream is None else stream.square().mean(-1)
    if name in behind:
        square = square * behind[name].square().mean(-1)
    return (looked_at / square).nan_to_num(0, 0, 0)
