"""Phi-3, Phi-3.5 (longrope), Phi-4-mini (heads rotate in part): fused projections, one window for all blocks."""

from __future__ import annotations

from models.families.family import Family, read_common, refuse_attention_bias
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec


def _read(fields: Fields) -> ModelSpec:
    common = read_common(fields)
    refuse_attention_bias(fields)
    # Early Phi-3 configs call longrope "su", and some say "yarn" and mean it too.
    rope = rope_spec(fields, common["head_dim"], common["max_context"], aliases={"su": "longrope", "yarn": "longrope"})
    return ModelSpec(
        **common,
        family="phi3",
        rope=rope,
        windows=(fields.optional_integer("sliding_window"),) * common["num_layers"],
    )


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read=_read,
    linear_sources={
        "qkv": ("self_attn.qkv_proj",),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_up_proj",),
        "down": ("mlp.down_proj",),
    },
)
"""Phi-3 mini and medium, Phi-3.5-mini, Phi-4 and Phi-4-mini."""
