"""The bundled model while it is trained: a Llama whose matrices of one input are fused, and its checkpoint's names."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-5
ROTARY_BASE = 10000.0
LONGEST_PLAIN = 384
"""Longest rows in tokens whose attention is computed without a fused kernel."""


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with grouped queries.

    Short rows go through plain batched products: on a processor their backward pass takes a fifth of the fused one's.

    Args:
        q: [B, H, S, 64].
        k: [B, H_kv, S, 64].
        v: [B, H_kv, S, 64].

    Returns:
        [B, H, S, 64].
    """
    batch, heads, length, width = q.shape
    if length > LONGEST_PLAIN:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    groups, each = batch * k.shape[1], heads // k.shape[1]
    hidden_future = torch.full((length, length), -torch.inf, dtype=q.dtype).triu(1)
    queries = (q * width**-0.5).reshape(groups, each * length, width)
    scores = torch.bmm(queries, k.reshape(groups, length, width).transpose(1, 2))
    shares = (scores.view(groups, each, length, length) + hidden_future).softmax(-1)
    return torch.bmm(shares.view(groups, each * length, length), v.reshape(groups, length, width)).view(q.shape)


class Block(nn.Module):
    """Attention with grouped queries, then a gated MLP, each with its norm before it.

    Args:
        hidden: C.
        intermediate: Width of the MLP.
        heads: H query heads of 64 channels.
        kv_heads: H_kv, a divisor of `heads`.
    """

    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * 64, bias=False)
        self.o = nn.Linear(heads * 64, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.norm_attention = nn.Parameter(torch.ones(hidden))
        self.norm_mlp = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One block's output [B, S, C] from its input; `cos` and `sin` are [S, 1, 64]."""
        batch, length, hidden = x.shape
        heads, kv_heads = self.heads, self.kv_heads
        normed = functional.rms_norm(x, (hidden,), self.norm_attention, EPSILON)
        qkv = self.qkv(normed).view(batch, length, heads + 2 * kv_heads, 64)
        qk, v = qkv.split([heads + kv_heads, kv_heads], 2)
        first, second = qk.chunk(2, -1)
        qk = qk * cos + torch.cat([-second, first], -1) * sin
        q, k = qk.split([heads, kv_heads], 2)
        mixed = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, heads * 64))
        gate, up = self.gate_up(functional.rms_norm(x, (hidden,), self.norm_mlp, EPSILON)).chunk(2, -1)
        out: Tensor = x + self.down(functional.silu(gate) * up)
        return out


class Network(nn.Module):
    """Tokens in, losses out; the embedding is also the head.

    Args:
        vocabulary: V.
        hidden: C.
        intermediate: Width of the MLP.
        layers: Number of blocks.
        heads: H query heads of 64 channels.
        kv_heads: H_kv.
    """

    def __init__(
        self, *, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, intermediate, heads, kv_heads) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(hidden))
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            for name, weight in block.named_parameters():
                if weight.dim() == 2:
                    depth = math.sqrt(2 * layers) if name.startswith(("o.", "down.")) else 1.0
                    nn.init.normal_(weight, std=weight.shape[1] ** -0.5 / depth)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Normed states [B, S, C] before the head."""
        length = tokens.shape[1]
        rates = ROTARY_BASE ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), rates)
        angles = torch.cat([angles, angles], -1)[:, None]
        x = self.embedding(tokens)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return functional.rms_norm(x, (x.shape[-1],), self.norm, EPSILON)

    def losses(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Cross entropies in nats, fp32 [n], of predicting the chosen tokens.

        Args:
            tokens: [B, S] ids.
            chosen: [B, S] bool, False in the first column.

        Returns:
            The losses, in the order of the chosen tokens.
        """
        before = torch.roll(chosen, -1, 1)
        states = self.hidden_states(tokens)[before]
        logits = functional.linear(states, self.embedding.weight)
        return functional.cross_entropy(logits.float(), tokens[chosen], reduction="none")

    def matrices(self) -> list[nn.Parameter]:
        """The weights of the blocks' products."""
        return [weight for weight in self.blocks.parameters() if weight.dim() == 2]

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights in bfloat16 under the names of a Hugging Face Llama checkpoint."""
        named = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm}
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            width = [block.heads * 64, block.kv_heads * 64, block.kv_heads * 64]
            q, k, v = torch.split(block.qkv.weight, width)
            gate, up = block.gate_up.weight.chunk(2)
            prefix = f"model.layers.{i}."
            named |= {
                f"{prefix}self_attn.{name}_proj.weight": part
                for name, part in (("q", q), ("k", k), ("v", v), ("o", block.o.weight))
            }
            named |= {
                f"{prefix}mlp.{name}_proj.weight": part
                for name, part in (("gate", gate), ("up", up), ("down", block.down.weight))
            }
            named[f"{prefix}input_layernorm.weight"] = block.norm_attention
            named[f"{prefix}post_attention_layernorm.weight"] = block.norm_mlp
        return {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in named.items()}
