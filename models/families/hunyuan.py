"""Hunyuan, dense: RMSNorm of each query and key head behind the rotation, whose base may be stretched by `alpha`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from models.families.family import NORMS, SEPARATE_LINEAR_SOURCES, Family, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec, RopeSpec

_NORMS: Mapping[str, str] = {**NORMS, "q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}


def _read(fields: Fields) -> ModelSpec:
    common = read_common(fields)
    attention_bias = fields.flag("attention_bias", False)
    return ModelSpec(
        **common,
        family="hunyuan_v1_dense",
        rope=_rope(fields, common["head_dim"], common["max_context"]),
        windows=(None,) * common["num_layers"],
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        qk_norm_form="turned",
    )


def _rope(fields: Fields, head_dim: int, max_context: int) -> RopeSpec:
    """Configurations call a base that is stretched once and for all "dynamic"."""
    table = fields.section("rope_scaling") or fields.section("rope_parameters")
    alpha = None if table is None else table.optional_number("alpha")
    if alpha is None:
        return rope_spec(fields, head_dim, max_context)
    rope = rope_spec(fields, head_dim, max_context, aliases={"dynamic": "default"})
    return replace(rope, theta=rope.theta * alpha ** (head_dim / max(1, head_dim - 2)))


HUNYUAN = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    read=_read,
    linear_sources=SEPARATE_LINEAR_SOURCES,
    norms=_NORMS,
)
"""Hunyuan of 0.5 to 7 billion parameters."""
