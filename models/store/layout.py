"""The layout of a stored model: its files, and the tensors in each with their types and shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from models import mtp
from models.packed import tensor_names, tensor_shape
from models.packing import packed_width
from models.recipe import FLOATS, FLOATS_8, MINIMUMS, SUPER_GROUP, TWO_LEVELS, Recipe
from models.spec import ModelSpec, expert_of

MANIFEST = "manifest.json"
"""Sizes and checksums of all other files, and the summary that a listing shows."""
RECIPE = "recipe.json"
"""The model's origin: recipe, source shards, texts, perplexities."""
LOSSES = "losses.json"
"""Losses of each layer type by k_chunk; absent without residuals, and in older models."""
REFERENCE = "reference.safetensors"
"""The evaluation text and the full-precision model's next-token distributions on it, with which others are compared;
absent where there was no text, and in older models."""
CONFIG = "config.json"
"""The checkpoint's own, unchanged."""
GENERATION_CONFIG = "generation_config.json"
"""The checkpoint's own, unchanged; absent where the checkpoint has none."""
OUTER = "outer.safetensors"
"""Embedding table, last norm and output head."""

MTP = "mtp.safetensors"
"""The block that predicts a further token (`models.mtp`); absent where the checkpoint has none, and in older models."""

TensorTypes = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Type and shape of each tensor of a file."""

_CODES = frozenset({"codes", "stream", "scales", "zeros", "minimums", "codebook", "group_scales", "group_minimums"})
_NOT_ON_DEVICE = frozenset({"embed", "rank_maximum", "mean_square", "tokens"})
"""Last parts of tensors' names: those of weights, and those that no device needs."""
_I32, _F32, _F16 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.float16)
_U8, _I8 = np.dtype(np.uint8), np.dtype(np.int8)


def block_file(layer: int) -> str:
    return f"block-{layer:05d}.safetensors"


def expert_tokens(layer: int) -> str:
    """Tensor with the number of calibration tokens that reached each expert of a block."""
    return f"layers.{layer}.experts.tokens"


def file_of(name: str) -> str:
    """File in which a linear layer or a norm (`layers.3.qkv`, `norm`, `head`, `embed`) is stored."""
    parts = name.split(".")
    return block_file(int(parts[1])) if parts[0] == "layers" else OUTER


def tensor_files(spec: ModelSpec) -> tuple[str, ...]:
    return (*(block_file(layer) for layer in range(spec.num_layers)), OUTER)


def linear_tensors(spec: ModelSpec, recipe: Recipe, name: str) -> TensorTypes:
    rows, width = spec.linear_shape(name)
    bits = recipe.layer_bits(name)
    codes = "stream" if recipe.trellis else "codes"
    tensors: TensorTypes = {f"{name}.{codes}": (_I32, (rows, packed_width(width, bits)))}
    if recipe.trellis:
        tensors[f"{name}.scales"] = (_F16, (rows, 1))
    elif recipe.codebook:
        tensors |= {f"{name}.scales": (_F16, (rows, 1)), f"{name}.codebook": (_I8, (rows, 2**bits))}
    else:
        groups = -(-width // recipe.group_of(width, name))
        kept = None if recipe.types is None else recipe.types[name]
        halves = 1 if recipe.progressive else width // SUPER_GROUP if kept in TWO_LEVELS else groups
        of_scales = _U8 if kept == FLOATS else _F32 if kept == FLOATS_8 else _F16
        tensors[f"{name}.scales"] = (of_scales, (rows, halves))
        if kept in TWO_LEVELS:
            tensors[f"{name}.minimums"] = (_F16, (rows, halves))
            tensors |= {f"{name}.{part}": (_I8, (rows, groups)) for part in ("group_scales", "group_minimums")}
        elif kept in MINIMUMS:
            tensors[f"{name}.minimums"] = (_F16, (rows, groups))
        elif kept not in ("Q8_0", FLOATS, FLOATS_8):
            tensors[f"{name}.zeros"] = (_U8, (rows, groups))
        if recipe.progressive:
            tensors[f"{name}.group_scales"] = (_U8, (rows, groups))
    if spec.has_bias(name):
        tensors[f"{name}.bias"] = (_F32, (rows,))
    if recipe.residual_bits == 0:
        return tensors
    tensors[f"{name}.rank_maximum"] = (_F32, (width,))
    tensors[f"{name}.mean_square"] = (_F32, (width,))
    if recipe.residual_bits == 16:
        tensors[f"{name}.residual"] = (_F16, (width, rows))
    else:
        tensors[f"{name}.residual"] = (_I32, (width, packed_width(rows, recipe.residual_bits)))
        tensors[f"{name}.residual_scales"] = (_F16, (rows,))
    return tensors


def file_tensors(spec: ModelSpec, recipe: Recipe, file: str, *, every_expert: bool = True) -> TensorTypes:
    """All tensors of one of `tensor_files`; of a block's experts, which are alike, only the first's if asked so."""
    if file == OUTER:
        own = {"tokens": (_F16, (spec.vocab_size, spec.num_layers * spec.token_width))} if spec.token_width else {}
        return {
            "embed": (_F16, (spec.vocab_size, spec.hidden_size)),
            **own,
            "norm": (_F32, (spec.hidden_size,)),
            **linear_tensors(spec, recipe, "head"),
        }
    layer = int(file.removeprefix("block-").removesuffix(".safetensors"))
    tensors: TensorTypes = {name: (_F32, (width,)) for name, width in spec.block_vectors(layer).items()}
    if spec.mixture is not None and spec.has_experts(layer):
        tensors |= {name: (_F32, shape) for name, shape in spec.routers(layer).items()}
        tensors[expert_tokens(layer)] = (_I32, (spec.mixture.num_experts,))
    for name in spec.block_linears(layer):
        if every_expert or not expert_of(name):
            tensors |= linear_tensors(spec, recipe, name)
    return tensors


def mtp_tensors(spec: ModelSpec, recipe: Recipe) -> TensorTypes:
    """All tensors of `MTP`, beside a model of this architecture and recipe."""
    of, by = mtp.mtp_spec(spec), mtp.mtp_recipe(recipe)
    return {"norm": (_F32, (spec.hidden_size,)), **file_tensors(of, by, block_file(0))}


def optional_tensors(spec: ModelSpec, file: str) -> TensorTypes:
    """Optional tensors of one of `tensor_files`; a model has all of them or none.

    It has none if it was quantized without a calibration text, or before statistics of keys existed.
    """
    if file == OUTER:
        return {}
    layer = int(file.removeprefix("block-").removesuffix(".safetensors"))
    if layer not in spec.attention_layers:
        return {}
    return {name: (_F32, tensor_shape(spec, layer)) for name in tensor_names(layer)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a model's tensors, by use."""

    codes: int
    device: int
    """Device memory: `codes`, norms, biases and scales of residuals."""
    residuals: int
    active: int
    """Of `device`, what a token reads if all experts are alike."""


def sizes(spec: ModelSpec, recipe: Recipe) -> Sizes:
    """The exact sizes of a model of this architecture by this recipe; its files need not exist."""
    codes = device = residuals = active = 0
    for file in tensor_files(spec):
        for tensor, (dtype, shape) in file_tensors(spec, recipe, file, every_expert=False).items():
            size, (name, _, kind) = dtype.itemsize * math.prod(shape), tensor.rpartition(".")
            held = read = 1
            if spec.mixture is not None and expert_of(name) is not None:
                held, read = spec.mixture.num_experts, spec.mixture.experts_per_token
            codes += held * size if kind in _CODES else 0
            if kind == "residual":
                residuals += held * size
            elif kind not in _NOT_ON_DEVICE:
                device += held * size
                active += read * size
    return Sizes(codes=codes, device=device, residuals=residuals, active=active)
