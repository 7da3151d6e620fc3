"""Weights that are low-bit already, kept in their own lattice: types of GGUF files, bit for bit.

The parts of a fused matrix may differ: Q4_0 is written as Q4_1, whose minimum is -8 scales, or as Q8_0 with codes 120
higher, and Q4_K as Q6_K, where another part is one; all are exact. A head of another type is rounded to Q8_0, so that
the QAT files with 4-bit blocks and a head of 16 or 6 bits need no second rounding of their blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.gguf.tensors import GgufTensor, Lattice
from models.packed import PackedLinear
from models.packing import pack
from models.quantizers.groups import check_range
from models.recipe import KEPT, KEPT_BITS, KEPT_GROUP_SIZE, TWO_LEVELS, Recipe
from models.store.tensors import Array

_ALSO = {"Q4_0": {"Q4_1", "Q8_0"}, "Q4_K": {"Q6_K"}}
"""Types as which another can be written, exactly."""


def kept_recipe(checkpoint: Checkpoint) -> Recipe:
    """The recipe that keeps a checkpoint's weights.

    Raises:
        QuantizationError: it has weights that cannot be kept.
    """
    types = {name: _type(checkpoint, name) for name in checkpoint.spec.linear_names()}
    weights: Counter[int] = Counter()
    for name, kind in types.items():
        weights[KEPT_BITS[kind]] += 0 if name == "head" else prod(checkpoint.spec.linear_shape(name))
    bits = weights.most_common(1)[0][0]
    return Recipe(method=KEPT, bits=bits, types=types, group_size=KEPT_GROUP_SIZE, residual_bits=0, expected_k_chunk=0)


def _type(checkpoint: Checkpoint, name: str) -> str:
    parts = checkpoint.lattices(name)
    kinds = set() if parts is None else {part.dtype for part in parts}
    for kind in KEPT_BITS:
        if kinds and all(own == kind or kind in _ALSO.get(own, ()) for own in kinds):
            return kind
    if name == "head" and checkpoint.spec.linear_shape(name)[1] % KEPT_GROUP_SIZE == 0:
        return "Q8_0"
    found = "multiplied, of experts or no GGUF tensors" if parts is None else " and ".join(sorted(kinds))
    raise QuantizationError(
        f"{checkpoint.path}: the weights of {name} cannot be kept as they are ({found}; kept are "
        f"{', '.join(KEPT_BITS)}); leave --method out to round them to fewer bits"
    )


def rounded_head(checkpoint: Checkpoint) -> str | None:
    """The type of a head that is rounded to 8 bits; None where it is kept."""
    parts = checkpoint.lattices("head")
    if parts is None:
        return "multiplied"
    return next((part.dtype for part in parts if part.dtype not in KEPT_BITS), None)


def kept_linear(checkpoint: Checkpoint, name: str, kind: str) -> PackedLinear:
    """A linear layer as the file stores it.

    Args:
        checkpoint: Of a GGUF file.
        name: The linear layer.
        kind: Its type, as `kept_recipe` has it.

    Raises:
        CheckpointError: the file is gone or damaged.
        QuantizationError: a head of another type holds NaN or infinity.
    """
    parts = checkpoint.lattices(name)
    if name == "head" and rounded_head(checkpoint) is not None:
        lattices = [_rounded(checkpoint.linear("head")[0])]
    else:
        assert parts is not None
        lattices = [_as(part, kind) for part in parts]

    def rows(arrays: Sequence[Array]) -> Array:
        joined = torch.from_numpy(np.concatenate(arrays))
        return np.ascontiguousarray(checkpoint.in_order(name, joined).numpy())

    def together(part: str) -> Array | None:
        arrays = [getattr(own, part) for own in lattices]
        return None if arrays[0] is None else rows(arrays)

    bits = KEPT_BITS[kind]
    codes, scales = (rows([getattr(own, part) for own in lattices]) for part in ("codes", "scales"))
    bias = checkpoint.bias(name)
    return PackedLinear(
        name=name,
        shape=(codes.shape[0], codes.shape[1]),
        bits=bits,
        group_size=TWO_LEVELS.get(kind, KEPT_GROUP_SIZE),
        codes=pack(codes, bits),
        scales=scales,
        zeros=np.full(scales.shape, 8, np.uint8) if kind == "Q4_0" else None,
        minimums=together("minimums"),
        group_scales=together("group_scales"),
        group_minimums=together("group_minimums"),
        bias=None if bias is None else bias.numpy(),
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )


def _as(part: GgufTensor, kind: str) -> Lattice:
    """A part's lattice, written as another type."""
    own = part.lattice()
    if own.kind == kind:
        return own
    if kind == "Q8_0":
        return Lattice(kind=kind, codes=own.codes + np.uint8(120), scales=own.scales)
    if kind == "Q6_K":
        assert own.group_scales is not None
        assert own.group_minimums is not None
        halves = {name: getattr(own, name).repeat(2, axis=1) for name in ("group_scales", "group_minimums")}
        return replace(own, kind=kind, **halves)
    minimums = own.scales * np.float16(-8)
    if not np.isfinite(minimums).all():
        raise QuantizationError(f"{part.path}: scales of '{part.name}' are too large to be kept beside Q4_1")
    return Lattice(kind=kind, codes=own.codes, scales=own.scales, minimums=minimums)


def _rounded(weight: torch.Tensor) -> Lattice:
    """A matrix [N, K] in Q8_0: scales are the largest of 32 divided by 127."""
    whole = weight.to(torch.float32).numpy()
    check_range(whole, 8)
    groups = whole.reshape(len(whole), -1, KEPT_GROUP_SIZE)
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    divisors = np.where(scales == 0, np.float32(1), scales.astype(np.float32))[..., None]
    codes = np.clip(np.rint(groups / divisors), -127, 127).astype(np.int8).view(np.uint8) ^ np.uint8(128)
    return Lattice(kind="Q8_0", codes=codes.reshape(whole.shape), scales=scales)
