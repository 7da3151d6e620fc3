"""OLMo 2 and 3: norms behind attention and MLP instead of before them, and of all queries and all keys together.

OLMo 3 has windows in three blocks of four, whose rotary embedding is not scaled. OLMo hybrid has gated delta rules
there, in blocks with norms before instead, and nothing rotates where config.json's base is null. OLMoE is older: it has
such norms of queries and keys, but others before attention and experts, and shares that do not add up to 1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import (
    NORMS,
    NORMS_AFTER,
    WIDEST,
    Family,
    attention_biases,
    every,
    layers_of,
    listed_mixers,
    listed_windows,
    read_common,
    read_mixture,
    read_spec,
)
from models.families.fields import Fields
from models.families.qwen3_5 import MIXERS, read_delta, usual_mixers
from models.families.rotary import rope_specs
from models.spec import ModelSpec

THETA = 500000.0
"""Rotary base where config.json doesn't say."""
WINDOW, INTERVAL = 4096, 4
"""Window of an OLMo 3 whose config.json doesn't say, and every which block has none."""
_GAIN_EPS = 1e-5
"""Epsilon of the norm of what a delta rule gives, whatever config.json says of the others."""


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


def _read_hybrid(fields: Fields) -> ModelSpec:
    rope, hidden = fields.section("rope_parameters") or fields, fields.integer("hidden_size", most=WIDEST)
    still = rope.table.get("rope_theta", THETA) is None  # which is no absent base
    heads = fields.integer("num_attention_heads", most=WIDEST)
    fields = fields.with_defaults({"linear_num_key_heads": heads, "linear_num_value_heads": heads})
    width = 3 * hidden // (4 * fields.integer("linear_num_key_heads", most=WIDEST))
    width = fields.integer("linear_key_head_dim", width, most=WIDEST)
    delta, taps = read_delta(fields.with_defaults({"linear_key_head_dim": width, "linear_value_head_dim": 2 * width}))
    most = 2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0
    return _read(
        fields,
        mixers=listed_mixers(fields, MIXERS, partial(usual_mixers, fields)),
        states_normed_before=True,
        conv_kernel_size=taps,
        delta=replace(delta, eps=_GAIN_EPS, most=most),
        nope_layers=tuple(range(layers_of(fields))) if still else (),
    )


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

OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    read=_read_hybrid,
    norms={**NORMS_AFTER, "o_norm": "post_attention_layernorm"},
    mixer_sources={
        "delta": {
            "qkv": tuple(f"linear_attn.{part}_proj" for part in "qkvbag"),
            "o": ("linear_attn.o_proj",),
            "conv": tuple(f"linear_attn.{part}_conv1d" for part in "qkv"),
            "decay": ("linear_attn.A_log",),
            "dt": ("linear_attn.dt_bias",),
            "gain": ("linear_attn.o_norm",),
            "post_norm": (NORMS["post_norm"],),
        }
    },
    renamed={"attention_layer_norm": NORMS["input_norm"], "feedforward_layer_norm": NORMS["post_norm"]},
)
"""OLMo hybrid, 7B."""

OLMOE = Family(model_type="olmoe", architecture="OlmoeForCausalLM", read=_read_olmoe, mixture=True)
"""OLMoE 1B-7B."""
