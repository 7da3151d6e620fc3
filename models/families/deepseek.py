"""DeepSeek-V2-Lite and GLM-4.7-Flash: latent attention, and a mixture with shared experts.

Queries of the latter have a latent, too. Channels that rotate together are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import (
    NORMS,
    SEPARATE_LINEAR_SOURCES,
    WIDEST,
    Family,
    layers_of,
    read_mixture,
    read_spec,
    refuse_attention_bias,
)
from models.families.fields import Fields
from models.families.rotary import rope_spec, score_factor
from models.spec import QUERIES, LatentSpec, ModelSpec

_EPS = 1e-6
"""Of the norms of latents, whatever config.json says of the others."""


def _read(fields: Fields, *, corrected: bool = False, **how: Any) -> ModelSpec:
    refuse_attention_bias(fields)
    if fields.table.get("n_group") not in (None, 1) and (corrected or fields.table.get("topk_method") != "greedy"):
        raise UnsupportedModelError(
            f"{fields.source}: groups of experts ('n_group') are not supported. Choose another model."
        )
    latent = LatentSpec(
        rank=fields.integer("kv_lora_rank", most=WIDEST),
        key_dim=fields.integer("qk_nope_head_dim", most=WIDEST),
        value_dim=fields.integer("v_head_dim", most=WIDEST),
        query_rank=fields.optional_integer("q_lora_rank", most=WIDEST) or 0,
    )
    rotating = fields.integer("qk_rope_head_dim", most=WIDEST)
    mixture = read_mixture(
        fields,
        width=fields.integer("moe_intermediate_size", most=WIDEST),
        dense=_dense(fields),
        counted="n_shared_experts",
        scale=fields.number("routed_scaling_factor", 1.0),
        gated=False,
        corrected=corrected,
        **how,
    )
    spec = read_spec(
        fields,
        head_dim=rotating,
        rope=rope_spec(fields, rotating, fields.integer("max_position_embeddings")),
        latent=latent,
        num_kv_heads=1,
        inner_eps=_EPS,
        mixture=mixture,
    )
    return replace(spec, head_dim=rotating + latent.rank)


def _read_v2(fields: Fields) -> ModelSpec:
    full = fields.with_defaults({"topk_method": "greedy", "n_shared_experts": 2})
    if full.flag("mlp_bias", False) or full.flag("norm_topk_prob", False):
        raise UnsupportedModelError(
            f"{fields.source}: 'mlp_bias' and 'norm_topk_prob' are not supported in deepseek_v2 models. "
            "Choose another model."
        )
    return _read(full, normalized=False)


def _read_lite(fields: Fields) -> ModelSpec:
    if not fields.flag("rope_interleave", True):
        raise UnsupportedModelError(
            f"{fields.source}: 'rope_interleave' is false, which is not supported. Choose another model."
        )
    full = fields.with_defaults({"n_shared_experts": 1, "first_k_dense_replace": 1})
    return _read(full, normalized=full.flag("norm_topk_prob", True), scoring="sigmoid", corrected=True)


def _dense(fields: Fields) -> tuple[int, ...]:
    """Blocks with an MLP: those that `mlp_layer_types` names, or the first ones."""
    layers, kinds = layers_of(fields), fields.table.get("mlp_layer_types")
    if kinds is None:
        first = fields.table.get("first_k_dense_replace") or 0
        return tuple(range(min(fields.integer("first_k_dense_replace") if first else 0, layers)))
    known = ("dense", "sparse")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise fields.wrong("mlp_layer_types", kinds, f"a list of {layers} times one of {' or '.join(known)}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def _scores(fields: Fields) -> Mapping[str, float]:
    """The factor of scores, with which queries are multiplied."""
    dim = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
    return {"q": dim**-0.5 * score_factor(fields)}


_COMMON: Mapping[str, Any] = {
    # The first of the modules that are multiplied into each (`models.latent`).
    "linear_sources": {
        **SEPARATE_LINEAR_SOURCES,
        "qkv": ("self_attn.kv_a_proj_with_mqa",),
        QUERIES: ("self_attn.q_b_proj",),
    },
    "norms": {**NORMS, "queries_norm": "self_attn.q_a_layernorm"},
    "multipliers": _scores,
    "mixture": True,
    "renamed": {".shared_experts.": ".shared_expert."},
}
DEEPSEEK_V2 = Family(model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", read=_read_v2, **_COMMON)
"""DeepSeek-V2-Lite and DeepSeek-Coder-V2-Lite."""

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    read=_read_lite,
    predicts_further=True,
    **_COMMON,
)
"""GLM-4.7-Flash."""
