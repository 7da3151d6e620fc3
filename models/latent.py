"""Multi-head latent attention, from the tensors of a checkpoint to heads that share one key and one value.

A head's keys and values are linear in a token's latent c, so its scores are q W_K c = (W_K^T q) c, and what it gives is
W_V times the mean of c. Both matrices, and the weights of the latent's norm, are multiplied into those of queries and
of `o`: attention is then that of one key-value head, which is the rotated channels and c. Heads keep their order;
channels that rotate come first in a head, and neighbours that rotate together become halves.

Source: DeepSeek-V2 (2024), §2.1.2 and 2.1.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from models.spec import LatentSpec, ModelSpec

_MODULES = {"keys": "kv_a_proj_with_mqa", "gain": "kv_a_layernorm", "each": "kv_b_proj", "o": "o_proj"}


def tensors(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a block's tensors that make up `qkv`, `queries.qkv` and `o`, by their names in a checkpoint."""
    latent, r, H, C = _latent(spec), spec.rope.rotary_dim, spec.num_heads, spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        _MODULES["keys"]: (latent.rank + r, C),
        _MODULES["gain"]: (latent.rank,),
        _MODULES["each"]: (H * (latent.key_dim + latent.value_dim), latent.rank),
        _MODULES["o"]: (C, H * latent.value_dim),
    }
    queries = H * (latent.key_dim + r)
    if latent.query_rank:
        shapes |= {"q_a_proj": (latent.query_rank, C), "q_b_proj": (queries, latent.query_rank)}
    else:
        shapes["q_proj"] = (queries, C)
    return {_name(layer, module): shape for module, shape in shapes.items()}


def linear(spec: ModelSpec, name: str, scale: float, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The weight float32 [N, K] of `layers.3.qkv`, `.queries.qkv` or `.o`.

    Args:
        spec: The model.
        name: The layer.
        scale: Factor of the scores of the checkpoint's heads; what attention divides by is the root of D.
        read: Reads a tensor of the checkpoint.
    """
    _, number, *parts = name.split(".")
    latent, R = _latent(spec), _latent(spec).rank

    def of(module: str) -> torch.Tensor:
        return read(_name(int(number), module)).to(torch.float32)

    if parts == ["qkv"]:
        compressed, turning = of(_MODULES["keys"]).split((R, spec.rope.rotary_dim))
        rotating = _halves(turning)
        made = (rotating, compressed, compressed, torch.zeros_like(rotating))
        return torch.cat((of("q_a_proj") if latent.query_rank else _queries(spec, of, "q_proj", scale), *made))
    if parts != ["o"]:
        return _queries(spec, of, "q_b_proj", scale)
    o = of(_MODULES["o"]).unflatten(1, (spec.num_heads, -1))
    return torch.einsum("chv,hvr->chr", o, _of_heads(spec, of)[:, latent.key_dim :]).flatten(1)


def _queries(spec: ModelSpec, of: Callable[[str], torch.Tensor], module: str, scale: float) -> torch.Tensor:
    """Rows of all heads' queries, [H * D, K]."""
    key_dim = _latent(spec).key_dim
    still, turning = of(module).unflatten(0, (spec.num_heads, -1)).split((key_dim, spec.rope.rotary_dim), dim=1)
    absorbed = torch.einsum("hnr,hnk->hrk", _of_heads(spec, of)[:, :key_dim], still)
    rows = torch.cat((_halves(turning.transpose(0, 1)).transpose(0, 1), absorbed), dim=1)
    return rows.flatten(0, 1) * (scale * math.sqrt(spec.head_dim))


def _of_heads(spec: ModelSpec, of: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """What makes each head's keys, then its values of a latent, whose norm is part of it: [H, key_dim + value_dim, R].

    """
    return (of(_MODULES["each"]) * of(_MODULES["gain"])).unflatten(0, (spec.num_heads, -1))


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Rows of channels that rotate, those of even numbers first."""
    return torch.cat((rows[::2], rows[1::2]))


def _latent(spec: ModelSpec) -> LatentSpec:
    assert spec.latent is not None
    return spec.latent


def _name(layer: int, module: str) -> str:
    return f"model.layers.{layer}.self_attn.{module}.weight"
