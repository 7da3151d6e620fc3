"""Quality of a low-bit model in chat: prompts without compensation, decoded tokens with it.

While a model is quantized, the evaluation text passes through it once for every *trial*: so many salient channels
compensated, or more bits. The first half of a sequence is the prompt, the second half what is decoded and scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from models import per_token
from models.packed import PackedLinear
from models.quantizers.dequantize import dequantize, dequantize_residual
from models.recipe import LARGEST_BITS, Recipe
from models.salience import levels, without_salient


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


class ChatLinear:
    """A linear layer in all trials.

    Args:
        linear: As the recipe has it.
        other: As `finer` has it; None where no trial asks for that.
        trials: How the model is tried.
    """

    def __init__(self, linear: PackedLinear, other: PackedLinear | None, trials: Sequence[Trial]) -> None:
        self._linear, self._other, self._trials = linear, other, trials

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs float32 [trials * B, S, N] of inputs float32 [trials * B, S, K]; weights live no longer than this."""
        inputs = x.chunk(len(self._trials))
        outputs = [torch.empty(0)] * len(inputs)
        for linear, finer in ((self._linear, False), (self._other, True)):
            chosen = [index for index, trial in enumerate(self._trials) if trial.finer == finer]
            if linear is None or not chosen:
                continue
            bias = None if linear.bias is None else torch.from_numpy(linear.bias)
            weight = torch.from_numpy(dequantize(linear))
            for index in chosen:
                seen = per_token.rounded(inputs[index]) if linear.per_token else inputs[index]
                outputs[index] = torch.nn.functional.linear(seen, weight, bias)
            del weight
            compensated = [index for index in chosen if self._trials[index].k_chunk]
            if linear.residual is None or not compensated:
                continue
            residual = torch.from_numpy(dequantize_residual(linear.residual, linear.shape))  # [K, N]
            decoded = x.shape[1] // 2
            for index in compensated:
                restored = salient(inputs[index][:, decoded:], self._trials[index].k_chunk)
                outputs[index][:, decoded:] += restored @ residual
        return torch.cat(outputs)


def salient(x: torch.Tensor, k_chunk: int) -> torch.Tensor:
    """Activations float32 [..., K] of which the salient ones alone are left."""
    rows = x.reshape(-1, x.shape[-1])
    return (rows - torch.from_numpy(without_salient(rows.numpy(), k_chunk))).view_as(x)
