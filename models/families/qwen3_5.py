"""Qwen3.5: gated delta rules in three of four blocks, gated attention with norms of queries and keys in the fourth.

The mixtures (35B-A3B) have experts and a shared one in every block. Qwen3-Next, before them, may have MLPs in some, and
stores what a delta rule reads head by head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from models.errors import UnsupportedModelError
from models.families.family import (
    GATED_ROUTERS,
    MOST_TAPS,
    WIDEST,
    Family,
    attention_biases,
    blocks_with_mlps,
    layers_of,
    listed_mixers,
    read_common,
    read_mixture,
    read_spec,
)
from models.families.fields import Fields
from models.spec import DeltaSpec, Mixer, ModelSpec

HEAD_DIM, ROTATING, INTERVAL = 256, 0.25, 4
"""Width of a head, how much of it rotates, and every how many blocks one has attention, by default."""
EXPERT_WIDTH = 512
"""Width of an expert, and of a shared one, by default."""
MIXERS: dict[str, Mixer] = {"full_attention": "attention", "linear_attention": "delta"}


def read_delta(fields: Fields) -> tuple[DeltaSpec, int]:
    """The heads of gated delta rules, and the tokens that their convolutions see."""
    activation, taps = read_common(fields)["activation"], fields.integer("linear_conv_kernel_dim", 4)
    if not 2 <= taps <= MOST_TAPS or activation != "silu":
        raise UnsupportedModelError(
            f"{fields.source}: convolutions over {taps} tokens with {activation} are not supported (2 to "
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
    return delta, taps


def _read(fields: Fields) -> ModelSpec:
    fields = fields.with_defaults({"head_dim": HEAD_DIM, "partial_rotary_factor": ROTATING})
    delta, taps = read_delta(fields)
    return read_spec(
        fields,
        mixers=listed_mixers(fields, MIXERS, partial(usual_mixers, fields)),
        conv_kernel_size=taps,
        delta=delta,
        gated=True,
        **attention_biases(fields),
        qk_norm=True,
    )


def _read_moe(fields: Fields) -> ModelSpec:
    width = fields.integer("moe_intermediate_size", EXPERT_WIDTH, most=WIDEST)
    fields = fields.with_defaults({"intermediate_size": width, "shared_expert_intermediate_size": EXPERT_WIDTH})
    mixture = read_mixture(fields, width=width, normalized=True, shared="shared_expert_intermediate_size")
    return replace(_read(fields), mixture=mixture)


def _read_next(fields: Fields) -> ModelSpec:
    width = fields.integer("moe_intermediate_size", EXPERT_WIDTH, most=WIDEST)
    fields = fields.with_defaults({"shared_expert_intermediate_size": EXPERT_WIDTH})
    mixture = read_mixture(
        fields,
        width=width,
        normalized=fields.flag("norm_topk_prob", True),
        dense=blocks_with_mlps(fields, layers_of(fields)),
        shared="shared_expert_intermediate_size",
    )
    return replace(_read(fields), mixture=mixture)


def usual_mixers(fields: Fields, layers: int) -> list[str]:
    interval = fields.integer("full_attention_interval", INTERVAL)
    return ["linear_attention" if (at + 1) % interval else "full_attention" for at in range(layers)]


QWEN35 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read=_read,
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

QWEN3_NEXT = replace(
    QWEN35_MOE,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_read_next,
    mixer_sources={
        "delta": {**QWEN35.mixer_sources["delta"], "qkv": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")}
    },
    wrapper="",
)
"""Qwen3-Next and Qwen3-Coder-Next, 80B-A3B."""
