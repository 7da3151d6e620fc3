"""Gemma 4: heads of two widths, caches that blocks share, embeddings of each block's own, experts beside an MLP.

Blocks without a window have wider heads, fewer of keys and values, and a share of their channels rotates. Values pass a
norm without a weight, and in the larger models they are made by the weights of keys. Scores are not scaled, so the root
of D folds into the norm of queries. The last blocks of the smaller models read the cache of an earlier block; theirs
also add embeddings of the token for each block, behind the MLP. The block's output is multiplied by a number. Experts
read the stream through a norm of their own, and their router through another, whose weights it calls a scale.

Embeddings are multiplied by √C, as in Gemma 2 and 3 (`gemma.py`): the stream is 1 / √C of Gemma's, so norms behind are
divided by √C and what reads the stream without a norm is multiplied by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import (
    NORMS_AFTER,
    SEPARATE_LINEAR_SOURCES,
    WIDEST,
    Family,
    attention_biases,
    every,
    listed_windows,
    read_common,
    read_mixture,
    shared_mixers,
)
from models.families.fields import Fields
from models.families.rotary import rope_specs
from models.spec import HeadShape, MixtureSpec, ModelSpec

_ABSENT: Mapping[str, Any] = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
}
"""What an absent key means."""
_INTERVAL = 6
_THETA, _LOCAL_THETA, _SHARE = 1e6, 1e4, 0.25


def _wide_heads(fields: Fields, heads: int, kv_heads: int) -> HeadShape:
    """Heads of the blocks without a window.

    transformers writes them as exceptions, by the number of the block (`per_layer_config`), where publishers have
    `global_head_dim` and `num_global_key_value_heads`.
    """
    if "per_layer_config" not in fields.table:
        asked = (
            fields.optional_integer("num_global_key_value_heads") if fields.flag("attention_k_eq_v", False) else None
        )
        return HeadShape(heads, asked or kv_heads, fields.integer("global_head_dim"))
    exceptions = fields.section("per_layer_config") or replace(fields, table={})
    found = [own.table for key in exceptions.table if (own := exceptions.section(key))]
    if any(own != found[0] for own in found):
        raise UnsupportedModelError(
            f"{fields.source}: 'per_layer_config' gives blocks more than two shapes of heads. Choose another model."
        )
    own = replace(exceptions, table=found[0] if found else {})
    shape = own.integer("num_key_value_heads", kv_heads), own.integer("head_dim", fields.integer("head_dim"))
    return HeadShape(heads, *shape)


def _read(fields: Fields) -> ModelSpec:
    full = fields.with_defaults(_ABSENT)
    common = read_common(full)
    layers, window, eps = common["num_layers"], full.integer("sliding_window"), common["norm_eps"]
    common["norm_eps"] = eps / common["hidden_size"]
    windows = listed_windows(full, layers, window) or every(_INTERVAL, layers, window)
    windows = (*windows[:-1], None)
    wide = _wide_heads(full, common["num_heads"], common["num_kv_heads"])
    if wide.heads % wide.kv_heads:
        raise full.wrong("num_global_key_value_heads", wide.kv_heads, f"a divisor of {wide.heads}")
    if wide.dim % 2:
        raise full.wrong("global_head_dim", wide.dim, "an even number")
    rope, local = _ropes(full, common["head_dim"], wide.dim, common["max_context"])
    mixers = shared_mixers(full, windows)
    width, wider = common["intermediate_size"], full.flag("use_double_wide_mlp", False)
    tokens, vocabulary = full.count("hidden_size_per_layer_input", 1 << 20), common["vocab_size"]
    known = full.integer("vocab_size_per_layer_input", vocabulary) if tokens else vocabulary
    if known != vocabulary:
        raise full.wrong("vocab_size_per_layer_input", known, f"vocab_size ({vocabulary})")
    return ModelSpec(
        **common,
        wide_heads=wide,
        rope=rope,
        window_rope=local,
        windows=windows,
        mixers=mixers,
        norm_after=True,
        inner_eps=eps,
        **attention_biases(full),
        qk_norm=True,
        v_norm=True,
        mlp_widths=tuple(width * (1 + (mixer == "shared")) for mixer in mixers) if wider and mixers else (),
        token_width=tokens,
        scaled=True,
        logit_cap=fields.optional_number("final_logit_softcapping"),
        mixture=_mixture(full) if full.flag("enable_moe_block", False) else None,
    )


def _mixture(fields: Fields) -> MixtureSpec:
    chosen = {"num_experts_per_tok": fields.integer("top_k_experts")}
    width = fields.integer("moe_intermediate_size", most=WIDEST)
    return read_mixture(fields.with_defaults(chosen), width=width, normalized=True, parallel_mlp=True)


def _ropes(fields: Fields, head_dim: int, wide: int, context: int) -> Any:
    if fields.section("rope_parameters") is None:
        full = {"rope_type": "proportional", "partial_rotary_factor": _SHARE, "rope_theta": _THETA}
        both = {"full_attention": full, "sliding_attention": {"rope_theta": _LOCAL_THETA}}
        fields = fields.with_defaults({"rope_parameters": both})
    return rope_specs(fields, head_dim, context, theta=_THETA, local=_LOCAL_THETA, wide=wide)


def _multipliers(fields: Fields) -> Mapping[str, float]:
    spec = _read(fields)
    root = math.sqrt(spec.hidden_size)
    queries = {f"layers.{layer}.q_norm": math.sqrt(spec.heads_of(layer).dim) for layer in range(spec.num_layers)}
    tokens = {"tokens": math.sqrt(spec.token_width / 2), "tokens.gate_up_norm": math.sqrt(0.5)}
    own = {"o_norm": 1 / root, "down_norm": 1 / root, "router_norm": 1 / root, "inner.gate_up": root}
    return {**own, **tokens, **queries}


GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read=_read,
    linear_sources={
        **SEPARATE_LINEAR_SOURCES,
        "inner.gate_up": ("per_layer_input_gate",),
        "inner.down": ("per_layer_projection",),
    },
    mixer_sources={"shared": {"qkv": ("self_attn.q_proj",)}},
    norms={
        **NORMS_AFTER,
        "scale": "layer_scalar",
        "router_norm": "router.scale",
        "mlp_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_down_norm": "post_feedforward_layernorm_2",
        "inner.down_norm": "post_per_layer_input_norm",
    },
    outer={
        "tokens": "model.embed_tokens_per_layer",
        "tokens.gate_up": "model.per_layer_model_projection",
        "tokens.gate_up_norm": "model.per_layer_projection_norm",
    },
    multipliers=_multipliers,
    proportional=True,
    keys_as_values="attention_k_eq_v",
    wrapper="Gemma4ForConditionalGeneration",
    mixture=True,
    routers=("router.proj",),
    expert_scales="router.per_expert_scale",
    renamed={".experts.": ".mlp.experts."},
)
"""Gemma 4 E2B, E4B, 26B-A4B and 31B, the text part."""


def _read_unified(fields: Fields) -> ModelSpec:
    return _read(fields.with_defaults({"sliding_window": 1024, "max_position_embeddings": 262144}))


GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    read=_read_unified,
    wrapper="Gemma4UnifiedForConditionalGeneration",
    mixture=False,
)
"""Gemma 4 12B, the text part."""
