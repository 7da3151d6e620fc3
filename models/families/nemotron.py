"""Nemotron-H and Nemotron 3 Nano: Mamba-2 or attention without rotary embedding, then an MLP or experts, without gates.

What config.json calls a block is one of the four, with a norm before it. Here a mixer and the MLP or experts behind it
are a block, so that some blocks have no MLP, and blocks have other numbers than there (`_places`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import (
    DEEPEST,
    PROJECTIONS,
    SEPARATE_LINEAR_SOURCES,
    WIDEST,
    Family,
    read_mixture,
    read_spec,
)
from models.families.fields import Fields
from models.families.mamba import MAMBA_SOURCES, with_states
from models.spec import Mixer, ModelSpec

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_MIXERS: dict[str, Mixer] = {"linear_attention": "delta", "full_attention": "attention"}
_MODULES = {"linear_attention": "mamba", "full_attention": "self_attn", "mlp": "mlp", "moe": "mlp"}
_ABSENT = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
"""What an absent key means."""
_FURTHER = (
    {
        **{own: own for own in ("eh_proj", "enorm", "hnorm")},
        "norm": "input_layernorm",
        "mixer": "self_attn",
    },
    {"norm": "post_attention_layernorm", "mixer": "mlp", "final_layernorm": "shared_head.norm"},
)
"""Modules of the two blocks, attention and experts, that predict a further token, as modules of one (`models.mtp`).

Source: vLLM, vllm/model_executor/models/nemotron_h_mtp.py."""


def _kinds(fields: Fields) -> list[str]:
    """What each of config.json's blocks is: by a list, or a letter for each."""
    pattern = fields.table.get("hybrid_override_pattern")
    kinds = fields.table.get("layers_block_type") or fields.table.get("layer_types")
    if kinds is None and isinstance(pattern, str):
        kinds = [_LETTERS.get(letter) for letter in pattern]
    if isinstance(kinds, list):
        kinds = [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if (
        not isinstance(kinds, list)
        or not 0 < len(kinds) <= DEEPEST
        or any(kind not in _LETTERS.values() for kind in kinds)
    ):
        key = "hybrid_override_pattern" if pattern else "layers_block_type"
        raise fields.wrong(key, pattern or kinds, f"the kinds of 1 to {DEEPEST} blocks: {', '.join(_LETTERS.values())}")
    return kinds


def _numbers(fields: Fields) -> list[int]:
    """The block here of each of config.json's.

    Raises:
        UnsupportedModelError: An MLP or experts do not follow a mixer.
    """
    kinds, found = _kinds(fields), list[int]()
    for at, kind in enumerate(kinds):
        if kind not in _MIXERS and (at == 0 or kinds[at - 1] not in _MIXERS):
            raise UnsupportedModelError(
                f"{fields.source}: block {at} is '{kind}' and does not follow Mamba-2 or attention, which is not "
                "supported. Choose another model."
            )
        found.append((found[-1] if found else -1) + (kind in _MIXERS))
    return found


def _places(fields: Fields) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for at, (kind, number) in enumerate(zip(_kinds(fields), _numbers(fields), strict=True)):
        norm = "input_layernorm" if kind in _MIXERS else "post_attention_layernorm"
        parts = {"mixer": _MODULES[kind], "norm": norm, "input_layernorm": norm}
        parts[_MODULES[kind]] = _MODULES[kind]  # of a GGUF file, whose modules are named already
        found |= {f"model.layers.{at}.{part}.": f"model.layers.{number}.{own}." for part, own in parts.items()}
    if _predicting(fields) == ["full_attention", "moe"]:
        begin = f"model.layers.{number + 1}."
        for at, modules in enumerate(_FURTHER):
            found |= {f"mtp.layers.{at}.{own}.": f"{begin}{here}." for own, here in modules.items()}
    return found


def _predicting(fields: Fields) -> list[Any]:
    """What each block that predicts a further token is."""
    kinds, pattern = fields.table.get("mtp_layers_block_type"), fields.table.get("mtp_hybrid_override_pattern", "*E")
    listed = kinds if isinstance(kinds, list) else map(_LETTERS.get, str(pattern))
    return [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in listed]


def _read(fields: Fields) -> ModelSpec:
    kinds, numbers = _kinds(fields), _numbers(fields)
    fields = fields.with_defaults({**_ABSENT, "num_hidden_layers": numbers[-1] + 1})
    fields = replace(fields, table={**fields.table, "num_hidden_layers": numbers[-1] + 1})
    fields = replace(fields, table={**fields.table, "hidden_act": fields.table["mlp_hidden_act"]})
    blocks = range(numbers[-1] + 1)
    dense, routed = (
        {number for number, own in zip(numbers, kinds, strict=True) if own == kind} for kind in ("mlp", "moe")
    )
    spec = read_spec(
        fields,
        eps="layer_norm_epsilon",
        activations={"relu2": "relu2"},
        nope_layers=tuple(blocks),
        mlp_bias=fields.flag("mlp_bias", False),
        mixers=tuple(_MIXERS[kind] for kind in kinds if kind in _MIXERS),
        bare=tuple(block for block in blocks if block not in dense | routed),
    )
    if routed:
        spec = _with_experts(fields, spec, tuple(block for block in blocks if block not in routed))
    if "delta" not in spec.mixers:
        return spec
    return with_states(
        fields,
        spec,
        groups="n_groups",
        taps=fields.integer("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        value_heads=fields.integer("mamba_num_heads", most=WIDEST),
        value_dim=fields.integer("mamba_head_dim", most=WIDEST),
        key_dim=fields.integer("ssm_state_size", most=WIDEST),
        biased=fields.flag("use_bias", False),
    )


def _with_experts(fields: Fields, spec: ModelSpec, others: tuple[int, ...]) -> ModelSpec:
    """The same with experts in all but some blocks."""
    if fields.table.get("moe_latent_size") or fields.table.get("n_group", 1) != 1 or spec.mlp_bias:
        raise UnsupportedModelError(
            f"{fields.source}: experts that read a latent (moe_latent_size), are chosen in groups (n_group) or have "
            "biases are not supported. Choose another model."
        )
    mixture = read_mixture(
        fields,
        width=fields.integer("moe_intermediate_size", most=WIDEST),
        normalized=fields.flag("norm_topk_prob", True),
        dense=others,
        shared="moe_shared_expert_intermediate_size",
        gated=False,
        scoring="sigmoid",
        corrected=True,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return replace(spec, mixture=mixture)


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    read=_read,
    linear_sources={**SEPARATE_LINEAR_SOURCES, "gate_up": ("mlp.up_proj",)},
    mixer_sources={"delta": MAMBA_SOURCES},
    mixture=True,
    projections={**PROJECTIONS, "gate_up": ("up_proj",)},
    last_norm="model.norm_f",
    predicts_further=True,
    renamed={
        "backbone.": "model.",
        "model.embeddings.": "model.embed_tokens.",
        ".shared_experts.": ".shared_expert.",
    },
    places=_places,
)
"""Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano."""
