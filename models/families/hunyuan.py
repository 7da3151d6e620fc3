"""Hunyuan: RMSNorm of each query and key head behind the rotation, whose base may be stretched by `alpha`.

Mixtures have experts and a shared one in every block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import NORMS, WIDEST, Family, attention_biases, read_mixture, read_spec
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


def _read_mixture(fields: Fields) -> ModelSpec:
    one = {
        key: _alike(fields, key) for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
    }
    full = replace(fields, table={**fields.table, **one, "num_experts_per_tok": one["moe_topk"]})
    key = "intermediate_size" if one["moe_intermediate_size"] is None else "moe_intermediate_size"
    shared = "num_shared_expert" if one["num_shared_expert"] is not None else ""
    mixture = read_mixture(full, width=full.integer(key, most=WIDEST), normalized=True, counted=shared, gated=False)
    return replace(_read(fields), mixture=mixture if shared else replace(mixture, shared=1))


def _alike(fields: Fields, key: str) -> Any:
    """A number that may be listed for every block, where it is the same in all."""
    value = fields.table.get(key)
    if isinstance(value, list) and value and value.count(value[0]) != len(value):
        raise UnsupportedModelError(f"{fields.source}: '{key}' differs between blocks. Choose another model.")
    return value[0] if isinstance(value, list) and value else value


HUNYUAN_MOE = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    read=_read_mixture,
    norms=_NORMS,
    mixture=True,
    routers=("mlp.gate.wg",),
    renamed={".shared_mlp.": ".shared_expert."},
)
"""Hunyuan-A13B."""
