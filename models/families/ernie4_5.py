"""ERNIE 4.5: Llama's block whose neighbouring channels rotate together, and one switch for all biases.

Mixtures have shared experts, and a correction of the choice; their router is a softmax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import NORMS, WIDEST, Family, read_mixture, read_spec
from models.families.fields import Fields
from models.spec import ModelSpec

THETA, HEAD_DIM = 500000.0, 128
"""Rotary base, and width of a dense model's head, where config.json doesn't say."""
_LEAST = 1e-6
"""Largest `moe_norm_min` that no sum of shares falls below."""


def _read(fields: Fields, head_dim: int | None = HEAD_DIM) -> ModelSpec:
    bias: dict[str, Any] = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), fields.flag("use_bias", False))
    head_dim = None if "head_dim" in fields.table else head_dim
    return read_spec(
        fields.with_defaults({"rope_theta": THETA, "tie_word_embeddings": True}), head_dim=head_dim, **bias
    )


def _read_mixture(fields: Fields) -> ModelSpec:
    spec, full = _read(fields, head_dim=None), fields.with_defaults({"moe_num_shared_experts": 2, "moe_k": 6})
    if fields.flag("use_bias", False) or fields.number("moe_norm_min", _LEAST) > _LEAST:
        raise UnsupportedModelError(
            f"{fields.source}: 'use_bias' and a 'moe_norm_min' above {_LEAST:g} are not supported. "
            "Choose another model."
        )
    first, interval = fields.table.get("moe_layer_start_index", 1), fields.integer("moe_layer_interval", 1)
    last = fields.table.get("moe_layer_end_index", -1)
    for key, value in (("moe_layer_start_index", first), ("moe_layer_end_index", last)):
        if type(value) is not int:
            raise fields.wrong(key, value, "the number of a layer")
    last = spec.num_layers - 1 if last == -1 else last
    return replace(
        spec,
        mixture=read_mixture(
            full,
            width=fields.integer("moe_intermediate_size", most=WIDEST),
            normalized=True,
            dense=tuple(n for n in range(spec.num_layers) if (n + 1) % interval or not first <= n <= last),
            counted="moe_num_shared_experts",
            corrected=True,
            gated=False,
        ),
    )


ERNIE4_5 = Family(model_type="ernie4_5", architecture="Ernie4_5ForCausalLM", read=_read, interleaved=True)
"""ERNIE 4.5 of 0.3 billion parameters."""

ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    read=_read_mixture,
    norms={**NORMS, "router_correction": "mlp.moe_statics"},
    interleaved=True,
    mixture=True,
    renamed={".shared_experts.": ".shared_expert."},
)
"""ERNIE 4.5 21B-A3B and 300B-A47B."""
