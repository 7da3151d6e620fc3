"""Gemma 3n: a residual stream that is four (AltUp), gates that are cut, caches that blocks share.

A block reads the first stream and corrects all four (`models.spec.AltUpSpec`). What attention reads is added to that
stream with a low-rank product of it (LAuReL), whose sum is divided by √2. Gates of the MLP in the first blocks are cut
at a share of their own distribution. As in Gemma 4, values pass a norm without a weight, scores are not scaled, and
embeddings of each block's own are added, here to the streams that no block reads; what makes them reads the corrected
first stream times a vector, which folds into it.
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
    shared_mixers,
)
from models.families.fields import Fields
from models.families.rotary import rope_specs
from models.spec import AltUpSpec, ModelSpec

_ABSENT: Mapping[str, Any] = {
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}
"""What an absent key means."""
_INTERVAL = 5
_THETA, _LOCAL_THETA = 1e6, 1e4
_CUT_BLOCKS, _CUT = 10, 0.95
"""The first blocks of deeper models, and the share of their gates that is cut, where config.json doesn't say."""
_MOST_STREAMS = 8


def _read(fields: Fields) -> ModelSpec:
    full = fields.with_defaults(_ABSENT)
    if full.table.get("altup_active_idx") not in (None, 0) or not full.flag("altup_correct_scale", True):
        raise UnsupportedModelError(
            f"{full.source}: only blocks that read the first stream and scale what they correct (altup_active_idx 0, "
            "altup_correct_scale true) are supported. Choose another model."
        )
    streams = full.integer("altup_num_inputs", most=_MOST_STREAMS)
    if streams == 1:
        raise full.wrong("altup_num_inputs", streams, f"a whole number from 2 to {_MOST_STREAMS}")
    widths = _of_blocks(full, "intermediate_size")
    common = read_common(replace(full, table={**full.table, "intermediate_size": max(widths)}))
    layers, window = common["num_layers"], full.integer("sliding_window")
    windows = listed_windows(full, layers, window) or every(_INTERVAL, layers, window)
    rope, local = rope_specs(full, common["head_dim"], common["max_context"], theta=_THETA, local=_LOCAL_THETA)
    known = min(full.integer("vocab_size_per_layer_input"), common["vocab_size"])
    capped = fields.table.get("final_logit_softcapping", True) is not None
    return ModelSpec(
        **common,
        rope=rope,
        window_rope=local,
        windows=windows,
        mixers=shared_mixers(full, windows),
        norm_after=True,
        **attention_biases(full),
        qk_norm=True,
        v_norm=True,
        mlp_widths=widths if len(set(widths)) > 1 else (),
        sparsity=_sparsity(full, layers),
        token_width=full.integer("hidden_size_per_layer_input", most=WIDEST),
        token_vocab=known if known < common["vocab_size"] else None,
        altup=AltUpSpec(streams=streams, rank=full.integer("laurel_rank", most=WIDEST)),
        logit_cap=full.number("final_logit_softcapping") if capped else None,
    )


def _of_blocks(fields: Fields, key: str) -> tuple[int, ...]:
    """A width of each block: a list, or one for all."""
    layers, listed = fields.integer("num_hidden_layers"), fields.table[key]
    if not isinstance(listed, list):
        return (fields.integer(key, most=WIDEST),) * layers
    if len(listed) != layers:
        raise fields.wrong(key, listed, f"a whole number, or a list of {layers}")
    return tuple(replace(fields, table={key: own}).integer(key, most=WIDEST) for own in listed)


def _sparsity(fields: Fields, layers: int) -> tuple[float, ...]:
    listed = fields.table.get("activation_sparsity_pattern")
    if listed is None:
        cut = _CUT_BLOCKS if layers > _CUT_BLOCKS else 0
        listed = [_CUT] * cut + [0.0] * (layers - cut)
    fine = isinstance(listed, list) and all(isinstance(own, int | float) and 0 <= own < 1 for own in listed)
    if not fine or len(listed) != layers:
        raise fields.wrong("activation_sparsity_pattern", listed, f"a list of {layers} numbers from 0 to below 1")
    return tuple(map(float, listed)) if any(listed) else ()


def _multipliers(fields: Fields) -> Mapping[str, float]:
    spec = _read(fields)
    tokens = {"tokens": math.sqrt(spec.token_width / 2), "tokens.gate_up_norm": math.sqrt(0.5)}
    own = {"q_norm": math.sqrt(spec.head_dim), "altup_norm": 1 / spec.hidden_size, "laurel_scale": math.sqrt(0.5)}
    return {**own, **tokens}


GEMMA3N = Family(
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    read=_read,
    linear_sources={
        **SEPARATE_LINEAR_SOURCES,
        "laurel.gate_up": ("laurel.linear_left",),
        "laurel.down": ("laurel.linear_right",),
        "inner.gate_up": ("per_layer_input_gate",),
        "inner.down": ("per_layer_projection",),
    },
    mixer_sources={"shared": {"qkv": ("self_attn.q_proj",)}},
    norms={
        **NORMS_AFTER,
        "altup_norm": "altup.router_norm",
        "altup_router": "altup.modality_router",
        "altup_predict": "altup.prediction_coefs",
        "altup_correct": "altup.correction_coefs",
        "laurel.down_norm": "laurel.post_laurel_norm",
        "inner.down_norm": "post_per_layer_input_norm",
    },
    made=("laurel_scale",),
    outer={
        "tokens": "model.embed_tokens_per_layer",
        "tokens.gate_up": "model.per_layer_model_projection",
        "tokens.gate_up_norm": "model.per_layer_projection_norm",
        **{f"spread{at}.down": f"model.altup_projections.{at - 1}" for at in range(1, _MOST_STREAMS)},
        **{f"merge{at}.down": f"model.altup_unembed_projections.{at - 1}" for at in range(1, _MOST_STREAMS)},
    },
    input_scales={"inner.gate_up": "altup.correct_output_scale"},
    multipliers=_multipliers,
    wrapper="Gemma3nForConditionalGeneration",
)
"""Gemma 3n E2B and E4B, the text part."""
