"""Muse Glimmer, the text part: norms before and behind, gates of attention, windows in three blocks of four.

Blocks with a window alone rotate. Queries and keys pass an RMSNorm of heads without weights, queries are multiplied
behind it, and what is looked up of the embedding table passes one, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from models.errors import UnsupportedModelError
from models.families.family import (
    NORMS_AFTER,
    SEPARATE_LINEAR_SOURCES,
    Family,
    layers_of,
    listed_windows,
    read_spec,
    refuse_attention_bias,
)
from models.families.fields import Fields
from models.spec import ModelSpec

_ABSENT = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
}
"""What an absent key means."""
_POST_EPS, _QUERIES, _LOGITS, _INTERVAL = 1e-8, 3.87, 0.19611613513818404, 4
_MADE = ("q_norm", "k_norm")


def _read(fields: Fields) -> ModelSpec:
    refuse_attention_bias(fields)
    full = fields.with_defaults(_ABSENT)
    layers, window = layers_of(full), full.integer("sliding_window")
    whole = tuple(layer for layer in range(layers) if (layers - 1 - layer) % _INTERVAL == 0)
    windows = listed_windows(full, layers, window)
    if windows is None:
        windows = tuple(None if layer in whole else window for layer in range(layers))
    spec = read_spec(
        full,
        windows=windows,
        norm_after=True,
        after_eps=full.number("post_norm_eps", _POST_EPS),
        gated=True,
        qk_norm=True,
        logit_cap=full.number("final_logit_softcapping"),
    )
    bases = full.table.get("layer_rope_theta")
    if bases is None:
        bases = [0 if layer in whole else spec.rope.theta for layer in range(layers)]
    if not isinstance(bases, list) or len(bases) != layers or any(base not in (0, spec.rope.theta) for base in bases):
        raise UnsupportedModelError(
            f"{full.source}: 'layer_rope_theta' is not {layers} times 0 or rope_theta ({spec.rope.theta:g}). Rotary "
            "embeddings of several bases are not supported. Choose another model."
        )
    return replace(spec, nope_layers=tuple(layer for layer, base in enumerate(bases) if base == 0))


def _multipliers(fields: Fields) -> Mapping[str, float]:
    queries, logits = fields.number("qk_scale_factor", _QUERIES), fields.number("output_multiplier", _LOGITS)
    return {"q_norm": queries, "norm": logits}


MUSE_GLIMMER = Family(
    model_type="muse_glimmer_text",
    architecture="MuseGlimmerForCausalLM",
    read=_read,
    linear_sources={**SEPARATE_LINEAR_SOURCES, "qkv": (*SEPARATE_LINEAR_SOURCES["qkv"], "self_attn.gate_proj")},
    norms={name: module for name, module in NORMS_AFTER.items() if name not in _MADE},
    made=_MADE,
    norm_offset=1.0,
    last_offset=False,
    normed_embedding=True,
    multipliers=_multipliers,
    wrapper="MuseGlimmerForConditionalGeneration",
)
"""Muse Glimmer 30B, the text part."""
