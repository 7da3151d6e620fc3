"""Falcon-H1: attention and Mamba-2 side by side in each block, and a dozen multipliers, which fold into weights.

With multipliers e of embeddings and r of what is added, the stream is 1 / e of Falcon's, as in `granite.py`. What
multiplies queries and keys is all with queries, and what multiplies values with `o`. Mamba-2 has a multiplier for each
part of what it reads, and the gate of an MLP one before its activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from models.errors import UnsupportedModelError
from models.families.family import NORMS, SEPARATE_LINEAR_SOURCES, WIDEST, Family, read_spec
from models.families.fields import Fields
from models.families.mamba import MAMBA_SOURCES, with_states
from models.spec import STATE_O, STATE_QKV, Mixer, ModelSpec

_ABSENT = {"mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_d_ssm": 1024, "mamba_d_state": 256}
"""What an absent key means."""
_BOTH: tuple[Mixer, ...] = ("both",)
_PARTS = ("gates", "x", "B", "C", "steps")
"""What Mamba-2 reads, in the order of its multipliers."""


def _read(fields: Fields) -> ModelSpec:
    fields = fields.with_defaults(_ABSENT)
    for key in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        if fields.flag(key, False):
            raise UnsupportedModelError(
                f"{fields.source}: '{key}' is true, which is not supported. Choose another model."
            )
    normed = fields.flag("mamba_rms_norm", False)
    if normed and fields.flag("mamba_norm_before_gate", True):
        raise UnsupportedModelError(
            f"{fields.source}: a norm of Mamba-2's outputs in front of the gate ('mamba_norm_before_gate') is not "
            "supported. Choose another model."
        )
    spec = read_spec(fields)
    heads, whole = fields.integer("mamba_n_heads", most=WIDEST), fields.integer("mamba_d_ssm", most=WIDEST)
    if whole % heads:
        raise fields.wrong("mamba_n_heads", heads, f"a divisor of mamba_d_ssm ({whole})")
    spec = replace(
        spec,
        mixers=_BOTH * spec.num_layers,
        norm_eps=spec.norm_eps / fields.number("embedding_multiplier", 1.0) ** 2,
        inner_eps=spec.norm_eps,
    )
    return with_states(
        fields,
        spec,
        groups="mamba_n_groups",
        taps=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        value_heads=heads,
        value_dim=whole // heads,
        key_dim=fields.integer("mamba_d_state", most=WIDEST),
        biased=False,
        normed=normed,
    )


def _listed(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if fields.table.get(key) is None else fields.numbers(key, count)


def _multipliers(fields: Fields) -> Mapping[str, float]:
    gate, down = _listed(fields, "mlp_multipliers", 2)
    read, keys = fields.number("attention_in_multiplier", 1.0), fields.number("key_multiplier", 1.0)
    embedded, states = fields.number("embedding_multiplier", 1.0), fields.number("ssm_in_multiplier", 1.0)
    parts = zip(_PARTS, _listed(fields, "ssm_multipliers", len(_PARTS)), strict=True)
    return {
        "q": read * read * keys,
        "o": read * fields.number("attention_out_multiplier", 1.0) / embedded,
        STATE_O: fields.number("ssm_out_multiplier", 1.0) / embedded,
        "gate": gate,
        "down": down / embedded,
        "norm": fields.number("lm_head_multiplier", 1.0),
        **{f"{STATE_QKV}.{part}": states * own for part, own in parts},
    }


_FEED_FORWARD = {
    "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": ("feed_forward.down_proj",),
}
FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    read=_read,
    linear_sources={**SEPARATE_LINEAR_SOURCES, **_FEED_FORWARD},
    mixer_sources={"delta": {**MAMBA_SOURCES, STATE_QKV: MAMBA_SOURCES["qkv"], STATE_O: MAMBA_SOURCES["o"]}},
    norms={**NORMS, "post_norm": "pre_ff_layernorm"},
    last_norm="model.final_layernorm",
    multipliers=_multipliers,
)
"""Falcon-H1 0.5B to 34B."""
