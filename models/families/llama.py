"""Llama 2, 3, 3.1 (rescaled rotary frequencies) and 3.2 (tied embeddings), and others of its block.

Seed-OSS has biases on q, k and v, and heads of their own width; SmolLM3 no rotary embedding in every fourth block;
Phi-3, Phi-3.5 (longrope) and Phi-4-mini (heads rotate in part) fused projections, and one window for all blocks.
"""

from __future__ import annotations

from models.families.family import Family, attention_biases, layers_of, listed_windows, read_spec, refuse_attention_bias
from models.families.fields import Fields
from models.spec import ModelSpec, RopeKind

INTERVAL = 4
"""Every so many blocks of a SmolLM3 one has no rotary embedding, where config.json doesn't say."""
HEAD_DIM = 128
"""Width of a Seed-OSS head where config.json doesn't say."""


def _read(fields: Fields) -> ModelSpec:
    return read_spec(fields, **attention_biases(fields), mlp_bias=fields.flag("mlp_bias", False))


def _read_seed_oss(fields: Fields) -> ModelSpec:
    return read_spec(
        fields,
        head_dim=None if "head_dim" in fields.table else HEAD_DIM,
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _read_smollm3(fields: Fields) -> ModelSpec:
    layers = layers_of(fields)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    nope_layers = _nope_layers(fields, layers)
    # Without a list, the blocks with a window are those without a rotary embedding, as in transformers.
    windows = listed_windows(fields, layers, window) if window is not None else (None,) * layers
    return read_spec(
        fields,
        windows=tuple(window if at in nope_layers else None for at in range(layers)) if windows is None else windows,
        nope_layers=nope_layers,
        **attention_biases(fields),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _nope_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """`no_rope_layers` has a 1 for each block that rotates, and a 0 for each that doesn't."""
    rotates = fields.table.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", INTERVAL)
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(rotates, list) or len(rotates) != layers or any(each not in (0, 1) for each in rotates):
        raise fields.wrong("no_rope_layers", rotates, f"a list of {layers} times 0 or 1")
    return tuple(at for at, each in enumerate(rotates) if not each)


def _read_phi3(fields: Fields) -> ModelSpec:
    refuse_attention_bias(fields)
    # Early Phi-3 configs call longrope "su", and some say "yarn" and mean it too.
    aliases: dict[str, RopeKind] = {"su": "longrope", "yarn": "longrope"}
    return read_spec(fields, aliases=aliases, windows=(fields.optional_integer("sliding_window"),) * layers_of(fields))


LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", read=_read)
"""Llama 2 to 3.2."""
SEED_OSS = Family(model_type="seed_oss", architecture="SeedOssForCausalLM", read=_read_seed_oss)
"""Seed-OSS 36B."""
SMOLLM3 = Family(model_type="smollm3", architecture="SmolLM3ForCausalLM", read=_read_smollm3)
"""SmolLM3 3B."""
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read=_read_phi3,
    linear_sources={
        "qkv": ("self_attn.qkv_proj",),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_up_proj",),
        "down": ("mlp.down_proj",),
    },
)
"""Phi-3 mini and medium, Phi-3.5-mini, Phi-4 and Phi-4-mini."""
