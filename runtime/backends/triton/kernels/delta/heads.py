"""What the kernels of a delta rule share: the shape of its heads, and the numbers of tokens that they exchange."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

from models.spec import DeltaSpec
from runtime.backends.triton.sizes import CHUNK
from runtime.kv.states import WAITING

_LEAST_K = 32
"""Fewest rows of a padded matrix: tensor cores multiply half of them at a time, 16 or more."""


class Heads(NamedTuple):
    """Compile-time parameters of a delta rule."""

    KEYS: int
    """Query heads, and as many key heads."""
    VALUES: int
    """Value heads, each of which has a matrix."""
    DK: int
    """Channels of a query or key, and rows of a matrix."""
    DV: int
    """Channels of a value."""
    COLUMNS: int
    """Columns of a matrix in memory, a multiple of 16."""
    SCALE: float
    """One over the root of DK."""
    BLOCK_K: int
    """DK, padded to a power of two, and at least `_LEAST_K`."""
    BLOCK_D: int
    """The larger of DK and DV, padded likewise."""
    BLOCK_H: int
    """Value heads, padded likewise."""
    WAITING: int = WAITING
    """Most tokens of a slot that wait."""
    CHUNK: int = CHUNK
    """Rows of a chunk."""


class Mixed(NamedTuple):
    """What the delta rule reads of tokens: normalized queries and keys, values, and for each head beta, log decay."""

    waiting: Any
    """float32 [runs * WAITING, inputs], of those that wait, where queries are not written."""
    rows: Any
    """float32 [M, inputs], of a step's rows, where outputs take the places of values."""
    chunks: Any
    """float32 [M, VALUES, 2, CHUNK], how a row depends on those of its chunk: see `kernels.delta.chunks`."""


def heads_of(spec: DeltaSpec, columns: int) -> Heads:
    """The compile-time parameters of a delta rule, whose matrices have so many columns in memory."""
    power = triton.next_power_of_2
    return Heads(
        KEYS=spec.key_heads,
        VALUES=spec.value_heads,
        DK=spec.key_dim,
        DV=spec.value_dim,
        COLUMNS=columns,
        SCALE=spec.key_dim**-0.5,
        BLOCK_K=max(_LEAST_K, power(spec.key_dim)),
        BLOCK_D=power(max(spec.key_dim, spec.value_dim)),
        BLOCK_H=power(spec.value_heads),
    )


@triton.constexpr_function
def channels_of(heads):
    """Channels of all queries, keys and values."""
    return 2 * heads.KEYS * heads.DK + heads.VALUES * heads.DV


@triton.constexpr_function
def inputs_of(heads):
    """What enters the state of a token: these, and two numbers of each value head."""
    return 2 * heads.KEYS * heads.DK + heads.VALUES * (heads.DV + 2)


@triton.constexpr_function
def stride_of(heads):
    """Outputs of the projection for a token: what enters, and gates."""
    return 2 * heads.KEYS * heads.DK + heads.VALUES * (2 * heads.DV + 2)
