"""Quality of a new low-bit model, and the numbers that a listing shows of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from models.quantize.chat import Trial, trials, usual
from models.quantize.experts import FEWEST_TOKENS, reached
from models.quantizers import SECOND_MOMENTS
from models.recipe import SMALLEST_BITS, Recipe
from models.spec import ModelSpec
from models.store import layout
from models.store.manifest import FileEntry, Summary

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
    """For the person, or None."""

    @classmethod
    def judge(cls, before: float | None, found: Sequence[float], recipe: Recipe) -> Quality:
        """Compare perplexities; `LIMIT` is where a warning begins.

        Args:
            before: Of the full-precision model, or None.
            found: Of the low-bit model in every trial (`models.quantize.chat.trials`), or nothing.
            recipe: How it was quantized.
        """
        if before is None or not found:
            return cls(perplexity_before=before, perplexity_after=None, warning=None)
        measured = dict(zip(trials(recipe), found, strict=True))
        after = measured[Trial(k_chunk=usual(recipe))]
        warning = None if after <= LIMIT * before else _warning(before, measured, recipe)
        return cls(perplexity_before=before, perplexity_after=after if math.isfinite(after) else None, warning=warning)

    def with_experts(self, tokens: Sequence[int], recipe: Recipe) -> Quality:
        """The same with a word on experts that too few of the calibration text's tokens reached, if there are any.

        Args:
            tokens: Those that reached each expert; nothing without experts.
            recipe: How it was quantized.
        """
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
        """A JSON object with the same fields."""
        return asdict(self)


def _warning(before: float, measured: Mapping[Trial, float], recipe: Recipe) -> str:
    """A sentence on the loss and on recipes that would lose less, with the measured numbers."""
    after = measured[Trial(k_chunk=usual(recipe))]
    grown = f"from {before:.2f} to {_shown(after)}" if math.isfinite(after) else "beyond all numbers"
    with_it = f" with {usual(recipe)} of 1024 channels compensated" if usual(recipe) else " without compensation"
    others = [
        f"4 bits by plain rounding have {_shown(value)}"
        if trial.finer
        else f"{trial.k_chunk} channels, a larger budget, give {_shown(value)}"
        for trial, value in measured.items()
        if value < after and (trial.finer or trial.k_chunk > usual(recipe))
    ]
    better = f": {', '.join(others)}" if others else ": choose a smaller group size or a larger model"
    between = ", 3.5 bits lie between" if recipe.bits == SMALLEST_BITS and len(others) > 1 else ""
    return f"as a chat gets it, perplexity rises {grown} at {recipe.bits:g} bits{with_it}{better}{between}"


def _shown(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else "more than a million"


def summarize(spec: ModelSpec, recipe: Recipe, quality: Quality, files: Mapping[str, FileEntry]) -> Summary:
    """Sizes by use, from the layout that the files follow.

    Args:
        spec: The architecture.
        recipe: How it was quantized.
        quality: Perplexities and warning.
        files: All files except the manifest.
    """
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
