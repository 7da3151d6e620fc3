"""Mistral: Llama's block with one sliding window for all blocks (absent means 4096, null means none).

Ministral has it on the blocks that `layer_types` names. In Ministral 3 queries grow with their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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


_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotary parameters of a Ministral 3 whose config.json doesn't mention them."""


def _read_ministral3(fields: Fields) -> ModelSpec:
    table = fields.section("rope_parameters") or fields.section("rope_scaling") or replace(fields, table=_YARN)
    common = read_common(fields, head_dim=None if "head_dim" in fields.table else 128)
    return ModelSpec(
        **common,
        family="ministral3",
        rope=rope_spec(
            replace(fields, table={**fields.table, "rope_parameters": dict(table.table), "rope_scaling": None}),
            common["head_dim"],
            common["max_context"],
        ),
        windows=(fields.optional_integer("sliding_window"),) * common["num_layers"],
        query_growth=table.optional_number("llama_4_scaling_beta") or 0.0,
        query_growth_context=table.integer("original_max_position_embeddings", common["max_context"]),
    )


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
    wrapper="Mistral3ForConditionalGeneration",
)
"""Mistral 7B and its successors of the same architecture, Mistral Small 3 among them; of multimodal ones the text
part."""

MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    read=lambda fields: _read(fields, "ministral"),
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""Ministral 8B of 2024."""

MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    read=_read_ministral3,
    linear_sources=SEPARATE_LINEAR_SOURCES,
    wrapper="Mistral3ForConditionalGeneration",
)
"""Ministral 3 of 3, 8 and 14 billion parameters, the text part."""
