"""The operations of a block other than products, in plain torch: norms, rotation, gates, caps, attention."""

from __future__ import annotations

import torch

from models.spec import CLAMPED_GAIN
from runtime.kv.basis import hadamard_block


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The normalized x / sqrt(mean(x²) + eps) * weight, over the last axis.

    Args:
        x: float32 [..., C].
        weight: float32 [C].
        eps: `ModelSpec.norm_eps`.

    Returns:
        float32 [..., C].
    """
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate dimension i with dimension i + r / 2 of every head, i < r / 2; dimensions from r on pass through.

    Args:
        x: float32 [M, heads, D].
        cos: float32 [M, r / 2], of each row's position.
        sin: float32 [M, r / 2].

    Returns:
        float32 [M, heads, D].
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def to_basis(x: torch.Tensor, reflection: torch.Tensor) -> torch.Tensor:
    """Multiply every head by the Hadamard matrix, then reflect it: x -> H x -> H x - u (u . H x).

    Args:
        x: float32 [M, heads, D], rotated queries or keys.
        reflection: float32 [heads, D] or broadcastable, u.

    Returns:
        float32 [M, heads, D].
    """
    M, heads, D = x.shape
    block, width = hadamard_block(D), 1
    while width < block:
        first, second = x.reshape(M, heads, D // (2 * width), 2, width).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).reshape(M, heads, D)
        width *= 2
    x = x * block**-0.5
    return x - reflection * (reflection * x).sum(-1, keepdim=True)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up = gate / (1 + exp(-gate)) * up. Both float32 [M, width], and so is the result."""
    return torch.nn.functional.silu(gate) * up


def gelu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, where gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³))); shapes as above.

    Source: Hendrycks and Gimpel 2016 (GELU), §2.
    """
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def clamped_gate(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """(u + 1) * g * sigmoid(1.702 g), where g = min(gate, limit), and u is up within -limit and limit; shapes as above.

    Source: gpt-oss's model card (OpenAI 2025), §2.2.
    """
    gate = gate.clamp(max=limit)
    return gate * (CLAMPED_GAIN * gate).sigmoid() * (up.clamp(-limit, limit) + 1)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Soft cap c * tanh(x / c), float32 of any shape: nearly x where that is small, and never beyond c.

    Source: Gemma 2's report (2024), §2.
    """
    return cap * torch.tanh(x / cap)


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
