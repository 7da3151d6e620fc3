"""Mistral: Llama's block with one sliding window for all blocks (absent means 4096, null means none)."""

from __future__ import annotations

from models.families.family import SEPARATE_LINEAR_SOURCES, Family, read_common, refuse_attention_bias
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec

DEFAULT_WINDOW = 4096
"""Sliding window of a config that doesn't mention one: that of the first Mistral 7B."""


def _read(fields: Fields) -> ModelSpec:
    common = read_common(fields)
    refuse_attention_bias(fields)
    window = fields.optional_integer("sliding_window") if "sliding_window" in fields.table else DEFAULT_WINDOW
    return ModelSpec(
        **common,
        family="mistral",
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=(window,) * common["num_layers"],
    )


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=_read,
    linear_sources=SEPARATE_LINEAR_SOURCES,
)
"""Mistral 7B and its successors of the same architecture."""
