"""Small stored models made of random weights, for tests of backends and of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from models.mtp import mtp_spec
from models.packed import KeyStatistics, PackedLinear, PackedResidual
from models.packing import pack
from models.spec import AltUpSpec, HeadShape, LatentSpec, ModelSpec, RopeSpec, first_expert


def pack_linear(
    weight: npt.NDArray[np.float32],
    *,
    name: str = "layers.0.o",
    bits: int = 4,
    group_size: int = 32,
    residual_bits: int = 8,
    bias: npt.NDArray[np.float32] | None = None,
    typical: float = 1.0,
) -> PackedLinear:
    """Round a weight [N, K] to nearest, with residuals, and calibration statistics for normal x of size `typical`."""
    N, K = weight.shape
    G = -(-K // group_size)
    padded = np.pad(weight, ((0, 0), (0, G * group_size - K)), mode="edge").reshape(N, G, group_size)
    low, high = np.minimum(padded.min(-1), 0), np.maximum(padded.max(-1), 0)
    scales = np.maximum((high - low) / (2**bits - 1), 1e-6).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low / wide), 0, 2**bits - 1).astype(np.uint8)
    codes = np.clip(np.rint(padded / wide[..., None]) + zeros[..., None], 0, 2**bits - 1)
    restored = ((codes - zeros[..., None]) * wide[..., None]).reshape(N, -1)[:, :K]
    return PackedLinear(
        name=name,
        shape=(N, K),
        bits=bits,
        group_size=group_size,
        codes=pack(codes.reshape(N, -1)[:, :K].astype(np.uint8), bits),
        scales=scales,
        zeros=zeros,
        bias=bias,
        **_pack_compensation(weight - restored, residual_bits, typical),
    )


def pack_codebook_linear(
    weight: npt.NDArray[np.float32],
    *,
    name: str = "layers.0.o",
    bits: int = 4,
    group_size: int = 32,
    residual_bits: int = 8,
    bias: npt.NDArray[np.float32] | None = None,
    typical: float = 1.0,
) -> PackedLinear:
    """Like `pack_linear` with a codebook for each row: the row's quantiles, from -127 to 127."""
    N, K = weight.shape
    scales = np.maximum(np.abs(weight).max(1, keepdims=True) / 127, 1e-6).astype(np.float16)
    levels = np.quantile(weight / scales.astype(np.float32), np.linspace(0, 1, 2**bits), axis=1).T
    codebook = np.clip(np.rint(levels), -127, 127).astype(np.int8)
    values = codebook * scales.astype(np.float32)
    codes = np.abs(weight[:, :, None] - values[:, None, :]).argmin(-1).astype(np.uint8)
    return PackedLinear(
        name=name,
        shape=(N, K),
        bits=bits,
        group_size=group_size,
        codes=pack(codes, bits),
        scales=scales,
        zeros=None,
        codebook=codebook,
        bias=bias,
        **_pack_compensation(weight - np.take_along_axis(values, codes.astype(np.intp), 1), residual_bits, typical),
    )


def _pack_compensation(error: npt.NDArray[np.float32], residual_bits: int, typical: float) -> dict[str, Any]:
    """What a layer keeps of its error [N, K] for compensation, as fields of `PackedLinear`."""
    if residual_bits == 0:
        return {"residual": None, "rank_maximum": None, "mean_square": None}
    K = error.shape[1]
    rng = np.random.default_rng(K)
    samples = -np.sort(-np.abs(rng.standard_normal((16, K))), axis=1) * typical
    return {
        "residual": _pack_residual(error.astype(np.float32), residual_bits),
        "rank_maximum": samples.max(0).astype(np.float32),
        "mean_square": rng.random(K).astype(np.float32),
    }


def _pack_residual(residual: npt.NDArray[np.float32], bits: int) -> PackedResidual:
    if bits == 16:
        return PackedResidual(bits=16, codes=np.ascontiguousarray(residual.T.astype(np.float16)), scales=None)
    top = 2 ** (bits - 1) - 1
    scales = np.maximum(np.abs(residual).max(1) / top, 1e-7).astype(np.float16)
    codes = np.clip(np.rint(residual / scales.astype(np.float32)[:, None]), -top, top) + 2 ** (bits - 1)
    return PackedResidual(bits=bits, codes=pack(np.ascontiguousarray(codes.T.astype(np.uint8)), bits), scales=scales)


@dataclass
class TinyModel:
    """Stands in for a stored model: everything that `models.packed.Weights` asks for, and the weights themselves."""

    spec: ModelSpec
    linears: dict[str, PackedLinear]
    vectors: dict[str, npt.NDArray[np.float32]]
    table: npt.NDArray[np.float16]
    full: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    name: str = "tiny"
    keys: list[KeyStatistics] = field(default_factory=list)
    tokens: npt.NDArray[np.float16] = field(default_factory=lambda: np.zeros((0, 0), np.float16))
    mtp: TinyModel | None = None

    def linear(self, name: str) -> PackedLinear:
        return self.linears[name]

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        return self.vectors[name]

    def key_statistics(self, layer: int) -> KeyStatistics | None:
        return self.keys[layer] if self.keys else None

    def embedding(self) -> npt.NDArray[np.float16]:
        return self.table

    def token_table(self) -> npt.NDArray[np.float16]:
        return self.tokens

    def expert_tokens(self, _layer: int) -> npt.NDArray[np.int32]:
        """The later, the more."""
        assert self.spec.mixture is not None
        return np.arange(self.spec.mixture.num_experts, dtype=np.int32)

    def release(self) -> None:
        pass


LOCAL = RopeSpec(theta=50.0, rotary_dim=16)
"""A rotary embedding for blocks with a window."""
BOTH_SIDES: dict[str, Any] = {
    "norm_after": True,
    "norm_eps": 1e-3,
    "inner_eps": 1e-2,
    "qk_norm": True,
    "activation": "gelu_tanh",
    "score_cap": 2.0,
    "logit_cap": 3.0,
}
"""Options of Gemma's kind."""
SINKS: dict[str, Any] = {"sinks": True, "qkv_bias": True, "o_bias": True}
"""Options of the attention of gpt-oss's kind."""
BEHIND: dict[str, Any] = {"norm_before": False, "norm_after": True, "qk_norm": True, "qk_norm_form": "all"}
"""Options of OLMo's kind."""
TURNED: dict[str, Any] = {
    "qk_norm": True,
    "qk_norm_form": "after_rope",
    "query_growth": 0.5,
    "query_growth_context": 2,
}
"""Options of Hunyuan's kind, and queries that grow."""


SHARED: dict[str, Any] = {
    "norm_after": True,
    "norm_eps": 1e-3,
    "inner_eps": 1e-2,
    "qk_norm": True,
    "v_norm": True,
    "activation": "gelu_tanh",
    "num_layers": 4,
    "windows": (5, None, 5, None),
    "mixers": ("attention", "attention", "shared", "shared"),
    "wide_heads": HeadShape(4, 1, 40),
    "rope": RopeSpec(rotary_dim=12),
    "window_rope": LOCAL,
    "mlp_widths": (172, 172, 100, 100, 100),
    "token_width": 24,
    "scaled": True,
}
"""Options of Gemma 4's kind: heads of two widths, shared caches, embeddings of the blocks' own."""


STREAMS: dict[str, Any] = {
    **{key: value for key, value in SHARED.items() if key not in ("wide_heads", "inner_eps", "scaled", "mlp_widths")},
    "rope": RopeSpec(rotary_dim=16),
    "hidden_size": 72,
    "mlp_widths": (172, 90, 172, 100),
    "sparsity": (0.8, 0.0, 0.3, 0.6),
    "token_vocab": 70,
    "altup": AltUpSpec(streams=3, rank=6),
    "logit_cap": 3.0,
}
"""Options of Gemma 3n's kind: a stream that is several, gates that are cut, shared caches."""


LATENTS: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_dim": 34,
    "rope": RopeSpec(rotary_dim=10),
    "latent": LatentSpec(rank=24, key_dim=8, value_dim=8, query_rank=20),
    "inner_eps": 1e-2,
}
"""Options of GLM-4.7-Flash's kind: latents of keys and values, and of queries."""


def make_spec(**changes: Any) -> ModelSpec:
    """A small Llama shape with ragged widths; name any field of ModelSpec to change it."""
    values: dict[str, Any] = {
        "family": "llama",
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "max_context": 128,
        "norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    values |= changes
    values.setdefault("rope", RopeSpec(rotary_dim=values["head_dim"]))
    values.setdefault("windows", (None,) * values["num_layers"])
    return ModelSpec(**values)


def make_model(
    spec: ModelSpec | None = None,
    *,
    bits: int = 4,
    group_size: int = 32,
    residual_bits: int = 8,
    codebook: bool = False,
    seed: int = 0,
    mtp: bool = False,
) -> TinyModel:
    """Random weights of a spec, packed. Biases appear where the spec asks for them.

    With `mtp`, there is a block that predicts further tokens.
    """
    spec = spec or make_spec()
    rng = np.random.default_rng(seed)
    linears, full = {}, {}
    for name in spec.linear_names():
        N, K = spec.linear_shape(name)
        full[name] = (rng.standard_normal((N, K)) * 1.5 / np.sqrt(K)).astype(np.float32)
        linears[name] = (pack_codebook_linear if codebook else pack_linear)(
            full[name],
            name=name,
            bits=bits,
            group_size=group_size,
            residual_bits=residual_bits,
            bias=rng.standard_normal(N).astype(np.float32) if spec.has_bias(name) else None,
        )
    for name, linear in linears.items():
        first = linears[first_expert(name)]  # experts read the same activations, so statistics of them are the same
        linears[name] = replace(linear, rank_maximum=first.rank_maximum)
        if name.endswith("gate_up"):
            linears[name] = replace(linears[name], mean_square=first.mean_square)
    sizes = {"norm": spec.hidden_size}
    for layer in range(spec.num_layers):
        sizes |= spec.block_vectors(layer)
    vectors = {name: (1 + 0.1 * rng.standard_normal(size)).astype(np.float32) for name, size in sizes.items()}
    matrices = spec.altup.matrices(spec.hidden_size) if spec.altup is not None else {}
    for name in filter(lambda name: name.rpartition(".")[2] in matrices, vectors):
        width = matrices[name.rpartition(".")[2]][1]
        vectors[name] = (rng.standard_normal(vectors[name].size) / np.sqrt(width)).astype(np.float32)
    for name in spec.router_names():
        shape = spec.routers(int(name.split(".")[1]))[name]
        vectors[name] = (rng.standard_normal(shape) * 8 / np.sqrt(shape[1])).astype(np.float32)
    table = rng.standard_normal((spec.vocab_size, spec.hidden_size)).astype(np.float16)
    tokens = rng.standard_normal((spec.vocab_size, spec.num_layers * spec.token_width)).astype(np.float16)
    model = TinyModel(spec=spec, linears=linears, vectors=vectors, table=table, full=full, tokens=tokens)
    if mtp:
        block = make_model(mtp_spec(spec), group_size=group_size, residual_bits=0, seed=seed + 1)
        model.mtp = replace(block, table=table, linears=block.linears | {"head": linears["head"]})
    return model
