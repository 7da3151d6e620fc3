"""Operands of the contract: activations, and matrices in whole numbers."""

from __future__ import annotations

import numpy as np
import torch

from models.packed import PackedLinear
from models.packing import pack
from models.quantizers.progressive import LARGEST_GROUP_SCALE
from models.recipe import FLOATS, FLOATS_8, KEPT_BITS, MINIMUMS, OWN_GROUPS, SUPER_GROUP, TWO_LEVELS, ZERO_POINTS


def activations(rows: int, K: int, seed: int = 0) -> torch.Tensor:
    """Normal activations with a few large ones among them, halves as float32 [rows, K]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=generator)
    x[:, torch.randperm(K, generator=generator)[: max(1, K // 50)]] *= 20
    return x.half().float()


def exact_activations(rows: int, K: int, group: int) -> torch.Tensor:
    """Activations with a mean, the same numbers as halves and in INT8: each group's scale is a power of two."""
    generator = torch.Generator().manual_seed(rows + K)
    codes = torch.randint(-100, 128, (rows, K), generator=generator)
    codes[:, ::group] = 127
    scales = 2.0 ** -torch.randint(3, 6, (rows, -(-K // group)), generator=generator)
    return codes * scales.repeat_interleave(group, dim=1)[:, :K]


def uneven_activations(M: int, K: int) -> torch.Tensor:
    """float32 [M, K] with a mean, outliers, and, of more than two rows, one of zeros."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M + K)) + 0.25
    x[:, :: max(1, K // 3)] *= 30
    x[M // 2] = 0 if M > 2 else x[M // 2]
    return x


def whole_matrix(N: int, K: int, group: int, *, largest: bool = False) -> PackedLinear:
    """A W4A8 matrix; codes, zeros and group scales take all values that they can, or those with the largest sums.

    Args:
        N: Output channels.
        K: Input channels.
        group: Channels that share a group scale; 0: there are none.
        largest: Which.
    """
    rng = np.random.default_rng([N, K, group])
    G = -(-K // group) if group else 1
    codes, zeros = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((N, K), (N, G)))
    scales = rng.integers(1, LARGEST_GROUP_SCALE + 1, (N, G)).astype(np.uint8)
    if largest:
        codes[:], zeros[:], scales[:] = 15, 8, LARGEST_GROUP_SCALE
        codes[::2], zeros[::2] = 0, 7
    scales = np.minimum(scales, 127 // np.maximum(zeros, 15 - zeros)).astype(np.uint8)  # as quantizers leave them
    return PackedLinear(
        name="layers.0.o",
        shape=(N, K),
        bits=4,
        group_size=group or -(-K // 32) * 32,
        codes=pack(codes, 4),
        scales=rng.uniform(1e-3, 1e-2, (N, 1)).astype(np.float16),
        zeros=zeros,
        bias=rng.standard_normal(N).astype(np.float32),
        residual=None,
        rank_maximum=None,
        mean_square=None,
        group_scales=scales if group else None,
        per_token=True,
    )


def kept_matrix(kind: str, N: int, K: int) -> PackedLinear:
    """A matrix of weights that are kept as a source has them: all codes, scales of both signs, far minimums."""
    rng = np.random.default_rng([N, K])
    bits, group_size, two_levels = KEPT_BITS[kind], OWN_GROUPS[kind], kind in TWO_LEVELS
    G, shape = K // group_size, (N, K // (SUPER_GROUP if two_levels else group_size))
    codes = rng.integers(0, 1 << bits, (N, K), dtype=np.uint8)
    scales, minimums = rng.standard_normal(shape).astype(np.float16), rng.standard_normal(shape).astype(np.float16)
    scales[:: N // 2, 0] = 0
    if kind == FLOATS:
        scales = rng.integers(110, 130, shape, dtype=np.uint8)
    if kind == FLOATS_8:
        scales, codes = scales.astype(np.float32) / 64, codes - np.uint8(codes % 128 == 127)  # else no number
    levels = rng.integers(-128, 128, (2, N, G), dtype=np.int8)
    return PackedLinear(
        name="layers.0.o",
        shape=(N, K),
        bits=bits,
        group_size=group_size,
        codes=pack(codes, bits),
        scales=scales,
        zeros=np.full((N, G), ZERO_POINTS[kind], np.uint8) if kind in ZERO_POINTS else None,
        minimums=minimums * np.float16(8) if kind in MINIMUMS or two_levels else None,
        group_scales=levels[0] if two_levels else None,
        group_minimums=levels[1] if two_levels else None,
        bias=rng.standard_normal(N).astype(np.float32),
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )
