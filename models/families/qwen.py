"""Qwen2 and Qwen2.5 (biases on q, k and v) and Qwen3 (RMSNorm of each query and key head, heads of their own width)."""

from __future__ import annotations

from models.families.family import SEPARATE_LINEAR_SOURCES, Family, layer_windows, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec

QWEN3_HEAD_DIM = 128
"""Width of a Qwen3 head where config.json doesn't say."""


def _read_qwen2(fields: Fields) -> ModelSpec:
    common = read_common(fields)
    return ModelSpec(
        **common,
        family="qwen2",
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=layer_windows(fields, common["num_layers"]),
        qkv_bias=True,
    )


def _read_qwen3(fields: Fields) -> ModelSpec:
    common = read_common(fields, head_dim=None if "head_dim" in fields.table else QWEN3_HEAD_DIM)
    attention_bias = fields.flag("attention_bias", False)
    return ModelSpec(
        **common,
        family="qwen3",
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=layer_windows(fields, common["num_layers"]),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read_qwen2,
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""Qwen2 and Qwen2.5."""

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_qwen3,
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""Qwen3, dense models."""
