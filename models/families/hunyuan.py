"""Hunyuan, dense: RMSNorm of each query and key head behind the rotation, whose base may be stretched by `alpha`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from models.families.family import NORMS, Family, attention_biases, read_spec
from models.families.fields import Fields
from models.spec import ModelSpec, RopeKind

_NORMS: Mapping[str, str] = {**NORMS, "q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}


def _read(fields: Fields) -> ModelSpec:
    table = fields.section("rope_scaling") or fields.section("rope_parameters")
    alpha = None if table is None else table.optional_number("alpha")
    # Configurations call a base that is stretched once and for all "dynamic".
    aliases: Mapping[str, RopeKind] | None = None if alpha is None else {"dynamic": "default"}
    biases = attention_biases(fields)
    spec = read_spec(fields, aliases=aliases, **biases, qk_norm=True, qk_norm_form="after_rope")
    if alpha is None:
        return spec
    stretch = alpha ** (spec.head_dim / max(1, spec.head_dim - 2))
    return replace(spec, rope=replace(spec.rope, theta=spec.rope.theta * stretch))


HUNYUAN = Family(model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM", read=_read, norms=_NORMS)
"""Hunyuan of 0.5 to 7 billion parameters."""
