"""What stands around the blocks: embedding table, last norm, output head, and the perplexities measured at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models.calibration import InputStatistics
from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.packed import PackedLinear
from models.quantize.matrix import MatrixQuantizer, stored_tensors
from models.quantize.scales import sample, search
from models.quantize.streams import Batches, Streams, normed
from models.quantizers import SCALED, SECOND_MOMENTS
from models.recipe import Recipe
from models.store.tensors import Array, PiecewiseTensor

_PIECE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """The result for embedding, norm and head."""

    tensors: dict[str, Array | PiecewiseTensor]
    """What outer.safetensors holds."""
    head: PackedLinear
    """The head among them."""
    norm: torch.Tensor
    """The norm before it, as it is stored: float32 [C]."""
    perplexity_before: float | None
    """Of the full-precision model; None without an evaluation text."""
    perplexity_after: float | None
    """Of the low-bit model without compensation; None as above, infinite if its numbers overflow."""


class Likelihood:
    """Negative log-likelihood of target tokens, from logits that arrive a piece of the vocabulary at a time."""

    def __init__(self, x: torch.Tensor, targets: torch.Tensor) -> None:
        self.x = x  # [T, C]
        self.targets = targets  # [T]
        self._maximum = torch.full((x.shape[0],), -torch.inf)
        self._sum = torch.zeros(x.shape[0], dtype=torch.float64)
        self._target = torch.zeros(x.shape[0])

    def add(self, rows: slice, weight: torch.Tensor) -> None:
        """Take in the head's rows for the tokens `rows`, float32 [n, C]."""
        logits = self.x @ weight.T
        maximum = torch.maximum(self._maximum, logits.amax(1))
        self._sum *= (self._maximum - maximum).to(torch.float64).exp()
        inside = (self.targets >= rows.start) & (self.targets < rows.stop)
        found = logits.gather(1, (self.targets - rows.start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self._target = torch.where(inside, found, self._target)
        self._sum += logits.sub_(maximum[:, None]).exp_().sum(1, dtype=torch.float64)
        self._maximum = maximum

    def perplexity(self) -> float | None:
        """The exponential of the mean over all targets; None without targets."""
        if not len(self.targets):
            return None
        mean = float((self._sum.log() + self._maximum - self._target).mean())
        return math.exp(mean) if mean < 700 else math.inf


def quantize_outer(
    checkpoint: Checkpoint,
    recipe: Recipe,
    streams: Streams,
    evaluation: Batches,
    watch: Callable[[float], None],
    sensitivity: npt.NDArray[np.floating] | None = None,
) -> Outer:
    """Quantize the head and measure perplexity before and after.

    Args:
        checkpoint: The full-precision model.
        recipe: How to quantize.
        streams: Hidden states after the last block.
        evaluation: int64 [B, S] token windows of the evaluation text.
        watch: Called with the share that is done; may raise to stop.
        sensitivity: Of the loss to each weight of the head [V, C], for a method that needs it.

    Raises:
        QuantizationError: a weight or activation is NaN or infinite, or out of range.
    """
    spec = checkpoint.spec
    shape = (spec.vocab_size, spec.hidden_size)
    norm = checkpoint.vector("norm")
    weight, bias = checkpoint.linear("head")
    statistics = _statistics(streams, norm, recipe, spec.norm_eps)
    scales, stored_norm = np.ones(spec.hidden_size, np.float32), norm
    if recipe.method in SCALED:
        part = weight[sample(*shape)].to(torch.float32).numpy()
        scales = search(part, statistics, recipe.head_bits, recipe.group_size, np.arange(spec.hidden_size))
        stored_norm = norm / torch.from_numpy(scales)
        statistics = _statistics(streams, stored_norm, recipe, spec.norm_eps)
    full = Likelihood(*_scored(streams.full, evaluation, norm, spec.norm_eps))
    low = Likelihood(*_scored(streams.low, evaluation, stored_norm, spec.norm_eps))
    matrix = MatrixQuantizer("head", shape, recipe, hessian=statistics.hessian, sensitivity=sensitivity)
    for piece in matrix.pieces():
        rows = weight[piece].to(torch.float32)
        full.add(piece, rows)
        low.add(piece, torch.from_numpy(matrix.add(piece, rows.numpy() * scales)))
        watch(piece.stop / spec.vocab_size)
    before, after = full.perplexity(), low.perplexity()
    if before is not None and not math.isfinite(before):
        raise QuantizationError("the full-precision model computes NaN or infinity; the checkpoint is damaged")
    head = matrix.finish(bias, statistics)
    return Outer(
        tensors={
            "embed": _half(checkpoint.embedding()),
            "norm": stored_norm.numpy(),
            **stored_tensors(head),
        },
        head=head,
        norm=stored_norm,
        perplexity_before=before,
        perplexity_after=math.inf if after is not None and math.isnan(after) else after,
    )


def _statistics(streams: Streams, norm: torch.Tensor, recipe: Recipe, eps: float) -> InputStatistics:
    """Of the head's inputs over the calibration text."""
    statistics = InputStatistics.empty(
        norm.shape[0], second_moments=recipe.method in SECOND_MOMENTS, expected_k_chunk=recipe.left_out
    )
    for x in streams.calibration:
        statistics.add(normed(x, norm, eps).numpy(), "head")
    return statistics


def _scored(batches: Batches, tokens: Batches, norm: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Head inputs [T, C] and targets [T]: every token of a window but its first is predicted from those before it."""
    inputs = [normed(x[:, :-1], norm, eps).flatten(0, 1) for x in batches]
    targets = [window[:, 1:].flatten() for window in tokens]
    if not inputs:
        return torch.empty(0, norm.shape[0]), torch.empty(0, dtype=torch.int64)
    return torch.cat(inputs), torch.cat(targets)


def _half(table: torch.Tensor) -> PiecewiseTensor:
    """An embedding table as float16 [V, C], converted piece by piece while it is written."""
    step = max(1, _PIECE // max(1, table.shape[1]))

    def pieces() -> Iterator[Array]:
        for start in range(0, table.shape[0], step):
            piece = table[start : start + step].to(torch.float16)
            if not torch.isfinite(piece).all():
                raise QuantizationError("the embedding table holds NaN, infinity or numbers beyond fp16's range")
            yield piece.numpy()

    return PiecewiseTensor(dtype=np.dtype(np.float16), shape=tuple(table.shape), pieces=pieces)
