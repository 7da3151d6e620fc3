"""LFM2: gated short convolutions in most blocks, attention with norms of queries and keys in the others.

Mixtures have experts in all blocks but the first ones, and a correction of their choice.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from models.errors import UnsupportedModelError
from models.families.family import (
    MOST_TAPS,
    SEPARATE_LINEAR_SOURCES,
    WIDEST,
    Family,
    layers_of,
    listed_mixers,
    read_mixture,
    read_spec,
)
from models.families.fields import Fields
from models.spec import Mixer, ModelSpec

THETA = 1e6
"""Base of the rotary embedding where config.json doesn't say."""
_MIXERS: dict[str, Mixer] = {"full_attention": "attention", "conv": "convolution"}


def _read(fields: Fields) -> ModelSpec:
    return read_spec(
        fields.with_defaults({"rope_theta": THETA}),
        eps="norm_eps",
        intermediate_size=_mlp_width(fields),
        tied=fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
        mixers=listed_mixers(fields, _MIXERS, partial(_usual, fields)),
        conv_kernel_size=taps_of(fields, 3),
        conv_bias=fields.flag("conv_bias", False),
        qk_norm=True,
    )


def _read_mixture(fields: Fields) -> ModelSpec:
    full = fields.with_defaults({"block_auto_adjust_ff_dim": False, "num_dense_layers": 2})
    dense = full.integer("num_dense_layers") if full.table["num_dense_layers"] != 0 else 0
    mixture = read_mixture(
        full,
        width=fields.integer("moe_intermediate_size", most=WIDEST),
        normalized=fields.flag("norm_topk_prob", True),
        dense=tuple(range(min(dense, layers_of(fields)))),
        scoring="sigmoid",
        corrected=fields.flag("use_expert_bias", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return replace(_read(full), mixture=mixture)


def taps_of(fields: Fields, absent: int) -> int:
    """Tokens that a convolution sees."""
    taps = fields.integer("conv_L_cache", absent)
    if not 2 <= taps <= MOST_TAPS:
        raise UnsupportedModelError(
            f"{fields.source}: 'conv_L_cache' is {taps}; convolutions over 2 to {MOST_TAPS} tokens are supported. "
            "Choose another model."
        )
    return taps


def _usual(fields: Fields, layers: int) -> list[str]:
    """Older configurations list the blocks with attention."""
    attention = fields.table.get("full_attn_idxs")
    if attention is None:
        attention = list(range(layers))
    if not isinstance(attention, list) or any(type(at) is not int or not 0 <= at < layers for at in attention):
        raise fields.wrong("full_attn_idxs", attention, f"a list of numbers from 0 to {layers - 1}")
    return ["full_attention" if at in attention else "conv" for at in range(layers)]


def _mlp_width(fields: Fields) -> int:
    """Width of the MLP: two thirds of the stated one, times a factor, rounded up, unless that is turned off."""
    key = "block_ff_dim" if fields.table.get("block_ff_dim") is not None else "intermediate_size"
    width = fields.integer(key, most=WIDEST)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" in fields.table and fields.table["block_ffn_dim_multiplier"] is None:
        return width
    multiple = fields.integer("block_multiple_of", 256, most=WIDEST)
    width = int(fields.number("block_ffn_dim_multiplier", 1.0) * width)
    width = -(-width // multiple) * multiple
    if not 1 <= width <= WIDEST:
        raise fields.wrong(key, fields.table[key], f"a width from 1 to {WIDEST:,} once it is adjusted")
    return width


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    read=_read,
    linear_sources={
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.out_proj",),
        "gate_up": ("feed_forward.w1", "feed_forward.w3"),
        "down": ("feed_forward.w2",),
    },
    mixer_sources={
        "convolution": {
            "qkv": ("conv.in_proj",),
            "o": ("conv.out_proj",),
            "conv": ("conv.conv",),
            "conv_bias": ("conv.conv",),
        }
    },
    last_norm="model.embedding_norm",
    norms={
        "input_norm": "operator_norm",
        "post_norm": "ffn_norm",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
    },
)
"""LFM2 350M to 2.6B, and LFM2.5."""

LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    read=_read_mixture,
    linear_sources={**SEPARATE_LINEAR_SOURCES, "o": ("self_attn.out_proj",)},
    norms={**LFM2.norms, "router_correction": "mlp.gate"},
    mixture=True,
    renamed={
        ".feed_forward.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
        ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
    },
)
"""LFM2 8B-A1B and 24B-A2B."""
