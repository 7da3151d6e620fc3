"""Granite 3 and 4: Llama's block, or one with experts or Mamba-2, with four multipliers, which fold into weights.

With multipliers e (embedding), a (attention), r (residual) and 1 / s (logits), a Granite model is one of Llama whose
residual stream is 1 / e of it: what a block adds is multiplied by r / e, and since an RMSNorm undoes any scale but that
of its epsilon, eps / e² has the place of eps. Queries are multiplied by a √D, the last norm's weight by 1 / s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from models.families.family import (
    WIDEST,
    Family,
    attention_biases,
    listed_mixers,
    read_common,
    read_mixture,
    read_spec,
)
from models.families.fields import Fields
from models.families.mamba import MAMBA_SOURCES, with_states
from models.spec import Mixer, ModelSpec


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


_MIXERS: dict[str, Mixer] = {
    **dict.fromkeys(("attention", "full_attention"), "attention"),
    **dict.fromkeys(("mamba", "linear_attention"), "delta"),
}


def _read_fourth(fields: Fields) -> ModelSpec:
    mixers = listed_mixers(fields, _MIXERS, lambda layers: ["mamba"] * layers)
    shared, experts = "shared_intermediate_size", fields.table.get("num_local_experts", 8)
    fields = fields.with_defaults({shared: 1024})
    if experts:
        spec = _read_mixture(fields.with_defaults({"num_local_experts": 8, "num_experts_per_tok": 2}), shared)
    else:
        width = fields.integer(shared, most=WIDEST)
        spec = _read(replace(fields, table={**fields.table, "intermediate_size": width}))
    if fields.table.get("position_embedding_type") != "rope":
        spec = replace(spec, nope_layers=tuple(range(spec.num_layers)))
    return _with_states(fields, replace(spec, mixers=mixers)) if "delta" in mixers else spec


def _with_states(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """The same with Mamba-2."""
    heads, whole = fields.integer("mamba_n_heads", 128), fields.integer("mamba_expand", 2) * spec.hidden_size
    if whole % heads or fields.table.get("mamba_d_head", "auto") not in ("auto", whole // heads):
        raise fields.wrong("mamba_n_heads", heads, f"mamba_expand * hidden_size ({whole}) / mamba_d_head")
    return with_states(
        fields.with_defaults({"mamba_n_groups": 1}),
        replace(spec, inner_eps=fields.number("rms_norm_eps")),
        groups="mamba_n_groups",
        taps=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        value_heads=heads,
        value_dim=whole // heads,
        key_dim=fields.integer("mamba_d_state", 256, most=WIDEST),
        biased=fields.flag("mamba_proj_bias", False),
    )


GRANITE_FOURTH = replace(
    GRANITE_MOE_SHARED,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    read=_read_fourth,
    mixer_sources={"delta": MAMBA_SOURCES},
)
"""Granite 4, with Mamba-2 in most blocks or attention in all, with experts or without."""
