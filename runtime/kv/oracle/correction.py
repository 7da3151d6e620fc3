"""GEAR's two corrections of quantization errors: a low-rank matrix and single outliers."""

from __future__ import annotations

import torch

from runtime.kv.low_rank import ITERATIONS, start


def low_rank(
    residual: torch.Tensor, rank: int, iterations: int = ITERATIONS, *, alike: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the nearest low-rank matrix, approximately: residual ~ a b^T.

    Subspace iteration from a fixed start, so that equal pages have equal factors.

    The distance may use a weighted metric: with R the residual, the columns of a are the first left singular vectors of
    R (I + alike 1 1^T / D)^(1/2), and b is R^T a.

    Args:
        residual: float32 [..., T, D].
        rank: r, at most D.
        iterations: Rounds.
        alike: Extra weight of an error that all channels share.

    Returns:
        a float16 [..., T, r] and b float16 [..., D, r]. The columns of a are orthonormal.

    Source: GEAR Algorithm 2.
    """
    T, D = residual.shape[-2:]
    b = torch.from_numpy(start(D, rank)).to(residual.device).expand(*residual.shape[:-2], D, rank)
    a = residual.new_zeros(*residual.shape[:-2], T, rank)
    for _ in range(iterations):
        a = torch.linalg.qr(residual @ (b + alike * b.mean(-2, keepdim=True)))[0]
        b = residual.mT @ a
    return a.to(torch.float16).contiguous(), b.to(torch.float16)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply the factors: a b^T. Returns float32 [..., T, D]."""
    return a.float() @ b.float().mT


def outliers(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` smallest and the `count` largest numbers of every vector.

    Among equal numbers, the first count as smallest and the last as largest, so that no number counts twice.

    Args:
        vectors: float32 [..., n], n >= 2 * count.
        count: Outliers at each end.

    Returns:
        int64 [..., 2 * count], smallest first.

    Source: GEAR §3, the filter.
    """
    order = torch.sort(vectors, dim=-1, stable=True).indices
    return torch.cat([order[..., :count], order[..., vectors.shape[-1] - count :]], dim=-1)
