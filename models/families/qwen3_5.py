"""Qwen3.5: gated delta rules in three of four blocks, gated attention with norms of queries and keys in the fourth.

The mixtures (35B-A3B) have experts and a shared one in every block.
"""

from __future__ import annotations

from dataclasses import replace

from models.errors import UnsupportedModelError
from models.families.family import (
    GATED_ROUTERS,
    SEPARATE_LINEAR_SOURCES,
    WIDEST,
    Family,
    read_common,
    read_mixture,
)
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import DeltaSpec, Mixer, ModelSpec

HEAD_DIM, ROTATING, INTERVAL = 256, 0.25, 4
"""Width of a head, how much of it rotates, and every how many blocks one has attention, by default."""
EXPERT_WIDTH = 512
"""Width of an expert, and of a shared one, by default."""
MOST_TAPS = 9
"""Most tokens that a convolution may see: what a slot keeps of recent ones (`runtime.kv.states`)."""
_MIXERS: dict[str, Mixer] = {"full_attention": "attention", "linear_attention": "delta"}


def _read(fields: Fields) -> ModelSpec:
    fields = fields.with_defaults({"head_dim": HEAD_DIM, "partial_rotary_factor": ROTATING})
    common, attention_bias = read_common(fields), fields.flag("attention_bias", False)
    taps = fields.integer("linear_conv_kernel_dim", 4)
    if not 2 <= taps <= MOST_TAPS or common["activation"] != "silu":
        raise UnsupportedModelError(
            f"{fields.source}: convolutions over {taps} tokens with {common['activation']} are not supported (2 to "
            f"{MOST_TAPS} tokens with silu are). Choose another model."
        )
    delta = DeltaSpec(
        key_heads=fields.integer("linear_num_key_heads", 16, most=WIDEST),
        value_heads=fields.integer("linear_num_value_heads", 32, most=WIDEST),
        key_dim=fields.integer("linear_key_head_dim", 128, most=WIDEST),
        value_dim=fields.integer("linear_value_head_dim", 128, most=WIDEST),
    )
    if delta.value_heads % delta.key_heads:
        what = f"a multiple of linear_num_key_heads ({delta.key_heads})"
        raise fields.wrong("linear_num_value_heads", delta.value_heads, what)
    return ModelSpec(
        **common,
        family="qwen3_5_text",
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=(None,) * common["num_layers"],
        mixers=_mixers(fields, common["num_layers"]),
        taps=taps,
        delta=delta,
        gated=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


def _read_moe(fields: Fields) -> ModelSpec:
    width = fields.integer("moe_intermediate_size", EXPERT_WIDTH, most=WIDEST)
    fields = fields.with_defaults({"intermediate_size": width, "shared_expert_intermediate_size": EXPERT_WIDTH})
    mixture = read_mixture(fields, width=width, normalized=True, shared="shared_expert_intermediate_size")
    return replace(_read(fields), family="qwen3_5_moe_text", mixture=mixture)


def _mixers(fields: Fields, layers: int) -> tuple[Mixer, ...]:
    types = fields.table.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval", INTERVAL)
        types = ["linear_attention" if (at + 1) % interval else "full_attention" for at in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in _MIXERS for kind in types):
        raise fields.wrong("layer_types", types, f"a list of {layers} times one of {' or '.join(_MIXERS)}")
    return tuple(_MIXERS[kind] for kind in types)


QWEN35 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read=_read,
    linear_sources=SEPARATE_LINEAR_SOURCES,
    mixer_sources={
        "delta": {
            "qkv": (
                "linear_attn.in_proj_qkv",
                "linear_attn.in_proj_b",
                "linear_attn.in_proj_a",
                "linear_attn.in_proj_z",
            ),
            "o": ("linear_attn.out_proj",),
            "conv": ("linear_attn.conv1d",),
            "decay": ("linear_attn.A_log",),
            "dt": ("linear_attn.dt_bias",),
            "gain": ("linear_attn.norm",),
        }
    },
    norm_offset=1.0,
    predicts_further=True,
    wrapper="Qwen3_5ForConditionalGeneration",
)
"""Qwen3.5, dense models."""

QWEN35_MOE = replace(
    QWEN35,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read=_read_moe,
    mixture=True,
    routers=GATED_ROUTERS,
    wrapper="Qwen3_5MoeForConditionalGeneration",
)
"""Qwen3.5 and 3.6, mixtures of experts."""
