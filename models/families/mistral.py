"""Mistral: Llama's block with one sliding window for all blocks (absent means 4096, null means none).

Ministral has it on the blocks that `layer_types` names. In Ministral 3 queries grow with their positions. Mixtral has
experts in place of the MLP, whose shares add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from models.families.family import (
    WIDEST,
    Family,
    layers_of,
    listed_windows,
    read_mixture,
    read_spec,
    refuse_attention_bias,
)
from models.families.fields import Fields
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


def _read(fields: Fields, listed: bool = False) -> ModelSpec:
    """`listed`: whether `layer_types` may name the blocks with a window."""
    refuse_attention_bias(fields)
    layers = layers_of(fields)
    window = fields.optional_integer("sliding_window") if "sliding_window" in fields.table else DEFAULT_WINDOW
    windows = listed_windows(fields, layers, window) if listed else None
    return read_spec(fields, windows=(window,) * layers if windows is None else windows)


def _read_ministral3(fields: Fields) -> ModelSpec:
    table = fields.section("rope_parameters") or fields.section("rope_scaling") or replace(fields, table=_YARN)
    context = fields.integer("max_position_embeddings")
    return read_spec(
        replace(fields, table={**fields.table, "rope_parameters": dict(table.table), "rope_scaling": None}),
        head_dim=None if "head_dim" in fields.table else 128,
        windows=(fields.optional_integer("sliding_window"),) * layers_of(fields),
        query_growth=table.optional_number("llama_4_scaling_beta") or 0.0,
        query_growth_context=table.integer("original_max_position_embeddings", context),
    )


def _read_mixtral(fields: Fields) -> ModelSpec:
    refuse_attention_bias(fields)
    return read_spec(
        fields,
        windows=(fields.optional_integer("sliding_window"),) * layers_of(fields),
        mixture=read_mixture(fields, width=fields.integer("intermediate_size", most=WIDEST), normalized=True),
    )


MISTRAL = Family(
    model_type="mistral", architecture="MistralForCausalLM", read=_read, wrapper="Mistral3ForConditionalGeneration"
)
"""Mistral 7B and its successors of the same architecture, Mistral Small 3 among them; of multimodal ones the text
part."""
MINISTRAL = Family(model_type="ministral", architecture="MinistralForCausalLM", read=partial(_read, listed=True))
"""Ministral 8B of 2024."""
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    read=_read_ministral3,
    wrapper="Mistral3ForConditionalGeneration",
)
"""Ministral 3 of 3, 8 and 14 billion parameters, the text part."""
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read_mixtral,
    mixture=True,
    renamed={"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."},
)
"""Mixtral 8x7B and 8x22B."""
