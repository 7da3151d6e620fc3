"""Basis of low-bit keys, which makes rounding hurt less; and the start of GEAR's iteration. Does not import torch.

A key is rounded with one scale for all its channels, or a channel with one for all tokens of a page. The keys of real
models make that hard: they lie far from zero, always on the same side, and a few channels are much larger than the
rest. So keys and queries are *turned* after their rotation, by an orthogonal matrix that preserves their products.
First a Hadamard matrix spreads large channels over all. Then a reflection maps the direction that queries have most in
common onto the one in which all channels are alike, whose error a zero-point removes
(`runtime.kv.kinds.Code.exact_mean`). Finally the mean key is subtracted from every key: that shifts all scores of a
query equally, so their softmax is unchanged.

Source: QServe §4.3.1 and QuaRot for Hadamard's matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.packed import KeyStatistics, Weights
from models.spec import ModelSpec
from runtime.kv.kinds import CacheKind

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class KeyBasis:
    """A layer's basis: queries x -> H x -> x - u (u . x), and keys also x -> x - m."""

    reflection: Float32Array
    """float32 [H_kv, D], u of length sqrt(2); or zeros, which reflect nothing."""
    mean: Float32Array
    """float32 [H_kv, D], m, in the new basis."""


def hadamard_block(head_dim: int) -> int:
    """Channels that the Hadamard matrix mixes: the largest power of two that divides D; H has a block for each."""
    return head_dim & -head_dim


def hadamard(x: Float32Array) -> Float32Array:
    """Multiply by H: float32 [..., D] -> the same, float64 inside. H is its own inverse."""
    D = x.shape[-1]
    block = hadamard_block(D)
    turned = x.astype(np.float64).reshape(*x.shape[:-1], D // block, block)
    width = 1
    while width < block:
        pairs = turned.reshape(*x.shape[:-1], D // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        turned = np.stack([first + second, first - second], axis=-2)
        width *= 2
    whole: Float32Array = (turned.reshape(x.shape) / np.sqrt(block)).astype(np.float32)
    return whole


def key_basis(found: KeyStatistics | None, kv_heads: int, head_dim: int) -> KeyBasis:
    """The basis for a layer's keys.

    Args:
        found: Statistics of the keys; None: H alone.
        kv_heads: H_kv.
        head_dim: D.
    """
    if found is None:
        nothing = np.zeros((kv_heads, head_dim), np.float32)
        return KeyBasis(nothing, nothing)
    alike = np.full(head_dim, head_dim**-0.5)
    axis = hadamard(found.axis).astype(np.float64)
    axis *= np.where(axis @ alike > 0, -1.0, 1.0)[:, None]  # of the two signs, the one further from `alike`
    reflection = axis - alike
    reflection *= np.sqrt(2) / np.linalg.norm(reflection, axis=-1, keepdims=True)
    mean = hadamard(found.mean).astype(np.float64)
    mean -= reflection * (reflection * mean).sum(-1, keepdims=True)
    return KeyBasis(reflection.astype(np.float32), mean.astype(np.float32))


def key_bases(kind: CacheKind, model: Weights) -> tuple[KeyBasis, ...]:
    """The bases of all layers with a cache; none if the kind stores keys unturned."""
    spec: ModelSpec = model.spec
    if not kind.turned:
        return ()
    layers = ((model.key_statistics(layer), spec.heads_of(layer)) for layer in spec.attention_layers)
    return tuple(key_basis(found, heads.kv_heads, heads.dim) for found, heads in layers)


ITERATIONS = 12
"""Rounds of the power iteration. Rounding errors have a flat spectrum: with 64 channels, 4 rounds come within 2 % of
the SVD's error and 8 within 1 %; with 8 channels, within 9 % and 6 %, 4 % and 1 % on average."""


def low_rank_start(head_dim: int, rank: int) -> npt.NDArray[np.float32]:
    """The low_rank_start matrix of the iteration: normally distributed, always the same.

    Args:
        head_dim: D.
        rank: r.

    Returns:
        float32 [D, r].
    """
    return np.random.RandomState(0).standard_normal((head_dim, rank)).astype(np.float32)
