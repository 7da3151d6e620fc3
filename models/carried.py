"""What passes from block to block beside the residual stream, where blocks run one by one.

A block that shares an earlier one's cache needs its keys and values, and one with embeddings of its own needs to know
the tokens. Both stand behind the channels of the stream: [B, S, C] becomes [B, S, C + 1 + ...], with a token's number,
then the keys and values of each block whose cache others read. Most models need neither, and their stream is all there
is. One that is several is C channels in front of the first block and behind the last, then zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Carried:
    """The parts of a block's input."""

    stream: Tensor
    """[B, S, C]."""
    tokens: Tensor | None
    """int64 [B, S]; None where no block asks for them."""
    lent: Mapping[int, tuple[Tensor, Tensor]]
    """Keys and values [B, H_kv, S, D] by the block they belong to; zeros before it has run."""

    @classmethod
    def of(cls, spec: ModelSpec, x: Tensor) -> Self:
        """Take a block's input [B, S, `carried_width`] apart."""
        at = spec.stream_width
        stream, tokens, lent = x[..., :at], None, {}
        if spec.token_width:
            tokens, at = x[..., at].to(torch.int64), at + 1
        for layer in spec.lent_layers:
            heads, both = spec.heads_of(layer), []
            for _ in range(2):
                part, at = x[..., at : at + heads.kv_width], at + heads.kv_width
                both.append(part.reshape(*part.shape[:-1], heads.kv_heads, heads.dim).transpose(1, 2))
            lent[layer] = (both[0], both[1])
        return cls(stream, tokens, lent)


def carried_width(spec: ModelSpec) -> int:
    """Channels of a block's input, C of which are the residual stream."""
    lent = sum(2 * spec.heads_of(layer).kv_width for layer in spec.lent_layers)
    return spec.stream_width + (spec.token_width > 0) + lent


def begin(spec: ModelSpec, tokens: Tensor, stream: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The input of the first block.

    Args:
        spec: The architecture.
        tokens: int64 [..., S].
        stream: Their rows of the embedding table, [..., S, C].
        dtype: Of the stream.

    Returns:
        [..., S, `carried_width`]; float32 where that is more than C.
    """
    width = carried_width(spec)
    if width == spec.hidden_size:
        return stream.to(dtype)
    x = torch.zeros(*tokens.shape, width)
    x[..., : spec.hidden_size] = stream
    if spec.token_width:
        x[..., spec.stream_width] = tokens
    return x


def carry(spec: ModelSpec, y: Tensor, x: Tensor, lent: Mapping[int, tuple[Tensor, Tensor]]) -> Tensor:
    """The next block's input.

    Args:
        spec: The architecture.
        y: [B, S, C], a block's output; of several streams all, or what they became.
        x: Its input.
        lent: As in `Carried`.
    """
    if x.shape[-1] == spec.hidden_size:
        return y
    at = spec.stream_width
    y = functional.pad(y, (0, at - y.shape[-1]))
    tokens = x[..., at : at + (spec.token_width > 0)]
    parts = (part.transpose(1, 2).flatten(-2) for layer in spec.lent_layers for part in lent[layer])
    return torch.cat((y, tokens, *parts), dim=-1)
