"""The parts around the blocks: embedding table, last norm and output head, and the perplexities measured there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models import per_token
from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.oracle import capped
from models.packed import PackedLinear
from models.quantize.calibration import InputStatistics
from models.quantize.lowered import fast_products, salient
from models.quantize.matrix import MatrixQuantizer, stored_tensors
from models.quantize.quality import Layout, trials
from models.quantize.scales import sample, search
from models.quantize.streams import Batches, Streams, normed
from models.quantizers import SCALED, SECOND_MOMENTS
from models.quantizers.groups import FloatArray
from models.recipe import Recipe
from models.store.tensors import Array, PiecewiseTensor

_PIECE = 1 << 24
OUTLINED = 256
"""Most likely tokens of the full-precision model's distributions that are kept; all others count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """The result for embedding, norm and head."""

    tensors: dict[str, Array | PiecewiseTensor]
    head: PackedLinear
    norm: torch.Tensor
    """The norm before it, as it is stored: float32 [C]."""
    perplexity_before: float | None
    """Of the full-precision model; None without an evaluation text."""
    perplexities: tuple[float, ...]
    """Of the low-bit model in every trial; empty as above, infinite where its numbers overflow."""
    reference: dict[str, Array | PiecewiseTensor]
    """Tensors of `layout.REFERENCE`; empty without an evaluation text."""


class Likelihood:
    """Negative log-likelihood of target tokens, from logits that arrive a piece of the vocabulary at a time."""

    def __init__(self, targets: torch.Tensor) -> None:
        self.targets = targets  # [T]
        self._maximum = torch.full((len(targets),), -torch.inf)
        self._sum = torch.zeros(len(targets), dtype=torch.float64)
        self._target = torch.zeros(len(targets))

    def add(self, rows: slice, logits: torch.Tensor) -> None:
        """Take in the logits float32 [T, n] of the tokens `rows`; they are overwritten."""
        maximum = torch.maximum(self._maximum, logits.amax(1))
        self._sum *= (self._maximum - maximum).to(torch.float64).exp()
        inside = (self.targets >= rows.start) & (self.targets < rows.stop)
        found = logits.gather(1, (self.targets - rows.start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self._target = torch.where(inside, found, self._target)
        self._sum += logits.sub_(maximum[:, None]).exp_().sum(1, dtype=torch.float64)
        self._maximum = maximum

    @property
    def normalizers(self) -> torch.Tensor:
        """Log of the sum of exponentials of each token's logits, float64 [T]."""
        return self._sum.log() + self._maximum

    def perplexity(self) -> float:
        """The exponential of the mean over all targets; infinity where that is no number."""
        mean = float((self.normalizers - self._target).mean())
        return math.exp(mean) if mean < 700 else math.inf


class Leaders:
    """The largest logits of each of T tokens, which arrive as for `Likelihood`."""

    def __init__(self, tokens: int) -> None:
        self._logits = torch.empty(tokens, 0)
        self._ids = torch.empty(tokens, 0, dtype=torch.int64)

    def add(self, rows: slice, logits: torch.Tensor) -> None:
        """Take in the logits float32 [T, n] of the tokens `rows`."""
        own = torch.arange(rows.start, rows.stop).expand(len(logits), -1)
        joined = torch.cat((self._logits, logits), 1)
        self._logits, at = joined.topk(min(OUTLINED, joined.shape[1]), dim=1)
        self._ids = torch.cat((self._ids, own), 1).gather(1, at)

    def tensors(self, normalizers: torch.Tensor) -> dict[str, Array]:
        """`leaders` int32 [T, n], most likely first, and the logarithms of their probabilities, float32 [T, n]."""
        logarithms = (self._logits - normalizers[:, None]).to(torch.float32)
        return {"leaders": self._ids.to(torch.int32).numpy(), "log_probabilities": logarithms.numpy()}


def quantize_outer(
    checkpoint: Checkpoint,
    recipe: Recipe,
    streams: Streams,
    evaluation: Batches,
    watch: Callable[[float], None],
    sensitivity: npt.NDArray[np.floating] | None = None,
) -> Outer:
    """Quantize the head and measure perplexity before and after, as a chat gets it.

    Args:
        checkpoint: The full-precision model.
        recipe: How to quantize.
        streams: Hidden states after the last block.
        evaluation: int64 [B, S] token windows of the evaluation text.
        watch: Called with the share that is done; may raise to stop.
        sensitivity: Of the loss to each weight of the head [V, C], for a method that needs it.
    """
    spec, streams = checkpoint.spec, streams.alone(checkpoint.spec)
    shape = (spec.vocab_size, spec.hidden_size)
    norm = checkpoint.vector("norm")
    statistics = _statistics(streams, norm, recipe, spec.norm_eps)
    scales, stored_norm = np.ones(spec.hidden_size, np.float32), norm
    if recipe.method in SCALED:
        part = torch.cat([checkpoint.head_rows(row, 1) for row in sample(*shape).tolist()]).to(torch.float32).numpy()
        scales = search(part, statistics, recipe.head_bits, recipe.group_size, np.arange(spec.hidden_size))
        stored_norm = norm / torch.from_numpy(scales)
        statistics = _statistics(streams, stored_norm, recipe, spec.norm_eps)
    judge = _Judge(streams, evaluation, (norm, stored_norm), recipe, spec.norm_eps, spec.logit_cap)
    matrix = MatrixQuantizer("head", shape, recipe, statistics, sensitivity=sensitivity)
    for piece in matrix.pieces():
        rows = checkpoint.head_rows(piece.start, piece.stop - piece.start).to(torch.float32)
        made = matrix.add(piece, rows.numpy() * scales)
        with fast_products(spec):
            judge.add(piece, rows, *made)
        watch(piece.stop / spec.vocab_size)
    before, after = judge.perplexities()
    if before is not None and not math.isfinite(before):
        raise QuantizationError("the full-precision model computes NaN or infinity; the checkpoint is damaged")
    head = matrix.finish(checkpoint.bias("head"))
    return Outer(
        tensors={
            **outer_tensors(checkpoint),
            "norm": stored_norm.numpy(),
            **stored_tensors(head),
        },
        head=head,
        norm=stored_norm,
        perplexity_before=before,
        perplexities=after,
        reference=judge.reference(),
    )


def _statistics(streams: Streams, norm: torch.Tensor, recipe: Recipe, eps: float) -> InputStatistics:
    """Of the head's inputs over the calibration text."""
    statistics = InputStatistics.empty(
        norm.shape[0], second_moments=recipe.method in SECOND_MOMENTS, expected_k_chunk=recipe.left_out
    )
    for x in streams.calibration:
        statistics.add(normed(x, norm, eps).numpy(), "head")
    return statistics


class _Judge:
    """Perplexities of the evaluation text, from a head that arrives a piece of the vocabulary at a time.

    Args:
        streams: Hidden states after the last block.
        evaluation: int64 [B, S] token windows; the first half of each is the prompt.
        norms: The norm before the head, in full precision and as it is stored.
        recipe: Says which trials there are.
        eps: Of the norms.
        cap: `ModelSpec.logit_cap`.
    """

    def __init__(
        self,
        streams: Streams,
        evaluation: Batches,
        norms: tuple[torch.Tensor, torch.Tensor],
        recipe: Recipe,
        eps: float,
        cap: float | None,
    ) -> None:
        self._any = bool(evaluation)
        self._cap = cap
        if not self._any:
            return
        targets = torch.cat([window[:, window.shape[1] // 2 :].flatten() for window in evaluation])
        self._full = (Likelihood(targets), normed(_answers(streams.full), norms[0], eps))
        self._windows, self._leaders = [sequence for batch in evaluation for sequence in batch], Leaders(len(targets))
        # What the prompt's last token predicts is not compensated: it comes from the prompt's step.
        decoded = torch.cat([(torch.arange(_answer(x).shape[1]) > 0).repeat(len(x)) for x in evaluation])
        self._low = []
        tried = trials(recipe)
        plain = [trial for trial in tried if not trial.finer]
        for trial in tried:
            own, among = (streams.finer, [trial]) if trial.finer else (streams.low, plain)
            x = normed(torch.cat([_branch(batch, among.index(trial), len(among)) for batch in own]), norms[1], eps)
            restored = salient(x, trial.k_chunk) * decoded[:, None] if trial.k_chunk else None
            seen = per_token.rounded(x) if recipe.per_token else x
            self._low.append((Likelihood(targets), seen, restored))

    def add(self, rows: slice, weight: torch.Tensor, low: FloatArray, residual: FloatArray | None) -> None:
        """Take in rows of the head: in full precision, Ŵ and R, float32 [n, C] each."""
        if not self._any:
            return
        likelihood, x = self._full
        logits = self._capped(x @ weight.T)
        self._leaders.add(rows, logits)
        likelihood.add(rows, logits)
        for likelihood, x, restored in self._low:
            logits = x @ torch.from_numpy(low).T
            if restored is not None and residual is not None:
                logits += restored @ torch.from_numpy(residual).T
            likelihood.add(rows, self._capped(logits))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._cap is None else capped(logits, self._cap)

    def reference(self) -> dict[str, Array | PiecewiseTensor]:
        """Tensors of `layout.REFERENCE`; nothing without a text."""
        if not self._any:
            return {}
        text = {
            "tokens": torch.cat(self._windows).to(torch.int32).numpy(),
            "lengths": np.asarray([len(window) for window in self._windows], np.int32),
        }
        return {**text, **self._leaders.tensors(self._full[0].normalizers)}

    def perplexities(self) -> tuple[float | None, tuple[float, ...]]:
        """Of the full-precision model, and of the low-bit one in every trial; nothing without a text."""
        if not self._any:
            return None, ()
        found = [likelihood.perplexity() for likelihood, *_ in self._low]
        return self._full[0].perplexity(), tuple(math.inf if math.isnan(value) else value for value in found)


def _answers(batches: Batches) -> torch.Tensor:
    """Hidden states [T, C] that predict the second halves of windows, from those of whole windows [B, S, C]."""
    return torch.cat([_answer(x).flatten(0, 1) for x in batches])


def _branch(x: torch.Tensor, index: int, branches: int) -> torch.Tensor:
    """Of one branch of windows [B, P + branches * D, C], the same as `_answers` [T, C]."""
    layout = Layout.of(x.shape[1], branches)
    return torch.cat((x[:, : layout.prompt], x[:, layout.branch(index)]), 1)[:, layout.prompt - 1 : -1].flatten(0, 1)


def _answer(x: torch.Tensor) -> torch.Tensor:
    """Of positions [B, S, ...] those whose next tokens are the second half."""
    return x[:, x.shape[1] // 2 - 1 : -1]


def outer_tensors(checkpoint: Checkpoint) -> dict[str, Array | PiecewiseTensor]:
    """The embedding tables, float16: [V, C], and [V, blocks * P] of the blocks' own."""
    spec = checkpoint.spec
    found = {"embed": _halves((spec.vocab_size, spec.hidden_size), checkpoint.embedding_rows)}
    if spec.token_width:
        found["tokens"] = _halves((spec.vocab_size, spec.num_layers * spec.token_width), checkpoint.token_table)
    return {**found}


def _halves(shape: tuple[int, ...], rows: Callable[[int, int], torch.Tensor]) -> PiecewiseTensor:
    """A table that is read and converted piece by piece while it is written.

    Args:
        shape: Its shape.
        rows: Gives those from a first one on, so many.
    """
    step = max(1, _PIECE // max(1, shape[1]))

    def pieces() -> Iterator[Array]:
        for start in range(0, shape[0], step):
            piece = rows(start, min(step, shape[0] - start)).to(torch.float16)
            if not torch.isfinite(piece).all():
                raise QuantizationError("the embedding table holds NaN, infinity or numbers beyond fp16's range")
            yield piece.numpy()

    return PiecewiseTensor(dtype=np.dtype(np.float16), shape=shape, pieces=pieces)
