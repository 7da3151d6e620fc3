"""Multi-head latent attention, from the tensors of a checkpoint to heads that share one key and one value.

A head's keys and values are linear in a token's latent c, so its scores are q W_K c = (W_K^T q) c, and what it gives is
W_V times the mean of c. Both matrices, and the weights of the latent's norm, are multiplied into those of queries and
of `o`: attention is then that of one key-value head, which is the rotated channels and c. Heads keep their order;
channels that rotate come first in a head, and neighbours that rotate together become halves.

Source: DeepSeek-V2 (2024), §2.1.2 and 2.1.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container

import torch

from models.spec import LatentSpec, ModelSpec

_MODULES = {"keys": "kv_a_proj_with_mqa", "gain": "kv_a_layernorm", "each": "kv_b_proj", "o": "o_proj"}
_APART = ("k_b_proj", "v_b_proj")
"""What makes keys and what makes values, in GGUF files: [H, R, key_dim], that is turned, and [H, value_dim, R]."""


def is_apart(names: Container[str], layer: int) -> bool:
    """Whether a checkpoint has what makes a block's keys and what makes its values in a tensor each."""
    return _name(layer, _APART[0]) in names


def tensors(spec: ModelSpec, layer: int, *, apart: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a block's tensors that make up `qkv`, `queries.qkv` and `o`, by their names in a checkpoint."""
    latent, r, H, C = _latent(spec), spec.rope.rotary_dim, spec.num_heads, spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        _MODULES["keys"]: (latent.rank + r, C),
        _MODULES["gain"]: (latent.rank,),
        _MODULES["o"]: (C, H * latent.value_dim),
    }
    if apart:
        shapes |= {_APART[0]: (H, latent.rank, latent.key_dim), _APART[1]: (H, latent.value_dim, latent.rank)}
    else:
        shapes[_MODULES["each"]] = (H * (latent.key_dim + latent.value_dim), latent.rank)
    queries = H * (latent.key_dim + r)
    if latent.query_rank:
        shapes |= {"q_a_proj": (latent.query_rank, C), "q_b_proj": (queries, latent.query_rank)}
    else:
        shapes["q_proj"] = (queries, C)
    return {_name(layer, module): shape for module, shape in shapes.items()}


def linear(
    spec: ModelSpec, name: str, scale: float, read: Callable[[str], torch.Tensor], *, apart: bool
) -> torch.Tensor:
    """The weight float32 [N, K] of `layers.3.qkv`, `.queries.qkv` or `.o`.

    Args:
        spec: The model.
        name: The layer.
        scale: Factor of the scores of the checkpoint's heads; what attention divides by is the root of D.
        read: Reads a tensor of the checkpoint.
        apart: See `is_apart`.
    """
    _, number, *parts = name.split(".")
    latent, r, H = _latent(spec), spec.rope.rotary_dim, spec.num_heads

    def of(module: str) -> torch.Tensor:
        return read(_name(int(number), module)).to(torch.float32)

    def of_heads(first: int, last: int | None) -> torch.Tensor:
        """What makes some of each head's keys, then values, of a latent, its norm's weights included: [H, rows, R]."""
        if apart:
            rows = torch.cat((of(_APART[0]).transpose(1, 2), of(_APART[1])), dim=1)
        else:
            rows = of(_MODULES["each"]).view(H, -1, latent.rank)
        return rows[:, first:last] * of(_MODULES["gain"])

    def queries(module: str) -> torch.Tensor:
        """All heads' queries, [H * D, K]."""
        weight = of(module)
        still, turning = torch.split(weight.view(H, -1, weight.shape[1]), [latent.key_dim, r], dim=1)
        absorbed = torch.einsum("hnr,hnk->hrk", of_heads(0, latent.key_dim), still)
        rows = torch.cat((_halves(turning), absorbed), dim=1)
        return rows.flatten(0, 1) * (scale * math.sqrt(spec.head_dim))

    if parts == ["qkv"]:
        compressed, turning = torch.split(of(_MODULES["keys"]), [latent.rank, r])
        rotating = _halves(turning)
        made = (rotating, compressed, compressed, torch.zeros_like(rotating))
        return torch.cat((of("q_a_proj") if latent.query_rank else queries("q_proj"), *made))
    if parts != ["o"]:
        return queries("q_b_proj")
    o, values = of(_MODULES["o"]).view(spec.hidden_size, H, -1), of_heads(latent.key_dim, None)
    return torch.einsum("chv,hvr->chr", o, values).flatten(1)


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., r, K] of channels that rotate, those of even numbers first."""
    return torch.cat((rows[..., ::2, :], rows[..., 1::2, :]), dim=-2)


def _latent(spec: ModelSpec) -> LatentSpec:
    assert spec.latent is not None
    return spec.latent


def _name(layer: int, module: str) -> str:
    return f"model.layers.{layer}.self_attn.{module}.weight"
