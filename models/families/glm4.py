"""GLM-4 of 2025: norms before and behind attention and MLP; heads rotate in part, neighbouring channels together.

GLM-4.5 is a mixture with norms before alone, whose channels rotate as Llama's do; in the larger one, heads have norms.
"""

from __future__ import annotations

from collections.abc import Mapping

from models.errors import UnsupportedModelError
from models.families.family import SEPARATE_LINEAR_SOURCES, WIDEST, Family, layers_of, read_mixture, read_spec
from models.families.fields import Fields
from models.spec import ModelSpec

ROTATING = 0.5
"""Share of a head's channels that rotate, where config.json doesn't say."""
_NORMS: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "o_norm": "post_self_attn_layernorm",
    "post_norm": "post_attention_layernorm",
    "down_norm": "post_mlp_layernorm",
}


def _read(fields: Fields) -> ModelSpec:
    return read_spec(
        fields.with_defaults({"partial_rotary_factor": ROTATING}),
        head_dim=None if "head_dim" in fields.table else 128,
        qkv_bias=fields.flag("attention_bias", True),
        norm_after=True,
    )


def _read_mixture(fields: Fields) -> ModelSpec:
    if fields.table.get("n_group", 1) != 1:
        raise UnsupportedModelError(
            f"{fields.source}: groups of experts ('n_group') are not supported. Choose another model."
        )
    full = fields.with_defaults({"partial_rotary_factor": ROTATING, "n_shared_experts": 1, "first_k_dense_replace": 1})
    dense = full.integer("first_k_dense_replace") if full.table["first_k_dense_replace"] != 0 else 0
    return read_spec(
        full,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        mixture=read_mixture(
            full,
            width=fields.integer("moe_intermediate_size", most=WIDEST),
            normalized=full.flag("norm_topk_prob", True),
            dense=tuple(range(min(dense, layers_of(fields)))),
            counted="n_shared_experts",
            scoring="sigmoid",
            corrected=True,
            scale=fields.number("routed_scaling_factor", 1.0),
            gated=False,
        ),
    )


GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    read=_read,
    linear_sources={**SEPARATE_LINEAR_SOURCES, "gate_up": ("mlp.gate_up_proj",)},
    norms=_NORMS,
    interleaved=True,
)
"""GLM-4-9B-0414, GLM-4-32B-0414 and GLM-Z1."""

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read=_read_mixture,
    mixture=True,
    predicts_further=True,
    renamed={".shared_experts.": ".shared_expert."},
)
"""GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7."""
