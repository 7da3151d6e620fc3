"""SmolLM3: Llama's block, without a rotary embedding in every fourth one."""

from __future__ import annotations

from models.families.family import SEPARATE_LINEAR_SOURCES, Family, listed_windows, read_common
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec

INTERVAL = 4
"""Every so many blocks one has no rotary embedding, where config.json doesn't say."""


def _read(fields: Fields) -> ModelSpec:
    common = read_common(fields)
    attention_bias, layers = fields.flag("attention_bias", False), common["num_layers"]
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    unrotated = _unrotated(fields, layers)
    # Without a list, the blocks with a window are those without a rotary embedding, as in transformers.
    windows = listed_windows(fields, layers, window) if window is not None else (None,) * layers
    return ModelSpec(
        **common,
        family="smollm3",
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=tuple(window if at in unrotated else None for at in range(layers)) if windows is None else windows,
        unrotated=unrotated,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _unrotated(fields: Fields, layers: int) -> tuple[int, ...]:
    """`no_rope_layers` has a 1 for each block that rotates, and a 0 for each that doesn't."""
    rotates = fields.table.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", INTERVAL)
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(rotates, list) or len(rotates) != layers or any(each not in (0, 1) for each in rotates):
        raise fields.wrong("no_rope_layers", rotates, f"a list of {layers} times 0 or 1")
    return tuple(at for at, each in enumerate(rotates) if not each)


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=_read,
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""SmolLM3 3B."""
