"""GLM-4 of 2025: norms before and behind attention and MLP; heads rotate in part, neighbouring channels together."""

from __future__ import annotations

from collections.abc import Mapping

from models.families.family import SEPARATE_LINEAR_SOURCES, Family, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec
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
    common = read_common(fields, head_dim=None if "head_dim" in fields.table else 128)
    full = fields.with_defaults({"partial_rotary_factor": ROTATING})
    return ModelSpec(
        **common,
        family="glm4",
        rope=rope_spec(full, common["head_dim"], common["max_context"]),
        windows=(None,) * common["num_layers"],
        qkv_bias=fields.flag("attention_bias", True),
        norm_after=True,
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
