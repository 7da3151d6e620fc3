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
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        factors = rope.long_factor if context > rope.original_context else rope.short_factor
        return plain / np.asarray(factors, dtype=np.float64)
    return plain


def tables(rope: RopeSpec, context: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines for positions 0 .. context - 1, `attention_factor` included.

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


def _yarn(rope: RopeSpec, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """YaRN's blend, by the pair's number: short wavelengths stay, long ones stretch by `factor`.

    Source: Peng et al. 2023 (YaRN), §3.2.
    """
    last = rope.rotary_dim - 1

    def pair(turns: float) -> float:
        """Where a pair that turns so often within the original context would be."""
        wavelength = rope.original_context / turns / (2 * np.pi)
        return float(rope.rotary_dim * np.log(wavelength) / (2 * np.log(rope.theta)))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, float(last))
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low if high != low else 1e-3), 0.0, 1.0)
    rescaled: npt.NDArray[np.float64] = plain * (1.0 - ramp) + plain / rope.factor * ramp
    return rescaled


def query_growth(spec: ModelSpec, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32] | None:
    """Factors of the queries at some positions, float32 like these; None where queries do not grow.

    Source: the scaling of Llama 4, by which attention stays sharp in long contexts.
    """
    if not spec.query_growth:
        return None
    growth = 1 + spec.query_growth * np.log1p(positions // spec.query_growth_context)
    return growth.astype(np.float32)


def table_bytes(spec: ModelSpec, context: int) -> int:
    """Bytes of the rotary tables of so many positions, fp32; a GPU has more for blocks that don't rotate."""
    still = max((rope.rotary_dim for rope in spec.ropes), default=0) if spec.nope_layers else 0
    return 4 * context * (sum(rope.rotary_dim for rope in spec.ropes) + still + bool(spec.query_growth))
