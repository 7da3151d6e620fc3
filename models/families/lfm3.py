"""LFM3: LFM2's convolutions beside attention with gates of heads, windows and rotary embeddings by layer type.

Norms behind as well; a share of all pairs of channels rotates where config.json says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models.families.family import attention_biases, layers_of, listed_mixers, read_common, read_spec
from models.families.fields import Fields
from models.families.lfm2 import LFM2, THETA, taps_of
from models.families.rotary import rope_specs
from models.spec import Mixer, ModelSpec

_MIXERS: dict[str, Mixer] = {"full_attention": "attention", "sliding_attention": "attention", "conv": "convolution"}
_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_TAPS, _WINDOW = 7, 256


def _read(fields: Fields) -> ModelSpec:
    absent: dict[str, Any] = {"layer_types": _usual(layers_of(fields)), "head_dim": 128, "sliding_window": _WINDOW}
    absent |= {"rope_parameters": _ROPES, "tie_word_embeddings": True}
    full = fields.with_defaults(absent)
    common, mixers = read_common(full, eps="norm_eps"), listed_mixers(full, _MIXERS, _usual)
    dim, window = common["head_dim"], full.integer("sliding_window")
    rope, local = rope_specs(full, dim, common["max_context"], theta=THETA, local=None, wide=dim)
    gated = full.flag("use_attention_gate", True)
    return read_spec(
        full,
        eps="norm_eps",
        rope=rope,
        window_rope=local,
        windows=tuple(window if kind == "sliding_attention" else None for kind in full.table["layer_types"]),
        mixers=mixers,
        conv_kernel_size=taps_of(full, _TAPS),
        conv_bias=full.flag("conv_bias", False),
        norm_after=full.flag("use_sandwich_norm", True),
        gated=gated,
        head_gates=gated,
        qk_norm=True,
        **attention_biases(full),
    )


def _usual(layers: int) -> list[str]:
    kinds = ("sliding_attention", "conv", "full_attention", "conv")
    return ["conv", *(kinds[layer % len(kinds)] for layer in range(1, layers))]


LFM3 = replace(
    LFM2,
    model_type="lfm3",
    architecture="Lfm3ForCausalLM",
    read=_read,
    linear_sources={
        **LFM2.linear_sources,
        "qkv": (*LFM2.linear_sources["qkv"], "self_attn.gate_proj"),
        "o": ("self_attn.o_proj",),
    },
    norms={
        **LFM2.norms,
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o_norm": "post_operator_norm",
        "down_norm": "post_ffn_norm",
    },
    proportional=True,
)
"""LFM3 1.7B."""
