"""Arcee (AFM-4.5B) and Apertus: Llama's block, whose MLP has no gate. Apertus also has RMSNorm of heads."""

from __future__ import annotations

from models.families.family import NORMS, SEPARATE_LINEAR_SOURCES, Family, attention_biases, read_spec
from models.families.fields import Fields
from models.spec import ModelSpec

_LINEARS = {**SEPARATE_LINEAR_SOURCES, "gate_up": ("mlp.up_proj",)}
_STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Rotary embedding of an Apertus whose config.json doesn't say."""


def _read_arcee(fields: Fields) -> ModelSpec:
    return read_spec(
        fields.with_defaults({"hidden_act": "relu2"}),
        activations={"relu2": "relu2"},
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _read_apertus(fields: Fields) -> ModelSpec:
    older = fields.table.get("rope_scaling") or fields.table.get("rope_theta")
    full = fields.with_defaults({"hidden_act": "xielu", **({} if older else {"rope_parameters": _STRETCHED})})
    return read_spec(full, activations={"xielu": "xielu"}, **attention_biases(fields), qk_norm=True)


ARCEE = Family(model_type="arcee", architecture="ArceeForCausalLM", read=_read_arcee, linear_sources=_LINEARS)
"""AFM-4.5B."""
APERTUS = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    read=_read_apertus,
    linear_sources=_LINEARS,
    norms={
        **NORMS,
        "input_norm": "attention_layernorm",
        "post_norm": "feedforward_layernorm",
        "rising": "mlp.act_fn",
        "falling": "mlp.act_fn",
    },
)
"""Apertus 8B and 70B."""
