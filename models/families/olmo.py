"""OLMo 2 and 3: norms behind attention and MLP instead of before them, and of all queries and all keys together.

OLMo 3 has windows in three blocks of four, whose rotary embedding is not scaled. OLMoE is older: it has such norms of
queries and keys, but others before attention and experts, and shares that do not add up to 1.
"""

from __future__ import annotations

from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import (
    NORMS_AFTER,
    WIDEST,
    Family,
    attention_biases,
    every,
    listed_windows,
    read_common,
    read_mixture,
    read_spec,
)
from models.families.fields import Fields
from models.families.rotary import rope_specs
from models.spec import ModelSpec

THETA = 500000.0
"""Rotary base where config.json doesn't say."""
WINDOW, INTERVAL = 4096, 4
"""Window of an OLMo 3 whose config.json doesn't say, and every which block has none."""


def _read(fields: Fields, **own: Any) -> ModelSpec:
    """What both have in common; `own` are further fields of the specification."""
    return read_spec(
        fields, **attention_biases(fields), norm_before=False, norm_after=True, qk_norm=True, qk_norm_form="all", **own
    )


def _read_olmo2(fields: Fields) -> ModelSpec:
    return _read(fields.with_defaults({"rope_theta": THETA}))


def _read_olmo3(fields: Fields) -> ModelSpec:
    common, window = read_common(fields), fields.integer("sliding_window", WINDOW)
    rope, local = rope_specs(fields, common["head_dim"], common["max_context"], theta=THETA, local=None)
    layers = common["num_layers"]
    windows = listed_windows(fields, layers, window) or every(INTERVAL, layers, window)
    return _read(fields, rope=rope, window_rope=local, windows=windows)


def _read_olmoe(fields: Fields) -> ModelSpec:
    if fields.table.get("clip_qkv") is not None:
        raise UnsupportedModelError(f"{fields.source}: 'clip_qkv' is not supported. Choose another model.")
    width, normalized = fields.integer("intermediate_size", most=WIDEST), fields.flag("norm_topk_prob", False)
    mixture = read_mixture(fields, width=width, normalized=normalized)
    return read_spec(fields, **attention_biases(fields), qk_norm=True, qk_norm_form="all", mixture=mixture)


OLMO2 = Family(model_type="olmo2", architecture="Olmo2ForCausalLM", read=_read_olmo2, norms=NORMS_AFTER)
"""OLMo 2."""

OLMO3 = Family(model_type="olmo3", architecture="Olmo3ForCausalLM", read=_read_olmo3, norms=NORMS_AFTER)
"""OLMo 3."""

OLMOE = Family(model_type="olmoe", architecture="OlmoeForCausalLM", read=_read_olmoe, mixture=True)
"""OLMoE 1B-7B."""
