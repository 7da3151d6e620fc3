"""ERNIE 4.5, dense: Llama's block whose neighbouring channels rotate together, and one switch for all biases."""

from __future__ import annotations

from models.families.family import SEPARATE_LINEAR_SOURCES, Family, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec

THETA = 500000.0
"""Rotary base where config.json doesn't say."""


def _read(fields: Fields) -> ModelSpec:
    full = fields.with_defaults({"rope_theta": THETA, "tie_word_embeddings": True})
    common = read_common(full, head_dim=None if "head_dim" in fields.table else 128)
    bias = fields.flag("use_bias", False)
    return ModelSpec(
        **common,
        family="ernie4_5",
        rope=rope_spec(full, common["head_dim"], common["max_context"]),
        windows=(None,) * common["num_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    read=_read,
    linear_sources=SEPARATE_LINEAR_SOURCES,
    interleaved=True,
)
"""ERNIE 4.5 of 0.3 billion parameters."""
