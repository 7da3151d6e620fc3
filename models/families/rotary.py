"""Rotary embedding settings of a config.json, in both of its spellings.

transformers 5 writes `rope_parameters`; before, it was `rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from models.errors import CheckpointError, UnsupportedModelError
from models.families.fields import Fields
from models.spec import RopeKind, RopeSpec

KINDS: Mapping[str, RopeKind] = {kind: kind for kind in ("default", "linear", "llama3", "longrope", "yarn")}
"""Supported values of `rope_type`."""
_PROPORTIONAL = "proportional"
"""Another one, of Gemma 4 and LFM3, which turn whole heads by the others."""


def rope_spec(
    fields: Fields, head_dim: int, max_context: int, *, aliases: Mapping[str, RopeKind] | None = None
) -> RopeSpec:
    """Read the rotary embedding of a model.

    Args:
        fields: The whole config.json.
        head_dim: D.
        max_context: `max_position_embeddings`.
        aliases: Further names of `rope_type` that the family knows.
    """
    table = _table(fields)
    if any(isinstance(value, dict) for value in table.table.values()):
        raise UnsupportedModelError(
            f"{table.source}: rotary parameters that differ by layer type are not supported. Choose another model."
        )
    return _read(fields, table, head_dim, max_context, aliases)


def rope_specs(
    fields: Fields, head_dim: int, max_context: int, *, theta: float, local: float | None, wide: int | None = None
) -> tuple[RopeSpec, RopeSpec]:
    """Read the rotary embeddings of a model whose blocks with a window have another one.

    Before transformers 5 these had `rope_local_base_freq`, or `rope_theta` too, and no scaling.

    Args:
        fields: The whole config.json.
        head_dim: D.
        max_context: `max_position_embeddings`.
        theta: Base of the blocks that see everything, where config.json doesn't say.
        local: Base of those with a window, where config.json doesn't say; None: the same as of the others.
        wide: D of the blocks that see everything, where it may be another one; rotation may be proportional then.

    Returns:
        That of the blocks that see everything, and that of those with a window.
    """
    table = _table(fields)
    parts = [table.section(kind) for kind in ("full_attention", "sliding_attention")]
    if not any(parts):
        base = fields.number("rope_theta", theta)
        own = fields.number("rope_local_base_freq", base if local is None else local)
        parts = [table.with_defaults({"rope_theta": base}), replace(table, table={"rope_theta": own})]
    both = [
        (part or replace(table, table={})).with_defaults({"rope_theta": base})
        for part, base in zip(parts, (theta, theta if local is None else local), strict=True)
    ]
    aliases: Mapping[str, RopeKind] = {_PROPORTIONAL: "default"} if wide else {}
    full, sliding = (
        _read(fields, part, dim, max_context, aliases)
        for part, dim in zip(both, (wide or head_dim, head_dim), strict=True)
    )
    return full, sliding


def _table(fields: Fields) -> Fields:
    """The table of rotary parameters; empty where there is none."""
    found = fields.section("rope_scaling") or fields.section("rope_parameters")
    return found or Fields(table={}, source=fields.source, remedy=fields.remedy)


def _read(
    fields: Fields, table: Fields, head_dim: int, max_context: int, aliases: Mapping[str, RopeKind] | None
) -> RopeSpec:
    known = {**KINDS, **(aliases or {})}
    name = table.text("rope_type", table.table.get("type") or "default")
    if name not in known:
        raise UnsupportedModelError(
            f"{table.source}: rope_type '{name}' is not supported (supported: {', '.join(known)}). "
            "Choose another model."
        )
    if name == _PROPORTIONAL:
        return _proportional(fields, table, head_dim)
    kind = known[name]
    theta = table.number("rope_theta", fields.number("rope_theta", 10000.0))
    rotary_dim = head_dim if _PROPORTIONAL in known else _rotary_dim(fields, table, head_dim)
    if kind == "default":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    if kind == "linear":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim, kind=kind, factor=table.number("factor"))
    if kind == "llama3":
        return _llama3(fields, table, theta, rotary_dim, max_context)
    if kind == "yarn":
        return _yarn(fields, table, theta, rotary_dim, max_context)
    return _longrope(fields, table, theta, rotary_dim, max_context)


def _proportional(fields: Fields, table: Fields, head_dim: int) -> RopeSpec:
    """The first pairs of all D / 2, at the frequencies that they have among those, rotate (`Family.proportional`)."""
    share = table.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = 2 * int(share * head_dim // 2)
    if not 2 <= rotary_dim <= head_dim:
        raise table.wrong("partial_rotary_factor", share, f"a share of {head_dim // 2} pairs of channels")
    theta, factor = table.number("rope_theta", fields.number("rope_theta", 10000.0)), table.number("factor", 1.0)
    kind: RopeKind = "default" if factor == 1 else "linear"
    return RopeSpec(theta=theta ** (rotary_dim / head_dim), rotary_dim=rotary_dim, kind=kind, factor=factor)


def _rotary_dim(fields: Fields, table: Fields, head_dim: int) -> int:
    share = table.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"{fields.source}: partial_rotary_factor {share} of heads of {head_dim} channels rotates {rotary_dim} "
            f"channels, but that must be an even number up to {head_dim}. Take config.json from the model's publisher."
        )
    return rotary_dim


def _original_context(fields: Fields, table: Fields, default: int) -> int:
    """Context of pre-training; the top level of config.json wins over the rope table, as in transformers."""
    key = "original_max_position_embeddings"
    return fields.optional_integer(key) or table.integer(key, default)


def _llama3(fields: Fields, table: Fields, theta: float, rotary_dim: int, max_context: int) -> RopeSpec:
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    if high <= low:
        raise table.wrong("high_freq_factor", high, f"above low_freq_factor ({low})")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        kind="llama3",
        factor=table.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=_original_context(fields, table, max_context),
    )


def _yarn(fields: Fields, table: Fields, theta: float, rotary_dim: int, max_context: int) -> RopeSpec:
    original = _original_context(fields, table, max_context)
    factor = table.number("factor", max_context / original)
    fast, slow = table.number("beta_fast", 32.0), table.number("beta_slow", 1.0)
    if slow >= fast:
        raise table.wrong("beta_slow", slow, f"below beta_fast ({fast})")
    both = table.optional_number("mscale"), table.optional_number("mscale_all_dim")
    own, others = (both[0], both[1]) if None not in both else (1.0, 0.0)
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=table.flag("truncate", True),
        attention_factor=table.number("attention_factor", _mscale(factor, own) / _mscale(factor, others)),
    )


def _mscale(factor: float, strength: float | None) -> float:
    """YaRN's sharpening of attention, which grows with the log of the stretch (§3.4)."""
    return 1.0 + 0.1 * (strength or 0.0) * math.log(factor) if factor > 1 else 1.0


def score_factor(fields: Fields) -> float:
    """By how much YaRN sharpens the scores of latent attention, where `mscale_all_dim` asks for it (DeepSeek-V2)."""
    table = _table(fields)
    strength = table.optional_number("mscale_all_dim") or 0.0
    return _mscale(table.number("factor"), strength) ** 2 if strength else 1.0


def _longrope(fields: Fields, table: Fields, theta: float, rotary_dim: int, max_context: int) -> RopeSpec:
    original = _original_context(fields, table, max_context)
    stretch = table.number("factor", max_context / original)
    # A config without its own factor gets the one of the LongRoPE paper, which grows with the log of the stretch.
    default = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        kind="longrope",
        original_context=original,
        short_factor=table.numbers("short_factor", rotary_dim // 2),
        long_factor=table.numbers("long_factor", rotary_dim // 2),
        attention_factor=table.number("attention_factor", default),
    )
