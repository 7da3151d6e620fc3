"""Where tokens go: which experts of a block are read most, by what calibration counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.packed import Weights
from models.spec import MixtureSpec


def hottest(tokens: npt.NDArray[np.int32], most: int, mixture: MixtureSpec) -> tuple[int, ...]:
    """The experts of a block that are read most.

    Args:
        tokens: int32 [held], calibration tokens that went to each.
        most: How many.
        mixture: Shared experts, to which every token goes, come first.
    """
    shared = range(mixture.experts, mixture.num_experts)
    ranked = sorted(range(mixture.experts), key=lambda expert: -int(tokens[expert]))
    return tuple([*shared, *ranked][:most])


def hit_rate(weights: Weights, most: int) -> float:
    """Share of the experts that calibration tokens went to, shared ones among them, that are the `hottest` so many.

    What no calibration text reached counts as if tokens went to all experts alike.
    """
    spec, mixture = weights.spec, weights.spec.mixture
    assert mixture is not None
    rates = []
    for layer in filter(spec.has_experts, range(spec.num_layers)):
        tokens = weights.expert_tokens(layer)
        counted = tokens.sum()
        rates.append(
            tokens[list(hottest(tokens, most, mixture))].sum() / counted if counted else most / mixture.num_experts
        )
    return float(np.mean(rates))
