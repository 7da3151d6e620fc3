"""The working weights of a block: float32, and open to changes that leave what the full-precision model computes.

Such changes prepare a block for its quantization: what they move between a layer and the one before it costs nothing
when the model runs, since it is stored with the weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from models.checkpoint import Checkpoint
from models.quantizers.groups import FloatArray
from models.spec import ModelSpec, expert_of

NORM_BEFORE = {"qkv": "input_norm", "gate_up": "post_norm"}
"""The norm that a linear layer reads, where it reads one."""


class WorkingBlock:
    """Weights for the oracle: one block of a checkpoint.

    Args:
        checkpoint: Has the weights.
        layer: Which block. Its linear layers are held in float32, 4 bytes a weight; those of experts are read from the
            checkpoint when they are asked for.
    """

    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        self.layer = layer
        self._checkpoint = checkpoint
        spec = checkpoint.spec
        self._vectors = {name: checkpoint.vector(name) for name in (*spec.block_vectors(layer), *spec.routers(layer))}
        self._linears: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for name in spec.block_linears(layer):
            if expert_of(name) is None:
                weight, bias = checkpoint.linear(name)
                self._linears[name] = (weight.to(torch.float32, copy=True), bias)

    @property
    def spec(self) -> ModelSpec:
        return self._checkpoint.spec

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, float32 [width], or a router's, float32 [E, C]."""
        return self._vectors[name]

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer's weight float32 [N, K] and bias float32 [N] or None."""
        if expert_of(name) is None:
            return self._linears[name]
        weight, bias = self._checkpoint.linear(name)
        return weight.to(torch.float32), bias

    def scale_keys(self, scales: FloatArray) -> None:
        """Divide the channels of the keys, and multiply those of the queries that meet them by the same.

        What scales them is the rows of q and k with their biases; where norms follow these (and would undo it), the
        norms.

        Args:
            scales: float32 [H_kv, D], positive. Channels i and i + rotary_dim / 2 of a head, which rotate together, are
                equal; so are all heads that share the weights of their norm.
        """
        prefix, spec = f"layers.{self.layer}", self.spec
        keys = torch.from_numpy(scales)
        heads = spec.heads_of(self.layer)
        queries = keys.repeat_interleave(heads.heads // heads.kv_heads, dim=0)
        if spec.qk_norm:
            alone = spec.qk_norm_form == "all"
            own = (queries.flatten(), keys.flatten()) if alone else (keys[0], keys[0])
            self._vectors[f"{prefix}.q_norm"] = self._vectors[f"{prefix}.q_norm"] * own[0]
            self._vectors[f"{prefix}.k_norm"] = self._vectors[f"{prefix}.k_norm"] / own[1]
            return
        factors = torch.cat((queries.flatten(), 1 / keys.flatten()))
        weight, bias = self._linears[f"{prefix}.qkv"]
        weight[: len(factors)] *= factors[:, None]
        if bias is not None:
            bias[: len(factors)] *= factors

    def reorder(self, order: npt.NDArray[np.intp]) -> None:
        """Sort the channels of the MLP: the rows of gate and of up with their biases, and the inputs of `down`.

        Args:
            order: [intermediate_size], the present number of the channel that is to stand at each place.
        """
        prefix, channels = f"layers.{self.layer}", torch.from_numpy(order)
        rows = torch.cat([channels + part * len(channels) for part in range(self.spec.mlp_parts)])
        weight, bias = self._linears[f"{prefix}.gate_up"]
        self._linears[f"{prefix}.gate_up"] = (weight[rows], None if bias is None else bias[rows])
        weight, bias = self._linears[f"{prefix}.down"]
        self._linears[f"{prefix}.down"] = (weight[:, channels].contiguous(), bias)

    def release(self) -> None:
        self._linears.clear()

    def embedding(self) -> torch.Tensor:
        """The embedding table [V, C]."""
        return self._checkpoint.embedding()

    def token_rows(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """Rows of the block's own embedding table. int64 [B, S] -> [B, S, P]."""
        return self._checkpoint.token_rows(tokens, layer)

    def scale_inputs(self, kind: str, scales: FloatArray) -> None:
        """Multiply the input channels of a linear layer, and have what feeds them divide by the same.

        Inputs of `qkv` and `gate_up` come from a norm (or cannot be scaled, see `scalable`), those of `o` from the rows
        of v (attention mixes tokens, not channels), of a convolution's last gate or of the norm of a delta rule's
        heads, those of `down` from the rows of up.

        Args:
            kind: `qkv`, `o`, `gate_up` or `down`.
            scales: float32 [K], positive; equal where `sources` is.
        """
        prefix, spec = f"layers.{self.layer}", self.spec
        factors = torch.from_numpy(scales)
        self._linears[f"{prefix}.{kind}"][0].mul_(factors)
        if kind in NORM_BEFORE:
            name = f"{prefix}.{NORM_BEFORE[kind]}"
            self._vectors[name] = self._vectors[name] / factors
            return
        if kind == "o" and spec.mixer(self.layer) == "delta" and (delta := spec.delta) is not None:
            self._vectors[f"{prefix}.gain"] = self._vectors[f"{prefix}.gain"] / factors[: delta.gain_width]
            return
        if kind == "o" and spec.mixer(self.layer) == "convolution":
            divisors, rows = factors, slice(spec.hidden_size, 2 * spec.hidden_size)
            weight, bias = self._linears[f"{prefix}.qkv"]
        elif kind == "o":
            divisors = torch.empty(spec.kv_width)
            divisors[torch.from_numpy(sources(spec, f"{prefix}.o"))] = factors
            first, (weight, bias) = spec.q_width + spec.kv_width, self._linears[f"{prefix}.qkv"]
            rows = slice(first, first + spec.kv_width)
        else:
            divisors = factors
            rows, (weight, bias) = slice(spec.intermediate_size, None), self._linears[f"{prefix}.gate_up"]
        weight[rows] /= divisors[:, None]
        if bias is not None:
            bias[rows] /= divisors


def scalable(spec: ModelSpec, kind: str) -> bool:
    """Whether something in front of a linear layer can divide what its weights are multiplied by."""
    if kind == "down" and spec.mlp_parts == 1:
        return False
    return kind not in NORM_BEFORE or spec.norm_before


def sources(spec: ModelSpec, name: str) -> npt.NDArray[np.intp]:
    """What feeds each input channel of a linear layer: a channel of the norm, of up, of v, or of a gate.

    Query heads that share a key-value head read the same channels of v, and the heads of a delta rule share a norm, so
    these have to be scaled alike.

    Returns:
        [K]: the number of the source.
    """
    _, layer, kind = name.split(".")
    channels = np.arange(spec.linear_shape(name)[1])
    if kind == "o" and spec.mixer(int(layer)) == "delta" and spec.delta is not None:
        return channels % spec.delta.gain_width
    if kind != "o" or spec.mixer(int(layer)) != "attention":
        return channels
    head, channel = np.divmod(channels, spec.head_dim)
    return head // (spec.num_heads // spec.num_kv_heads) * spec.head_dim + channel
