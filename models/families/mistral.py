"""Mistral: Llama's block with one sliding window for all blocks (absent means 4096, null means none).

Ministral has it on the blocks that `layer_types` names.
"""

from __future__ import annotations

from models.families.family import (
    SEPARATE_LINEAR_SOURCES,
    Family,
    listed_windows,
    read_common,
    refuse_attention_bias,
)
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec

DEFAULT_WINDOW = 4096
"""Sliding window of a config that doesn't mention one: that of the first Mistral 7B."""


def _read(fields: Fields, family: str) -> ModelSpec:
    common = read_common(fields)
    refuse_attention_bias(fields)
    layers = common["num_layers"]
    window = fields.optional_integer("sliding_window") if "sliding_window" in fields.table else DEFAULT_WINDOW
    listed = listed_windows(fields, layers, window) if family == "ministral" else None
    return ModelSpec(
        **common,
        family=family,
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=(window,) * layers if listed is None else listed,
    )


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=lambda fields: _read(fields, "mistral"),
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""Mistral 7B and its successors of the same architecture, Mistral Small 3 among them."""

MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    read=lambda fields: _read(fields, "ministral"),
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""Ministral 8B of 2024."""
