"""Granite 3 and 4 without states: Llama's block, or one with experts, with four multipliers, which fold into weights.

With multipliers e (embedding), a (attention), r (residual) and 1 / s (logits), a Granite model is one of Llama whose
residual stream is 1 / e of it: what a block adds is multiplied by r / e, and since an RMSNorm undoes any scale but that
of its epsilon, eps / e² has the place of eps. Queries are multiplied by a √D, the last norm's weight by 1 / s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from models.errors import UnsupportedModelError
from models.families.family import (
    SEPARATE_LINEAR_SOURCES,
    WIDEST,
    Family,
    attention_biases,
    layers_of,
    read_common,
    read_mixture,
    read_spec,
)
from models.families.fields import Fields
from models.spec import ModelSpec


def _read(fields: Fields) -> ModelSpec:
    spec = read_spec(fields, **attention_biases(fields), mlp_bias=fields.flag("mlp_bias", False))
    return replace(spec, norm_eps=spec.norm_eps / fields.number("embedding_multiplier", 1.0) ** 2)


def _multipliers(fields: Fields) -> Mapping[str, float]:
    added = fields.number("residual_multiplier", 1.0) / fields.number("embedding_multiplier", 1.0)
    return {
        "q": fields.number("attention_multiplier", 1.0) * math.sqrt(read_common(fields)["head_dim"]),
        "o": added,
        "down": added,
        "norm": 1 / fields.number("logits_scaling", 1.0),
    }


def _read_mixture(fields: Fields, shared: str = "") -> ModelSpec:
    """`shared` is the key of the width of a shared expert."""
    spec = _read(fields)
    mixture = read_mixture(fields, width=spec.intermediate_size, normalized=True, shared=shared, gated=False)
    return replace(spec, mixture=mixture)


GRANITE = Family(model_type="granite", architecture="GraniteForCausalLM", read=_read, multipliers=_multipliers)
"""Granite 3.0 to 3.3."""

GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    read=_read_mixture,
    multipliers=_multipliers,
    mixture=True,
    renamed={
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
        "block_sparse_moe.router.layer.": "mlp.gate.",
        "block_sparse_moe.router.": "mlp.gate.",
        "block_sparse_moe.": "mlp.",
        "shared_mlp.input_linear.": "mlp.shared_expert.gate_up_proj.",
        "shared_mlp.output_linear.": "mlp.shared_expert.down_proj.",
    },
)
"""Granite 3.0 and 3.1, 1B-A400M and 3B-A800M."""

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    read=partial(_read_mixture, shared="shared_intermediate_size"),
)
"""Granite mixtures with a shared expert."""


def _read_fourth(fields: Fields) -> ModelSpec:
    layers, kinds = layers_of(fields), fields.table.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {"attention", "full_attention"}:
        raise UnsupportedModelError(
            f"{fields.source}: blocks with a state (Mamba-2) in 'layer_types' are not supported, only Granite 4 with "
            "attention in all of them (micro, 350m and 1b without an h). Choose another model."
        )
    width = fields.integer("shared_intermediate_size", 1024, most=WIDEST)
    rotates = fields.table.get("position_embedding_type") == "rope"
    spec = _read(replace(fields, table={**fields.table, "intermediate_size": width}))
    return spec if rotates else replace(spec, nope_layers=tuple(range(layers)))


GRANITE_FOURTH = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    read=_read_fourth,
    linear_sources={
        **SEPARATE_LINEAR_SOURCES,
        "gate_up": ("shared_mlp.input_linear",),
        "down": ("shared_mlp.output_linear",),
    },
    multipliers=_multipliers,
)
"""Granite 4, dense ones with attention in all blocks."""
