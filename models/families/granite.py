"""Granite 3 and 4 without states: Llama's block, or one with experts, with four multipliers, which fold into weights.

With multipliers e (embedding), a (attention), r (residual) and 1 / s (logits), a Granite model is one of Llama whose
residual stream is 1 / e of it: what a block adds is multiplied by r / e, and since an RMSNorm undoes any scale but that
of its epsilon, eps / e² has the place of eps. Queries are multiplied by a √D, the last norm's weight by 1 / s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from models.families.family import Family, attention_biases, read_common, read_mixture, read_spec
from models.families.fields import Fields
from models.spec import ModelSpec


def _read(fields: Fields) -> ModelSpec:
    spec = read_spec(fields, **attention_biases(fields), mlp_bias=fields.flag("mlp_bias", False))
    return replace(spec, norm_eps=spec.norm_eps / fields.number("embedding_multiplier", 1.0) ** 2)


def _multipliers(fields: Fields) -> Mapping[str, float]:
    added = fields.number("residual_multiplier", 1.0) / fields.number("embedding_multiplier", 1.0)
    return {
        "q": fields.number("attention_multiplier", 1.0) * math.sqrt(read_common(fields)["head_dim"]),
        "o": added,
        "down": added,
        "norm": 1 / fields.number("logits_scaling", 1.0),
    }


def _read_mixture(fields: Fields, shared: str = "") -> ModelSpec:
    """`shared` is the key of the width of a shared expert."""
    spec = _read(fields)
    mixture = read_mixture(fields, width=spec.intermediate_size, normalized=True, shared=shared, gated=False)
    return replace(spec, mixture=mixture)


GRANITE = Family(model_type="granite", architecture="GraniteForCausalLM", read=_read, multipliers=_multipliers)
"""Granite 3.0 to 3.3, and the dense ones of 4."""

GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    read=_read_mixture,
    multipliers=_multipliers,
    mixture=True,
    renamed={
        "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
        "block_sparse_moe.router.layer.": "mlp.gate.",
        "block_sparse_moe.router.": "mlp.gate.",
        "block_sparse_moe.": "mlp.",
        "shared_mlp.input_linear.": "mlp.shared_expert.gate_up_proj.",
        "shared_mlp.output_linear.": "mlp.shared_expert.down_proj.",
    },
)
"""Granite 3.0 and 3.1, 1B-A400M and 3B-A800M."""

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    read=partial(_read_mixture, shared="shared_intermediate_size"),
)
"""Granite mixtures with a shared expert."""
