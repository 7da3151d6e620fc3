"""Quality of a low-bit model in chat (prompts without compensation, decoded tokens with it), and what a listing shows.

While a model is quantized, the evaluation text passes through it once for every *trial*: so many salient channels
compensated, or more bits. The first half of a sequence is the prompt, the second half what is decoded and scored.
Trials of the same weights share the prompt: decoded halves stand behind it one after the other, and see it and
themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from models.oracle import Oracle, Rows
from models.quantize.calibration import FEWEST_TOKENS, levels, reached
from models.quantize.lowered import LoweredLinear
from models.quantizers import SECOND_MOMENTS
from models.recipe import LARGEST_BITS, SMALLEST_BITS, Recipe
from models.spec import ModelSpec
from models.store import layout
from models.store.manifest import FileEntry, Summary


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
    if recipe.bits >= LARGEST_BITS or not recipe.uniform:
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
        prompt = length // (branches + 1)
        return cls(prompt=prompt, decoded=(length - prompt) // branches)

    def branch(self, index: int) -> slice:
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


LIMIT = 1.15
"""A model whose perplexity grows by more than this factor is warned about."""
_LOSSLESS = 8
"""Bits of a source that is as good as the original."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Perplexities on the evaluation text as a chat gets them, and what follows from them."""

    perplexity_before: float | None
    """Of the full-precision model; None if not measured."""
    perplexity_after: float | None
    """Of the low-bit model with what the default budget buys as a rule; None if not measured or not finite."""
    warning: str | None

    @classmethod
    def judge(cls, before: float | None, found: Sequence[float], recipe: Recipe) -> Quality:
        """Compare perplexities; `LIMIT` is where a warning begins.

        Args:
            before: Of the full-precision model, or None.
            found: Of the low-bit model in every trial (`models.quantize.quality.trials`), or nothing.
            recipe: How it was quantized.
        """
        if before is None or not found:
            return cls(perplexity_before=before, perplexity_after=None, warning=None)
        measured = dict(zip(trials(recipe), found, strict=True))
        after = measured[Trial(k_chunk=usual(recipe))]
        warning = None if after <= LIMIT * before else _warning(before, measured, recipe)
        return cls(perplexity_before=before, perplexity_after=after if math.isfinite(after) else None, warning=warning)

    def with_experts(self, tokens: Sequence[int], recipe: Recipe) -> Quality:
        """The same with a word on experts that too few of the calibration text's tokens reached, if there are any."""
        few = sum(not reached(count) for count in tokens)
        if not few or recipe.method not in SECOND_MOMENTS:
            return self
        note = (
            f"{few:,} of {len(tokens):,} experts were chosen for fewer than {FEWEST_TOKENS} tokens of the calibration "
            "text, so they are rounded plainly"
        )
        return self._with(note)

    def with_source(self, types: Mapping[str, int] | None) -> Quality:
        """The same with a word on a source of fewer than 8 bits, if it is one.

        Args:
            types: Number of weights by the type that the checkpoint stores them in, most first; None: as floats.
        """
        common = next(iter(types), "") if types else ""
        bits = re.search(r"\d+", common)
        if bits is None or int(bits[0]) >= _LOSSLESS:
            return self
        return self._with(
            f"made of {common} weights: residuals restore those, not the model before they were quantized"
        )

    def _with(self, note: str) -> Quality:
        return replace(self, warning=note if self.warning is None else f"{self.warning}; {note}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _warning(before: float, measured: Mapping[Trial, float], recipe: Recipe) -> str:
    """A sentence on the loss and on recipes that would lose less, with the measured numbers."""
    after = measured[Trial(k_chunk=usual(recipe))]
    grown = f"from {before:.2f} to {_shown(after)}" if math.isfinite(after) else "beyond all numbers"
    way = f"{recipe.bits:g} bits without compensation"
    if usual(recipe):
        way = f"{recipe.bits:g} bits with {usual(recipe)} of 1024 channels compensated"
    others = [
        f"4 bits by plain rounding have {_shown(value)}"
        if trial.finer
        else f"{trial.k_chunk} channels, a larger budget, give {_shown(value)}"
        for trial, value in measured.items()
        if value < after and (trial.finer or trial.k_chunk > usual(recipe))
    ]
    better = f": {', '.join(others)}" if others else ": choose a smaller group size or a larger model"
    between = ", 3.5 bits lie between" if recipe.bits == SMALLEST_BITS and len(others) > 1 else ""
    return f"as a chat gets it, perplexity rises {grown} at {way}{better}{between}"


def _shown(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else "more than a million"


def summarize(spec: ModelSpec, recipe: Recipe, quality: Quality, files: Mapping[str, FileEntry]) -> Summary:
    """Sizes by use, from the layout that the files follow."""
    weights, sizes = 0, layout.sizes(spec, recipe)
    for name in spec.linear_names():
        weights += math.prod(spec.linear_shape(name))
    return Summary(
        family=spec.family,
        parameters=spec.parameters,
        context=spec.max_context,
        bits_per_weight=round(8 * sizes.codes / weights, 4),
        gpu_bytes=sizes.device,
        active_bytes=None if spec.mixture is None else sizes.active,
        residual_bytes=sizes.residuals,
        disk_bytes=sum(entry.bytes for entry in files.values()),
        perplexity_before=quality.perplexity_before,
        perplexity_after=quality.perplexity_after,
        warning=quality.warning,
    )
