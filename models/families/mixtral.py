"""Mixtral: Mistral's block with experts in place of the MLP, whose shares add up to 1."""

from __future__ import annotations

from models.families.family import SEPARATE_LINEAR_SOURCES, Family, read_common, read_mixture, refuse_attention_bias
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import ModelSpec


def _read(fields: Fields) -> ModelSpec:
    common = read_common(fields)
    refuse_attention_bias(fields)
    return ModelSpec(
        **common,
        family="mixtral",
        rope=rope_spec(fields, common["head_dim"], common["max_context"]),
        windows=(fields.optional_integer("sliding_window"),) * common["num_layers"],
        mixture=read_mixture(fields, width=common["intermediate_size"], normalized=True),
    )


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    linear_sources=SEPARATE_LINEAR_SOURCES,
    mixture=True,
    renamed={"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."},
)
"""Mixtral 8x7B and 8x22B."""
