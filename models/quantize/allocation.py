"""The choice of the blocks that get 4 bits where the recipe asks for an average between 3 and 4.

A block is as sensitive as the model's next-token distribution changes when that block alone is at 3 bits and everything
else in full precision: the Kullback-Leibler divergence, averaged over the tokens of the calibration text. The most
sensitive blocks get 4 bits. The 3-bit weights are those of round-to-nearest, whatever the recipe's method: better
methods need statistics of the inputs and much more time, and the block's place among the others is what matters.

One pass over the checkpoint serves all blocks. The hidden states of the untouched model and of one copy for every block
passed so far move on together, so each block's weights are read twice, and the head's once. Beyond one block in float32
this takes `STATES_BYTES` for the hidden states and what a batch of a few windows needs inside a block. For L blocks it
costs as much as L / 2 passes over the tokens used.

Source: QDEC §5.1 (3.5 bits: half of the blocks at 3 bits and half at 4, by KL-divergence sensitivity).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from models import carried
from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.oracle import Oracle, capped
from models.quantize.streams import Batches
from models.quantizers.groups import rtn
from models.recipe import LARGEST_BITS, SMALLEST_BITS, Recipe
from models.spec import LAYER_TYPES, ModelSpec

MAX_TOKENS = 2048
"""Maximum number of calibration tokens."""
ENOUGH_TOKENS = 512
"""Number of tokens for large models."""
MAX_WORK = 6e12
"""Maximum number of multiplications for more tokens than that, a few minutes on two cores."""
STATES_BYTES = 384 << 20
"""Maximum bytes for the hidden states of all copies of the model; many wide blocks use fewer tokens."""
_FEWEST_TOKENS = 16
_BATCH = 4
"""Number of copies that pass a block together."""
_PIECE = 1 << 23
"""Number of weights processed at a time."""


def allocate(
    checkpoint: Checkpoint, recipe: Recipe, windows: Batches, watch: Callable[[float], None]
) -> tuple[int, ...]:
    """Choose the bits of every block.

    Args:
        checkpoint: The full-precision model.
        recipe: `bits` is the average wanted, `group_size` that of the 3-bit weights that are tried.
        windows: int64 [B, S] token windows of the calibration text.
        watch: Called with the share that is done; may raise to stop.

    Returns:
        3 or 4 for every block. Their average is the nearest to `recipe.bits` that there is, the larger of two.

    Raises:
        QuantizationError: there is no calibration text, or a weight or activation is NaN or infinite.
    """
    blocks = checkpoint.spec.num_layers
    large = _large_blocks(recipe.bits, blocks)
    if large in (0, blocks):
        return (SMALLEST_BITS if large == 0 else LARGEST_BITS,) * blocks
    return most_sensitive(divergences(checkpoint, recipe.group_size, windows, watch), recipe.bits)


def most_sensitive(sensitivity: Sequence[float] | npt.NDArray[np.float64], bits: float) -> tuple[int, ...]:
    """4 bits for the blocks with the largest sensitivities, the earlier of equals; 3 for the others."""
    blocks = len(sensitivity)
    order = sorted(range(blocks), key=lambda block: (-sensitivity[block], block))
    chosen = set(order[: _large_blocks(bits, blocks)])
    return tuple(LARGEST_BITS if block in chosen else SMALLEST_BITS for block in range(blocks))


def divergences(
    checkpoint: Checkpoint, group_size: int, windows: Batches, watch: Callable[[float], None]
) -> npt.NDArray[np.float64]:
    """KL(full precision || one block at 3 bits) of the next-token distribution, in nats, averaged over tokens.

    Args:
        checkpoint: The full-precision model.
        group_size: Input channels that share a scale in the 3-bit block.
        windows: int64 [B, S] token windows; sequences from all over them are used, see `MAX_TOKENS`.
        watch: Called with the share that is done; may raise to stop.

    Returns:
        float64 [blocks]; infinity where the 3-bit block makes the model compute NaN or infinity.

    Raises:
        QuantizationError: there are no windows, or a weight or activation is NaN or infinite.
    """
    spec = checkpoint.spec
    tokens = _sample(windows, _token_limit(spec))
    if not tokens:
        raise QuantizationError("an average number of bits needs a calibration text; give one, or choose 3 or 4 bits")
    states = _embed(checkpoint, tokens)
    passes = [layer + 2 for layer in range(spec.num_layers)]  # per block: all copies and the new one
    total = sum(passes) + spec.num_layers + 1
    for layer in range(spec.num_layers):
        _advance(checkpoint, group_size, layer, states)
        watch(sum(passes[: layer + 1]) / total)
    norm, states = checkpoint.vector("norm"), [state[..., : spec.hidden_size] for state in states]
    for state in states:
        for copy in state:
            copy.mul_(torch.rsqrt(copy.square().mean(-1, keepdim=True) + spec.norm_eps)).mul_(norm)
    return _compare(checkpoint, states, lambda share: watch(1 - (1 - share) * (spec.num_layers + 1) / total))


def _large_blocks(bits: float, blocks: int) -> int:
    exact = (bits - SMALLEST_BITS) * blocks
    return min(blocks, math.floor(round(exact, 6) + 0.5))


def _token_limit(spec: ModelSpec) -> int:
    fitting = STATES_BYTES // (4 * (spec.num_layers + 1) * carried.carried_width(spec))
    weights = sum(math.prod(spec.linear_shape(kind)) * spec.products(kind) for kind in LAYER_TYPES)
    affordable = int(MAX_WORK / (weights * (spec.num_layers + 1) / 2))
    return max(_FEWEST_TOKENS, min(MAX_TOKENS, max(ENOUGH_TOKENS, affordable), fitting))


def _sample(windows: Batches, limit: int) -> list[torch.Tensor]:
    """Sequences int64 [S] at equal distances in the text, `limit` tokens in all; a single one may be cut."""
    sequences = [sequence for window in windows for sequence in window]
    if sum(map(len, sequences)) <= limit:
        return sequences
    wanted = max(1, limit // max(map(len, sequences)))
    return [sequences[index * len(sequences) // wanted][:limit] for index in range(wanted)]


def _embed(checkpoint: Checkpoint, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of the first block, float32 [1 + blocks, S, ...]: of the untouched model, and room for the copies."""
    spec, states = checkpoint.spec, []
    for sequence in tokens:
        state = torch.zeros(spec.num_layers + 1, len(sequence), carried.carried_width(spec))
        state[0] = carried.begin(spec, sequence, checkpoint.embedded(sequence))
        states.append(state)
    return states


def _advance(checkpoint: Checkpoint, group_size: int, layer: int, states: list[torch.Tensor]) -> None:
    """Pass a block: the copies so far in full precision, and one more from the untouched model at 3 bits."""
    low = Oracle(_CoarseBlock(checkpoint, group_size), resident=False)
    for state in states:
        state[layer + 1] = low.block(layer, state[:1])[0]
    del low
    full = Oracle(checkpoint, resident=False)
    for state in states:
        for start in range(0, layer + 1, _BATCH):
            part = state[start : min(start + _BATCH, layer + 1)]
            part.copy_(full.block(layer, part))
        if not torch.isfinite(state[0]).all():
            raise QuantizationError(
                f"the full-precision model computes NaN or infinity in block {layer}; the checkpoint is damaged"
            )


def _compare(
    checkpoint: Checkpoint, states: list[torch.Tensor], watch: Callable[[float], None]
) -> npt.NDArray[np.float64]:
    """Divergences of the copies' next-token distributions, from head inputs float32 [1 + blocks, S, C]."""
    divergence = [Divergence(state, checkpoint.spec.logit_cap) for state in states]
    rows, width = checkpoint.spec.linear_shape("head")
    step = max(1, _PIECE // width)
    for start in range(0, rows, step):
        piece = checkpoint.head_rows(start, min(step, rows - start)).to(torch.float32)
        for part in divergence:
            part.add(piece)
        watch(min(rows, start + step) / rows)
    found = sum(part.total() for part in divergence) / sum(state.shape[1] for state in states)
    return np.where(np.isfinite(found), np.maximum(found, 0), np.inf)


class Divergence:
    """KL divergence between next-token distributions, from logits that arrive a piece of the vocabulary at a time.

    Args:
        x: float32 [1 + copies, S, C], inputs of the head: of the model to compare with, and of the others.
        cap: `ModelSpec.logit_cap`.
    """

    def __init__(self, x: torch.Tensor, cap: float | None = None) -> None:
        self._x = x
        self._cap = cap
        self._maximum = torch.full(x.shape[:2], -torch.inf, dtype=torch.float64)
        self._sum = torch.zeros(x.shape[:2], dtype=torch.float64)  # Σ exp(logit - maximum)
        self._cross = torch.zeros(x.shape[:2], dtype=torch.float64)  # Σ exp(z - maximum) (z - logit), z the first's

    def add(self, weight: torch.Tensor) -> None:
        """Take in further rows of the head, float32 [n, C]."""
        self.take(x @ weight.T for x in self._x)

    def take(self, logits: Iterable[torch.Tensor]) -> None:
        """Take in further logits before their cap, float32 [S, n]: of the model to compare with, then of each copy."""
        remaining = iter(logits if self._cap is None else (capped(own, self._cap) for own in logits))
        reference = next(remaining)
        before = self._maximum[0].clone()
        shares = self._accumulate(0, reference)
        self._cross *= (before - self._maximum[0]).exp()
        for copy, own in enumerate(remaining, 1):
            self._cross[copy] += (shares * (reference - own)).sum(1, dtype=torch.float64)
            self._accumulate(copy, own)

    def _accumulate(self, copy: int, logits: torch.Tensor) -> torch.Tensor:
        """Add to a row's sum. Returns exp(logits - maximum)."""
        maximum = torch.maximum(self._maximum[copy], logits.amax(1).to(torch.float64))
        self._sum[copy] *= (self._maximum[copy] - maximum).exp()
        shares = (logits - maximum.to(torch.float32)[:, None]).exp_()
        self._sum[copy] += shares.sum(1, dtype=torch.float64)
        self._maximum[copy] = maximum
        return shares

    def total(self) -> npt.NDArray[np.float64]:
        """float64 [copies]: the divergences, summed over the S positions."""
        normalizer = self._sum.log() + self._maximum
        found = self._cross[1:] / self._sum[0] - normalizer[0] + normalizer[1:]
        return found.sum(1).numpy()


class _CoarseBlock:
    """Weights for the oracle: linear layers rounded to 3 bits when asked for, and a checkpoint's norms."""

    def __init__(self, checkpoint: Checkpoint, group_size: int) -> None:
        self._checkpoint = checkpoint
        self._group_size = group_size

    @property
    def spec(self) -> ModelSpec:
        return self._checkpoint.spec

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32 [width]."""
        return self._checkpoint.vector(name)

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer's weight at 3 bits as float32 [N, K], and its bias."""
        weight, bias = self._checkpoint.linear(name)
        rounded = torch.empty(weight.shape, dtype=torch.float32)
        step = max(1, _PIECE // weight.shape[1])
        try:
            for start in range(0, len(weight), step):
                rows = weight[start : start + step].to(torch.float32).numpy()
                codes = rtn(rows, SMALLEST_BITS, self._group_size)
                rounded[start : start + step] = torch.from_numpy(codes.dequantize())
        except QuantizationError as error:
            raise QuantizationError(f"{name}: {error}") from error
        return rounded, bias

    def embedding(self) -> torch.Tensor:
        """The embedding table [V, C]."""
        return self._checkpoint.embedding()

    def token_rows(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        return self._checkpoint.token_rows(tokens, layer)
