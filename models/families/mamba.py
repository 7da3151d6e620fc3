"""Mamba-2 in blocks of a family: its sizes, whatever config.json calls them, and the tensors of a block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.errors import UnsupportedModelError
from models.families.family import MOST_TAPS
from models.families.fields import Fields
from models.spec import DeltaSpec, ModelSpec

MAMBA_SOURCES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("mamba.in_proj",),
    "o": ("mamba.out_proj",),
    "conv": ("mamba.conv1d",),
    "conv_bias": ("mamba.conv1d",),
    "decay": ("mamba.A_log",),
    "dt": ("mamba.dt_bias",),
    "skip": ("mamba.D",),
    "gain": ("mamba.norm",),
}
"""Modules of a block's linear layers and vectors."""
_UNLIMITED = (None, [0, math.inf], [0, {"__float__": "Infinity"}])
"""Limits of Mamba-2's steps that are none; JSON has no infinity."""


def with_states(fields: Fields, spec: ModelSpec, *, groups: str, taps: int, conv_bias: bool, **own: Any) -> ModelSpec:
    """A specification with Mamba-2.

    Args:
        fields: config.json.
        spec: All else of it, with the mixers of blocks.
        groups: The key of the number of groups, whose heads share B and C.
        taps: Tokens that the convolution sees.
        conv_bias: Whether this has a bias.
        own: Other fields of `DeltaSpec`.
    """
    limits = fields.table.get("time_step_limit")
    if not 2 <= taps <= MOST_TAPS or limits not in _UNLIMITED:
        raise UnsupportedModelError(
            f"{fields.source}: Mamba-2 over {taps} tokens with steps limited to {limits} is not supported (2 to "
            f"{MOST_TAPS} tokens without limits are). Choose another model."
        )
    sharing = fields.integer(groups)
    if own["value_heads"] % sharing:
        raise fields.wrong(groups, sharing, f"a divisor of the number of heads ({own['value_heads']})")
    delta = DeltaSpec(key_heads=sharing, mamba=True, **own)
    return replace(spec, delta=delta, conv_kernel_size=taps, conv_bias=conv_bias)
