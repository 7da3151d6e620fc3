"""Qwen2 and Qwen2.5 (biases on q, k and v), Qwen3 (RMSNorm of each query and key head), and both with experts."""

from __future__ import annotations

from models.families.family import (
    GATED_ROUTERS,
    WIDEST,
    Family,
    attention_biases,
    blocks_with_mlps,
    layer_windows,
    layers_of,
    listed_windows,
    read_mixture,
    read_spec,
    used_window,
)
from models.families.fields import Fields
from models.spec import ModelSpec

QWEN3_HEAD_DIM = 128
"""Width of a Qwen3 head where config.json doesn't say."""
WINDOWS_UNTIL = 28
"""The block of a Qwen2-MoE from which on none has a window, where config.json doesn't say."""


def _read_qwen2(fields: Fields) -> ModelSpec:
    return read_spec(fields, windows=layer_windows(fields, layers_of(fields)), qkv_bias=True)


def _read_qwen3(fields: Fields) -> ModelSpec:
    return read_spec(
        fields,
        head_dim=None if "head_dim" in fields.table else QWEN3_HEAD_DIM,
        windows=layer_windows(fields, layers_of(fields)),
        **attention_biases(fields),
        qk_norm=True,
    )


def _read_qwen2_moe(fields: Fields) -> ModelSpec:
    layers, window = layers_of(fields), used_window(fields)
    windows = listed_windows(fields, layers, window)
    if windows is None:
        until = fields.integer("max_window_layers", WINDOWS_UNTIL)
        windows = tuple(None if layer % 2 or layer >= until else window for layer in range(layers))
    return read_spec(
        fields,
        windows=windows,
        qkv_bias=fields.flag("qkv_bias", True),
        mixture=read_mixture(
            fields,
            width=fields.integer("moe_intermediate_size", most=WIDEST),
            normalized=fields.flag("norm_topk_prob", False),
            dense=blocks_with_mlps(fields, layers),
            shared="shared_expert_intermediate_size",
        ),
    )


def _read_qwen3_moe(fields: Fields) -> ModelSpec:
    layers = layers_of(fields)
    mixture = read_mixture(
        fields,
        width=fields.integer("moe_intermediate_size", most=WIDEST),
        normalized=fields.flag("norm_topk_prob", False),
        dense=blocks_with_mlps(fields, layers),
    )
    windows = (used_window(fields),) * layers
    return read_spec(fields, windows=windows, **attention_biases(fields), qk_norm=True, mixture=mixture)


QWEN2 = Family(model_type="qwen2", architecture="Qwen2ForCausalLM", read=_read_qwen2)
"""Qwen2 and Qwen2.5."""

QWEN3 = Family(model_type="qwen3", architecture="Qwen3ForCausalLM", read=_read_qwen3)
"""Qwen3, dense models."""

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    read=_read_qwen2_moe,
    mixture=True,
    routers=GATED_ROUTERS,
)
"""Qwen1.5 and Qwen2, mixtures of experts."""

QWEN3_MOE = Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=_read_qwen3_moe, mixture=True)
"""Qwen3, mixtures of experts."""
