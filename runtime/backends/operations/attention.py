"""Causal grouped-query attention with a sliding window, in plain torch."""

from __future__ import annotations

import torch

from runtime.backends.operations.cap import soft_cap


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    cap: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v over the keys at positions p - window < t <= p of every query at position p.

    Query head h reads key-value head h // (H / H_kv).

    Args:
        q: float32 [M, H, D], rotated.
        k: float32 [T, H_kv, D]; row t is the key at position t, rotated.
        v: float32 [T, H_kv, D].
        positions: int64 [M], each < T.
        window: Visible tokens, including the query's own; None = all before it.
        cap: Soft cap of q k^T / sqrt(D); None = none.

    Returns:
        float32 [M, H, D].
    """
    M, H, D = q.shape
    T, H_kv, _ = k.shape
    grouped = q.view(M, H_kv, H // H_kv, D)
    scores = torch.einsum("mhgd,thd->hgmt", grouped, k) * D**-0.5  # [H_kv, H / H_kv, M, T]
    if cap is not None:
        scores = soft_cap(scores, cap)
    keys = torch.arange(T)
    visible = keys <= positions[:, None]  # [M, T]
    if window is not None:
        visible &= keys > positions[:, None] - window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hgmt,thd->mhgd", weights, v).reshape(M, H, D)
