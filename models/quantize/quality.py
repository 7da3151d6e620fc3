"""Judging a fresh low-bit model, and the numbers that a listing shows of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from models.recipe import Recipe
from models.spec import ModelSpec
from models.store import layout
from models.store.manifest import FileEntry, Summary

COLLAPSE = 1.5
"""A model whose perplexity grows by more than this factor is warned about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Perplexities on the evaluation text and what follows from them."""

    perplexity_before: float | None
    """Of the full-precision model; None if not measured."""
    perplexity_after: float | None
    """Of the low-bit model without compensation; None if not measured or not finite."""
    warning: str | None
    """For the person, or None."""

    @classmethod
    def judge(cls, before: float | None, after: float | None, recipe: Recipe) -> Quality:
        """Compare perplexities; `COLLAPSE` is where a warning begins."""
        warning = None
        if before is not None and after is not None and not after <= COLLAPSE * before:
            grown = f"from {before:.2f} to {after:.2f}" if math.isfinite(after) else "beyond all numbers"
            warning = (
                f"perplexity rises {grown} at {recipe.bits:g} bits: expect poor answers without error compensation; "
                + ("choose 4 bits, " if recipe.bits < 4 else "choose a smaller group size, ")
                + "a larger k_chunk or a larger model"
            )
        finite = after is not None and math.isfinite(after)
        return cls(perplexity_before=before, perplexity_after=after if finite else None, warning=warning)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the same fields."""
        return asdict(self)


def parameters(spec: ModelSpec) -> int:
    """Weights of the full-precision model; a tied embedding counts once."""
    count = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2) + spec.hidden_size
    for name in spec.linear_names()[:-1]:
        rows, width = spec.linear_shape(name.rsplit(".", 1)[-1])
        count += rows * width + (rows if spec.has_bias(name) else 0)
    return count + sum(sum(spec.block_norms(layer).values()) for layer in range(spec.num_layers))


def summarize(spec: ModelSpec, recipe: Recipe, quality: Quality, files: Mapping[str, FileEntry]) -> Summary:
    """Sizes by use, from the layout that the files follow.

    Args:
        spec: The architecture.
        recipe: How it was quantized.
        quality: Perplexities and warning.
        files: All files except the manifest.
    """
    weights = code_bytes = device_bytes = residual_bytes = 0
    for file in layout.tensor_files(spec):
        for tensor, (dtype, shape) in layout.file_tensors(spec, recipe, file).items():
            size, kind = dtype.itemsize * math.prod(shape), tensor.rsplit(".", 1)[-1]
            if kind in ("codes", "scales", "zeros", "codebook"):
                code_bytes += size
            if kind == "residual":
                residual_bytes += size
            elif kind not in ("embed", "rank_maximum", "mean_square"):
                device_bytes += size
    for name in spec.linear_names():
        weights += math.prod(spec.linear_shape(name.rsplit(".", 1)[-1]))
    return Summary(
        family=spec.family,
        parameters=parameters(spec),
        context=spec.max_context,
        bits_per_weight=round(8 * code_bytes / weights, 4),
        gpu_bytes=device_bytes,
        residual_bytes=residual_bytes,
        disk_bytes=sum(entry.bytes for entry in files.values()),
        perplexity_before=quality.perplexity_before,
        perplexity_after=quality.perplexity_after,
        warning=quality.warning,
    )
