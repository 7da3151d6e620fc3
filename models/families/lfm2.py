"""LFM2: gated short convolutions in most blocks, attention with norms of queries and keys in the others."""

from __future__ import annotations

from models.errors import UnsupportedModelError
from models.families.family import WIDEST, Family, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import Mixer, ModelSpec

THETA = 1e6
"""Base of the rotary embedding where config.json doesn't say."""
MOST_TAPS = 9
"""Most tokens that a convolution may see: what a slot keeps of recent ones (`runtime.kv.states`)."""
_MIXERS: dict[str, Mixer] = {"full_attention": "attention", "conv": "convolution"}


def _read(fields: Fields) -> ModelSpec:
    common = read_common(fields, eps="norm_eps")
    taps = fields.integer("conv_L_cache", 3)
    if not 2 <= taps <= MOST_TAPS:
        raise UnsupportedModelError(
            f"{fields.source}: 'conv_L_cache' is {taps}; convolutions over 2 to {MOST_TAPS} tokens are supported. "
            "Choose another model."
        )
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    common["intermediate_size"], common["tied"] = _mlp_width(fields), tied
    return ModelSpec(
        **common,
        family="lfm2",
        rope=rope_spec(fields.with_defaults({"rope_theta": THETA}), common["head_dim"], common["max_context"]),
        windows=(None,) * common["num_layers"],
        mixers=_mixers(fields, common["num_layers"]),
        taps=taps,
        conv_bias=fields.flag("conv_bias", False),
        qk_norm=True,
    )


def _mixers(fields: Fields, layers: int) -> tuple[Mixer, ...]:
    """By `layer_types`; older configurations list the blocks with attention instead."""
    types = fields.table.get("layer_types")
    if types is None:
        attention = fields.table.get("full_attn_idxs")
        if attention is None:
            attention = list(range(layers))
        if not isinstance(attention, list) or any(type(at) is not int or not 0 <= at < layers for at in attention):
            raise fields.wrong("full_attn_idxs", attention, f"a list of numbers from 0 to {layers - 1}")
        types = ["full_attention" if at in attention else "conv" for at in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in _MIXERS for kind in types):
        raise fields.wrong("layer_types", types, f"a list of {layers} times one of {' or '.join(_MIXERS)}")
    return tuple(_MIXERS[kind] for kind in types)


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
