"""Seed-OSS: Llama's block with biases on q, k and v, and heads of their own width."""

from __future__ import annotations

from models.families.family import SEPARATE_LINEAR_SOURCES, Family, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec

HEAD_DIM = 128
"""Width of a head where config.json doesn't say."""


def _read(fields: Fields) -> ModelSpec:
    common = read_common(fields, head_dim=None if "head_dim" in fields.table else HEAD_DIM)
    return ModelSpec(
        **common,
        family="seed_oss",
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=(None,) * common["num_layers"],
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    read=_read,
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""Seed-OSS 36B."""
