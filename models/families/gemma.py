"""Gemma 2 and 3: norms before and behind attention and MLP, tanh-GELU, windows in most blocks.

They multiply embeddings by √C, and norms by 1 + w. The first folds into the norms behind attention and MLP: with their
weights divided by √C the residual stream is 1 / √C of Gemma's, and eps / C has the place of eps in the norms that read
it. Scores are divided by the root of `query_pre_attn_scalar` instead of √D, which folds into queries or their norm.

The first Gemma is Llama's block with tanh-GELU. It has no norms behind, so 1 / √C folds into o and down instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.families.family import NORMS_AFTER, Family, attention_biases, every, layers_of, listed_windows, read_spec
from models.families.fields import Fields
from models.families.rotary import rope_specs
from models.spec import ModelSpec

_BOTH: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
}
_GEMMA2 = {**_BOTH, "vocab_size": 256000, "max_position_embeddings": 8192}
_GEMMA3 = {**_BOTH, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
"""What an absent key means: published configurations leave out what is usual."""
SCORE_CAP, LOGIT_CAP = 50.0, 30.0
"""Soft caps of a Gemma 2 whose config.json doesn't mention them."""
_THETA, _LOCAL_THETA = 1e6, 1e4
"""Rotary bases of a Gemma 3 whose config.json doesn't say."""


def _read(full: Fields, interval: int, **own: Any) -> ModelSpec:
    """What both have in common; `own` are further fields of the specification."""
    layers, window = layers_of(full), full.integer("sliding_window")
    windows = listed_windows(full, layers, window) or every(interval, layers, window)
    spec = read_spec(full, windows=windows, norm_after=True, **own)
    return replace(spec, norm_eps=spec.norm_eps / spec.hidden_size, inner_eps=spec.norm_eps)


def _capped(fields: Fields, key: str, absent: float) -> float | None:
    """A soft cap; null means none, absent the usual one."""
    return fields.optional_number(key) if key in fields.table else absent


def _read_gemma(fields: Fields) -> ModelSpec:
    full = fields.with_defaults(_GEMMA)
    if full.table["hidden_act"] == "gelu":  # so published configurations call the approximation, too
        full = full.with_defaults({"hidden_activation": _GEMMA["hidden_act"]})
    spec = read_spec(full, **attention_biases(fields))
    return replace(spec, norm_eps=spec.norm_eps / spec.hidden_size)


def _read_gemma2(fields: Fields) -> ModelSpec:
    full = fields.with_defaults(_GEMMA2)
    return _read(
        full,
        2,
        score_cap=_capped(fields, "attn_logit_softcapping", SCORE_CAP),
        logit_cap=_capped(fields, "final_logit_softcapping", LOGIT_CAP),
    )


def _read_gemma3(fields: Fields) -> ModelSpec:
    full = fields.with_defaults(_GEMMA3)
    sizes = full.integer("head_dim"), full.integer("max_position_embeddings")
    rope, local = rope_specs(full, *sizes, theta=_THETA, local=_LOCAL_THETA)
    return _read(
        full,
        full.integer("sliding_window_pattern"),
        rope=rope,
        window_rope=local,
        qk_norm=True,
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


def _multipliers(fields: Fields, queries: str) -> Mapping[str, float]:
    """`queries` is what scales them: `q`, or `q_norm` where they pass a norm."""
    full = fields.with_defaults(_BOTH)
    added = full.integer("hidden_size") ** -0.5
    scale = math.sqrt(full.integer("head_dim") / full.number("query_pre_attn_scalar"))
    return {"o_norm": added, "down_norm": added, queries: scale}


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    read=_read_gemma,
    norm_offset=1.0,
    multipliers=lambda fields: dict.fromkeys(("o", "down"), fields.integer("hidden_size") ** -0.5),
)
"""Gemma of 2 and 7 billion parameters, and CodeGemma."""

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read_gemma2,
    norms=NORMS_AFTER,
    norm_offset=1.0,
    multipliers=lambda fields: _multipliers(fields, "q"),
)
"""Gemma 2 of 2, 9 and 27 billion parameters."""

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read_gemma3,
    norms=NORMS_AFTER,
    norm_offset=1.0,
    multipliers=lambda fields: _multipliers(fields, "q_norm"),
    wrapper="Gemma3ForConditionalGeneration",
)
"""Gemma 3 of 270 million to 27 billion parameters; of the multimodal ones the text part."""
