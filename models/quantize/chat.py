"""Quality of a low-bit model in chat: prompts without compensation, decoded tokens with it.

While a model is quantized, the evaluation text passes through it once for every *trial*: so many salient channels
compensated, or more bits. The first half of a sequence is the prompt, the second half what is decoded and scored.
Trials of the same weights share the prompt: decoded halves stand behind it one after the other, and see it and
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from models.oracle import Oracle, Rows
from models.quantize.lowered import LoweredLinear
from models.recipe import LARGEST_BITS, Recipe
from models.salience import levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to run the model."""

    k_chunk: int
    """Salient channels per 1024 that are compensated where tokens are decoded."""
    finer: bool = False
    """Whether the blocks have the bits of `finer` instead of the recipe's."""


def trials(recipe: Recipe) -> tuple[Trial, ...]:
    """The trials of a new model, in the order of its streams.

    The recipe's levels, and where it has less than 4 bits, what 4 bits would give by plain rounding. The one that the
    default budget is about to buy is `usual`.
    """
    found = [Trial(k_chunk=k_chunk) for k_chunk in levels(recipe.left_out)]
    if finer(recipe) is not None:
        found.append(Trial(k_chunk=usual(recipe), finer=True))
    return tuple(found)


def usual(recipe: Recipe) -> int:
    """Salient channels per 1024 that the default budget buys, as a rule: the first of the recipe's levels but none."""
    return levels(recipe.left_out)[:2][-1]


def finer(recipe: Recipe) -> Recipe | None:
    """The comparison for recipes of less than 4 bits: 4 bits by plain rounding, which takes little time."""
    if recipe.bits >= LARGEST_BITS or recipe.codebook:
        return None
    return replace(recipe, method="rtn", bits=LARGEST_BITS, block_bits=None)


def branched(x: torch.Tensor, branches: int) -> torch.Tensor:
    """Windows [B, S, ...] with the decoded half once for each trial: [B, P + branches * D, ...]. Prompts are alike."""
    prompt = x.shape[1] // 2
    return torch.cat((x[:, :prompt], *[x[:, prompt:]] * branches), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a window's parts lie in `branched`'s result."""

    prompt: int
    """P, tokens of the prompt."""
    decoded: int
    """D, tokens of each branch."""

    @classmethod
    def of(cls, length: int, branches: int) -> Layout:
        """Of a window that takes so many positions."""
        prompt = length // (branches + 1)
        return cls(prompt=prompt, decoded=(length - prompt) // branches)

    def branch(self, index: int) -> slice:
        """Positions of a branch."""
        return slice(self.prompt + index * self.decoded, self.prompt + (index + 1) * self.decoded)

    def places(self, branches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each position's place in its sequence, and its branch from 1; 0 for the prompt. int64 [P + branches * D]."""
        prompt, decoded = torch.arange(self.prompt), self.prompt + torch.arange(self.decoded)
        numbers = torch.arange(1, branches + 1).repeat_interleave(self.decoded)
        return torch.cat((prompt, decoded.repeat(branches))), torch.cat((torch.zeros_like(prompt), numbers))


class ChatLinear:
    """A linear layer in all trials of the same weights.

    Args:
        lowered: The layer; what is restored of an expert's is let go of after each use.
        trials: Of its weights, in the order of the branches.
        oracle: The model that it is a layer of.
    """

    def __init__(self, lowered: LoweredLinear, trials: Sequence[Trial], oracle: Oracle) -> None:
        self._lowered, self._trials, self._oracle = lowered, trials, oracle

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [B, P + branches * D, N] of inputs float32 [B, P + branches * D, K]; or [n, N] of [n, K]."""
        rows, y = self._oracle.rows, self._lowered.plain(x)
        layout = Layout.of(x.shape[1] if rows is None else rows.length, len(self._trials))
        for index, trial in enumerate(self._trials):
            if trial.k_chunk:
                own = layout.branch(index)
                at = (slice(None), own) if rows is None else _within(rows, own)
                y[at] += self._lowered.restored(x[at], trial.k_chunk)
        if rows is not None:
            self._lowered.release()
        return y


def _within(rows: Rows, positions: slice) -> torch.Tensor:
    """Which of some rows are at these positions of their sequence: bool [n]."""
    places = rows.places % rows.length
    within: torch.Tensor = (places >= positions.start) & (places < positions.stop)
    return within
