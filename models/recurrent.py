"""Layers with a state in plain torch: short convolutions, the gated delta rule and Mamba-2, oracles of all backends.

A layer with a state reads a sequence from left to right and keeps a fixed number of numbers of it, however long it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.spec import DeltaSpec

CHUNK = 64
"""Tokens that the chunked delta rule handles at a time."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal convolution of each channel: y[t] = bias + Σ_j weight[j] x[t + j].

    Elementwise, so that a token's result has the same bits alone and among others.

    Args:
        x: [..., taps - 1 + S, C]: the tokens before the first (zeros before a sequence), then S tokens.
        weight: [taps, C].
        bias: [C] or None.

    Returns:
        [..., S, C].
    """
    S = x.shape[-2] - len(weight) + 1
    y = x[..., :S, :] * weight[0]
    for j in range(1, len(weight)):
        y = y + x[..., j : j + S, :] * weight[j]
    return y if bias is None else y + bias


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What the delta rule reads of S tokens; H value heads, of which several share a query and a key.

    Mamba-2's C, B and x have the places of q, k and v, at any length, and its steps that of beta.
    """

    q: Tensor
    """[..., S, H, Dk], of length Dk^-0.5."""
    k: Tensor
    """[..., S, H, Dk], of length 1."""
    v: Tensor
    """[..., S, H, Dv]."""
    log_decay: Tensor
    """[..., S, H], at most 0: logarithm of what is left of the state."""
    beta: Tensor
    """[..., S, H], 0 to `DeltaSpec.most`: how much of the old value of a key a new one replaces."""
    skip: Tensor | None = None
    """Mamba-2's D [H], how much of v an output has; None: it is a delta rule."""

    def part(self, tokens: slice) -> DeltaInputs:
        q, k, v = (x[..., tokens, :, :] for x in (self.q, self.k, self.v))
        return DeltaInputs(q, k, v, self.log_decay[..., tokens, :], self.beta[..., tokens, :], self.skip)

    def skipped(self, y: Tensor, v: Tensor) -> Tensor:
        """Outputs of some tokens [..., H, Dv] with what values add to them."""
        return y if self.skip is None else y + self.skip[:, None] * v


def normalized(x: Tensor) -> Tensor:
    """Vectors [..., D] at length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(x: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule, token by token.

    A token's state S is decay S + k ⊗ beta (v - decay Sᵀk), and its output Sᵀq. Mamba-2's state is decay S + k ⊗ beta v
    and its output Sᵀq + D v.

    Args:
        x: The tokens.
        state: [..., H, Dk, Dv], that of the tokens before.

    Returns:
        Outputs [..., S, H, Dv], and the state after the last token.

    Source: Yang et al. 2024 (Gated Delta Networks), equation 10; Dao and Gu 2024 (Mamba-2), §5.
    """
    outputs = []
    for t in range(x.q.shape[-3]):
        q, k, v = (each[..., t, :, :] for each in (x.q, x.k, x.v))
        state = state * x.log_decay[..., t, :].exp()[..., None, None]
        new = v if x.skip is not None else v - (state * k[..., None]).sum(-2)
        state = state + k[..., None] * (new * x.beta[..., t, :, None])[..., None, :]
        outputs.append(x.skipped((state * q[..., None]).sum(-2), v))
    return torch.stack(outputs, -3) if outputs else torch.zeros_like(x.v), state


def delta_rule_chunked(x: DeltaInputs, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The same, a chunk of tokens at a time as matrix products; see `delta_rule`.

    Within a chunk the replaced values u solve a triangular system: u_t = beta_t (v_t - what the old state and the
    chunk's earlier tokens hold for k_t).

    Source: Yang et al. 2024, §3.3 (the WY representation).
    """
    outputs = []
    for start in range(0, x.q.shape[-3], chunk):
        part = x.part(slice(start, start + chunk))
        q, k, v = (each.transpose(-3, -2) for each in (part.q, part.k, part.v))  # [..., H, T, D]
        beta, total = part.beta.transpose(-2, -1), part.log_decay.transpose(-2, -1).cumsum(-1)  # [..., H, T]
        between = (total[..., :, None] - total[..., None, :]).tril()  # from token j to token i
        decay = between.exp().tril()
        u = v * beta[..., None]
        if x.skip is None:
            system = (k @ k.transpose(-1, -2)) * decay * beta[..., None]
            u = u - (k @ state) * (total.exp() * beta)[..., None]
            u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
        inside = (q @ k.transpose(-1, -2)) * decay
        y = (q @ state) * total.exp()[..., None] + inside @ u
        outputs.append(part.skipped(y.transpose(-3, -2), part.v))
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1].exp()[..., None, None] + (k * left).transpose(-1, -2) @ u
    return torch.cat(outputs, -3) if outputs else torch.zeros_like(x.v), state


def delta_inputs(spec: DeltaSpec, x: Tensor, taps: int, vectors: Mapping[str, Tensor]) -> DeltaInputs:
    """What the delta rule reads, from what enters the state.

    Args:
        spec: The heads.
        x: [..., taps - 1 + S, inputs]: of the tokens before the first (zeros before a sequence), then of S tokens.
        taps: Tokens that the convolution sees.
        vectors: The layer's `conv`, `decay` and so on (`ModelSpec.block_vectors`).
    """
    conv, dt = vectors["conv"].view(taps, -1), vectors["dt"]
    mixed = functional.silu(convolve(x[..., : spec.channels], conv, vectors.get("conv_bias")))
    q, k, v = torch.split(mixed, [spec.key_width, spec.key_width, spec.value_width], dim=-1)
    shared = spec.value_heads // spec.key_heads
    q, k = (_heads(each, spec.key_dim) for each in (q, k))
    if not spec.mamba:
        q, k = normalized(q) * spec.key_dim**-0.5, normalized(k)
    q, k = (each.repeat_interleave(shared, -2) for each in (q, k))
    b, a = x[..., taps - 1 :, spec.channels :].chunk(2, dim=-1)
    step = functional.softplus(a + dt)
    beta = step if spec.mamba else spec.most * b.sigmoid()
    return DeltaInputs(q, k, _heads(v, spec.value_dim), vectors["decay"] * step, beta, vectors.get("skip"))


def _heads(x: Tensor, dim: int) -> Tensor:
    """[..., H * dim] -> [..., H, dim]."""
    return x.reshape(*x.shape[:-1], -1, dim)


def finish(spec: DeltaSpec, y: Tensor, gate: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of each head's outputs y [..., H, Dv] with the weight `gain` [Dv], times silu(gate) [..., H * Dv].

    In Mamba-2 the gate comes first, and heads that share a key have one norm, with weights [H * Dv]; without weights
    there is none.

    Returns:
        [..., H * Dv].
    """
    gate = functional.silu(gate)
    if gain is None:
        return y.flatten(-2) * gate
    if spec.mamba:
        y = _heads(y.flatten(-2) * gate, spec.value_width // spec.key_heads)
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * gain if spec.mamba else (normed * gain).flatten(-2) * gate
