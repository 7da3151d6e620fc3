"""Gemma 2 and 3: norms before and behind attention and MLP, tanh-GELU, windows in most blocks.

They multiply embeddings by √C, and norms by 1 + w. The first folds into the norms behind attention and MLP: with their
weights divided by √C the residual stream is 1 / √C of Gemma's, and eps / C has the place of eps in the norms that read
it. Scores are divided by the root of `query_pre_attn_scalar` instead of √D, which folds into queries or their norm.

The first Gemma is Llama's block with tanh-GELU. It has no norms behind, so 1 / √C folds into o and down instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from models.families.family import NORMS_AFTER, SEPARATE_LINEAR_SOURCES, Family, every, listed_windows, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec, rope_specs
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


def _read(full: Fields, family: str, interval: int, **own: Any) -> ModelSpec:
    """What both have in common; `own` are further fields of the specification."""
    common = read_common(full)
    layers, window, eps = common["num_layers"], full.integer("sliding_window"), common["norm_eps"]
    common["norm_eps"] = eps / common["hidden_size"]
    return ModelSpec(
        **common,
        family=family,
        windows=listed_windows(full, layers, window) or every(interval, layers, window),
        norm_after=True,
        inner_eps=eps,
        **own,
    )


def _capped(fields: Fields, key: str, absent: float) -> float | None:
    """A soft cap; null means none, absent the usual one."""
    return fields.optional_number(key) if key in fields.table else absent


def _read_gemma(fields: Fields) -> ModelSpec:
    full = fields.with_defaults(_GEMMA)
    if full.table["hidden_act"] == "gelu":  # so published configurations call the approximation, too
        full = full.with_defaults({"hidden_activation": _GEMMA["hidden_act"]})
    common, attention_bias = read_common(full), fields.flag("attention_bias", False)
    common["norm_eps"] /= common["hidden_size"]
    return ModelSpec(
        **common,
        family="gemma",
        rope=rope_spec(full, common["head_dim"], common["max_context"]),
        windows=(None,) * common["num_layers"],
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )


def _read_gemma2(fields: Fields) -> ModelSpec:
    full = fields.with_defaults(_GEMMA2)
    return _read(
        full,
        "gemma2",
        2,
        rope=rope_spec(full, full.integer("head_dim"), full.integer("max_position_embeddings")),
        score_cap=_capped(fields, "attn_logit_softcapping", SCORE_CAP),
        logit_cap=_capped(fields, "final_logit_softcapping", LOGIT_CAP),
    )


def _read_gemma3(fields: Fields) -> ModelSpec:
    full = fields.with_defaults(_GEMMA3)
    sizes = full.integer("head_dim"), full.integer("max_position_embeddings")
    rope, local = rope_specs(full, *sizes, theta=_THETA, local=_LOCAL_THETA)
    return _read(
        full,
        "gemma3_text",
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
    linear_sources=SEPARATE_LINEAR_SOURCES,
    norm_offset=1.0,
    multipliers=lambda fields: dict.fromkeys(("o", "down"), fields.integer("hidden_size") ** -0.5),
)
"""Gemma of 2 and 7 billion parameters, and CodeGemma."""

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read_gemma2,
    linear_sources=SEPARATE_LINEAR_SOURCES,
    norms=NORMS_AFTER,
    norm_offset=1.0,
    multipliers=lambda fields: _multipliers(fields, "q"),
)
"""Gemma 2 of 2, 9 and 27 billion parameters."""

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read_gemma3,
    linear_sources=SEPARATE_LINEAR_SOURCES,
    norms=NORMS_AFTER,
    norm_offset=1.0,
    multipliers=lambda fields: _multipliers(fields, "q_norm"),
    wrapper="Gemma3ForConditionalGeneration",
)
"""Gemma 3 of 270 million to 27 billion parameters; of the multimodal ones the text part."""
