"""Llama 2, 3, 3.1 (rescaled rotary frequencies) and 3.2 (tied embeddings)."""

from __future__ import annotations

from models.families.family import SEPARATE_LINEAR_SOURCES, Family, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec


def _read(fields: Fields) -> ModelSpec:
    common = read_common(fields)
    attention_bias = fields.flag("attention_bias", False)
    return ModelSpec(
        **common,
        family="llama",
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=(None,) * common["num_layers"],
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""Llama 2 to 3.2."""
