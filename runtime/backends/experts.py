"""Where tokens go: which experts of a block are read most, by what calibration counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
