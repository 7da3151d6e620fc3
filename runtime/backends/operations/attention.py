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
    sinks: torch.Tensor | None = None,
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
        sinks: float32 [H], a score of each query head that takes a share of the softmax and adds nothing; None = none.

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
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(H_kv, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :T]
    return torch.einsum("hgmt,thd->mhgd", weights, v).reshape(M, H, D)
