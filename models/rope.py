"""Rotary position embedding: frequencies and tables in numpy, from which every backend rotates.

Half-split convention: channel i of a head pairs with channel i + rotary_dim / 2, and the pair at position p turns by
p * frequency[i].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.spec import ModelSpec, RopeSpec


def frequencies(rope: RopeSpec, context: int) -> npt.NDArray[np.float64]:
    """Radians by which each pair of channels turns from one position to the next.

    Args:
        rope: The model's rotary embedding.
        context: Context in use, in tokens: `longrope` has one set of frequencies up to original_context and
            another beyond it. The other kinds don't depend on it.

    Returns:
        float64 [rotary_dim / 2].
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = rope.theta**-exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "longrope":
        factors = rope.long_factor if context > rope.original_context else rope.short_factor
        return plain / np.asarray(factors, dtype=np.float64)
    return plain


def tables(rope: RopeSpec, context: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines for positions 0 .. context - 1, `attention_factor` included.

    Args:
        rope: The model's rotary embedding.
        context: Context in use, in tokens (see `frequencies`).

    Returns:
        (cos, sin), each float32 [context, rotary_dim / 2].
    """
    angles = np.outer(np.arange(context, dtype=np.float64), frequencies(rope, context))
    cos, sin = np.cos(angles) * rope.attention_factor, np.sin(angles) * rope.attention_factor
    return cos.astype(np.float32), sin.astype(np.float32)


def _llama3(rope: RopeSpec, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Llama 3.1's rescaling: short wavelengths stay, long ones stretch by `factor`, a linear blend in between."""
    turns = rope.original_context * plain / (2 * np.pi)  # full turns within the original context
    blend = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    rescaled: npt.NDArray[np.float64] = plain * (blend + (1.0 - blend) / rope.factor)
    return rescaled


def table_bytes(spec: ModelSpec, context: int) -> int:
    """Bytes of the rotary tables of so many positions, fp32; a GPU has more for blocks that don't rotate."""
    return 4 * context * spec.rope.rotary_dim * (2 if spec.unrotated else 1)
