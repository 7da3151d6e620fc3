"""Laguna XS and its like: Qwen3's block with experts, query heads that differ between blocks, and gates of attention.

A gate is the softplus of a number that the block's input gives for each head, or for each channel of each.
"""

from __future__ import annotations

from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import (
    SEPARATE_LINEAR_SOURCES,
    WIDEST,
    Family,
    layers_of,
    listed_windows,
    read_common,
    read_mixture,
    read_spec,
    refuse_attention_bias,
)
from models.families.fields import Fields
from models.families.rotary import rope_specs
from models.spec import ModelSpec

_ABSENT = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "sliding_window": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""What an absent key means."""
_FULL, _LOCAL, _SHARE = 500000.0, 10000.0, 0.5
"""Rotary bases of the blocks without and with a window, and the share of a head that rotates in the former, where
config.json doesn't say."""
_GATES = {True: True, "per-head": True, "per-element": False}
"""Whether there is one for each head, by what config.json says."""


def _read(fields: Fields) -> ModelSpec:
    refuse_attention_bias(fields)
    absent: dict[str, Any] = dict(_ABSENT)
    if fields.section("rope_parameters") is None:
        full = {"rope_theta": _FULL, "partial_rotary_factor": _SHARE}
        absent["rope_parameters"] = {"full_attention": full, "sliding_attention": {"rope_theta": _LOCAL}}
    fields = fields.with_defaults(absent)
    if fields.table.get("moe_router_logit_softcapping") or fields.flag("moe_apply_router_weight_on_input", False):
        raise UnsupportedModelError(
            f"{fields.source}: caps of the router's logits ('moe_router_logit_softcapping') and shares of what experts "
            "read ('moe_apply_router_weight_on_input') are not supported. Choose another model."
        )
    gating = fields.table.get("gating", True)
    if not isinstance(gating, bool | str) or gating not in _GATES:
        raise fields.wrong("gating", gating, "true, per-head or per-element")
    common, layers = read_common(fields), layers_of(fields)
    rope, local = rope_specs(fields, common["head_dim"], common["max_context"], theta=_FULL, local=_LOCAL)
    windows = listed_windows(fields, layers, fields.integer("sliding_window")) or (None,) * layers
    heads = _listed(fields, "num_attention_heads_per_layer", [common["num_heads"]] * layers)
    if any(type(own) is not int or not 0 < own <= WIDEST or own % common["num_kv_heads"] for own in heads):
        what = f"multiples of num_key_value_heads ({common['num_kv_heads']})"
        raise fields.wrong("num_attention_heads_per_layer", heads, what)
    kinds = _listed(fields, "mlp_layer_types", ["dense", *["sparse"] * (layers - 1)])
    if any(kind not in ("dense", "sparse") for kind in kinds):
        raise fields.wrong("mlp_layer_types", kinds, "dense or sparse for each block")
    mixture = read_mixture(
        fields,
        width=fields.integer("moe_intermediate_size", most=WIDEST),
        normalized=True,
        dense=tuple(layer for layer, kind in enumerate(kinds) if kind == "dense"),
        shared="shared_expert_intermediate_size",
        gated=False,
        scoring="sigmoid",
        corrected=True,
        scale=fields.number("moe_routed_scaling_factor", 1.0),
    )
    return read_spec(
        fields,
        rope=rope,
        window_rope=local,
        windows=windows,
        query_heads=tuple(heads),
        gated=True,
        head_gates=_GATES[gating],
        gate_form="softplus",
        qk_norm=True,
        mixture=mixture,
    )


def _listed(fields: Fields, key: str, absent: list[Any]) -> list[Any]:
    """A list with an entry for each block."""
    found = fields.table.get(key)
    found = absent if found is None else found
    if not isinstance(found, list) or len(found) != len(absent):
        raise fields.wrong(key, found, f"a list of {len(absent)}")
    return found


LAGUNA = Family(
    model_type="laguna",
    architecture="LagunaForCausalLM",
    read=_read,
    linear_sources={**SEPARATE_LINEAR_SOURCES, "qkv": (*SEPARATE_LINEAR_SOURCES["qkv"], "self_attn.g_proj")},
    mixture=True,
    renamed={
        ".shared_experts.": ".shared_expert.",
        "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    },
)
"""Laguna XS."""
