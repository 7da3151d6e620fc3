"""Weights that are low-bit already, kept in their own lattice: types of GGUF files, integers and FP8 of folders.

The parts of a fused matrix may differ: Q4_0 and Q5_0 are written as Q4_1 or Q5_1, whose minimum is their zero-point's,
or with higher codes as Q8_0 (Q4_0 as Q5_0, too), and Q4_K as Q6_K, where another part is one; Q5_K always is. All are
exact. A head of another type, what else stands beside experts, and the small matrices beside attention and MLP are
rounded to Q8_0, so that what most weights are need not be rounded a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

import numpy as np
import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.experts import Part
from models.gguf.tensors import GgufTensor
from models.low_bit_source import BlockFloats, LowBitTensor
from models.packed import Lattice, PackedLinear
from models.packing import pack
from models.quantizers.groups import check_range
from models.recipe import GGUF_GROUPS, INTEGERS, KEPT, KEPT_BITS, MINIMUMS, ZERO_POINTS, Recipe
from models.shard import StoredTensor
from models.spec import expert_of
from models.store.tensors import Array

_GROUP = GGUF_GROUPS["Q8_0"]
_ALSO = {
    "Q4_0": {"Q4_1", "Q5_0", "Q5_1", "Q8_0"},
    "Q4_1": {"Q5_1"},
    "Q5_0": {"Q5_1", "Q8_0"},
    "Q4_K": {"Q6_K"},
    "Q5_K": {"Q6_K"},
}
"""Types as which another can be written, exactly."""
_OF_BLOCKS = 2
"""Dots in the names of attention's and the MLP's matrices, `layers.0.qkv`."""


def kept_recipe(checkpoint: Checkpoint) -> Recipe:
    """The recipe that keeps a checkpoint's weights.

    Raises:
        QuantizationError: it has weights that cannot be kept.
    """
    types = {name: _type(checkpoint, name) for name in checkpoint.spec.linear_names()}
    sizes = {own for name, kind in types.items() if kind in INTEGERS for own in _group_sizes(checkpoint, name)}
    if len(sizes) > 1:
        words = " and ".join(map(str, sorted(sizes)))
        raise QuantizationError(
            f"{checkpoint.path}: groups of {words} inputs cannot be kept in one model; leave --method out to round them"
        )
    weights: Counter[int] = Counter()
    for name, kind in types.items():
        weights[KEPT_BITS[kind]] += 0 if name == "head" else prod(checkpoint.spec.linear_shape(name))
    bits = weights.most_common(1)[0][0]
    group_size = min(sizes, default=_GROUP)
    return Recipe(method=KEPT, bits=bits, types=types, group_size=group_size, residual_bits=0, expected_k_chunk=0)


def _group_sizes(checkpoint: Checkpoint, name: str) -> Iterator[int]:
    for part in checkpoint.lattices(name) or ():
        if isinstance(part, LowBitTensor):
            yield part.group_size


def _kind(part: StoredTensor) -> str:
    """One of `KEPT_BITS`, or else what it is."""
    if isinstance(part, LowBitTensor | BlockFloats):
        return part.kind
    if isinstance(part, Part) and not part.turned and part.inputs == slice(None):
        return _kind(part.tensor)
    return part.dtype if isinstance(part, GgufTensor) or part.dtype not in KEPT_BITS else f"parts of {part.dtype}"


def _type(checkpoint: Checkpoint, name: str) -> str:
    parts = checkpoint.lattices(name)
    kinds = {_kind(part) for part in parts or ()}
    for kind in KEPT_BITS:
        if _fits(kinds, kind):
            return kind
    if _beside(checkpoint, name) and checkpoint.spec.linear_shape(name)[1] % _GROUP == 0:
        return "Q8_0"
    found = "multiplied" if parts is None else " and ".join(sorted(kinds))
    raise QuantizationError(
        f"{checkpoint.path}: the weights of {name} cannot be kept as they are ({found}; kept are "
        f"{', '.join(KEPT_BITS)}); leave --method out to round them to fewer bits"
    )


def _beside(checkpoint: Checkpoint, name: str) -> bool:
    """Whether few of a model's weights are in matrices like this one: the head, `layers.0.inner.down`."""
    few = name == "head" or name.count(".") > _OF_BLOCKS
    return expert_of(name) is None and (few or checkpoint.spec.mixture is not None)


def _fits(kinds: set[str], kind: str) -> bool:
    """Whether parts of these types can be written as another, exactly."""
    return bool(kinds) and all(own == kind or kind in _ALSO.get(own, ()) for own in kinds)


def rounded(checkpoint: Checkpoint, types: Mapping[str, str]) -> str | None:
    """A note on matrices that are rounded to 8 bits; None where there are none."""
    found = {}
    for name, kind in types.items():
        kinds = {_kind(part) for part in checkpoint.lattices(name) or ()}
        if expert_of(name) is None and not _fits(kinds, kind):
            found[name] = " and ".join(sorted(kinds)) or "multiplied"
    if found.keys() == {"head"}:
        return f"the output head, {found['head']} in the source, is rounded to 8 bits"
    own = ", ".join(sorted({*found.values()}))
    beside = "the experts" if checkpoint.spec.mixture is not None else "attention and MLP"
    return f"{len(found)} matrices beside {beside}, {own} in the source, are rounded to 8 bits" if found else None


def kept_linear(checkpoint: Checkpoint, name: str, kind: str) -> PackedLinear:
    """A linear layer as the file stores it.

    Args:
        checkpoint: A GGUF file, or a folder.
        name: The linear layer.
        kind: Its type, as `kept_recipe` has it.

    Raises:
        CheckpointError: the file is gone or damaged.
        QuantizationError: a matrix of another type, which is rounded to 8 bits, holds NaN or infinity.
    """
    parts = checkpoint.lattices(name)
    exact = _fits({_kind(part) for part in parts or ()}, kind)
    lattices = [_as(part, kind) for part in parts or ()] if exact else [_rounded(checkpoint.linear(name)[0])]

    def rows(arrays: Sequence[Array]) -> Array:
        if not exact:  # these are in order
            return arrays[0]
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
        group_size=GGUF_GROUPS.get(kind, codes.shape[1] // scales.shape[1]),
        codes=pack(codes, bits),
        scales=scales,
        zeros=np.full(scales.shape, ZERO_POINTS[kind], np.uint8) if kind in ZERO_POINTS else together("zeros"),
        minimums=together("minimums"),
        group_scales=together("group_scales"),
        group_minimums=together("group_minimums"),
        bias=None if bias is None else bias.numpy(),
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )


def _lattice(part: StoredTensor) -> Lattice:
    if isinstance(part, Part):
        own = _lattice(part.tensor)
        parts = {field.name: getattr(own, field.name) for field in fields(own)[1:]}
        cut: dict[str, Any] = {name: each[part.outputs] for name, each in parts.items() if each is not None}
        return replace(own, **cut)
    assert isinstance(part, GgufTensor | LowBitTensor | BlockFloats)
    return part.lattice()


def _as(part: StoredTensor, kind: str) -> Lattice:
    """A part's lattice, written as another type."""
    own = _lattice(part)
    if own.kind == kind:
        return own
    if kind == "Q5_1" and own.kind == "Q4_1":
        return replace(own, kind=kind)
    if kind in ("Q5_0", "Q8_0"):
        higher = ZERO_POINTS.get(kind, 128) - ZERO_POINTS[own.kind]
        return Lattice(kind=kind, codes=own.codes + np.uint8(higher), scales=own.scales)
    if kind == "Q6_K":
        assert own.group_scales is not None
        assert own.group_minimums is not None
        halves = {name: getattr(own, name).repeat(2, axis=1) for name in ("group_scales", "group_minimums")}
        return replace(own, kind=kind, **halves)
    assert kind in MINIMUMS
    with np.errstate(over="ignore"):
        minimums = own.scales * np.float16(-ZERO_POINTS[own.kind])
    if not np.isfinite(minimums).all():
        raise QuantizationError(f"{part.path}: scales of '{part.name}' are too large to be kept beside {kind}")
    return Lattice(kind=kind, codes=own.codes, scales=own.scales, minimums=minimums)


def _rounded(weight: torch.Tensor) -> Lattice:
    """A matrix [N, K] in Q8_0: scales are the largest of 32 divided by 127."""
    whole = weight.to(torch.float32).numpy()
    check_range(whole, 8)
    groups = whole.reshape(len(whole), -1, _GROUP)
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    divisors = np.where(scales == 0, np.float32(1), scales.astype(np.float32))[..., None]
    codes = np.clip(np.rint(groups / divisors), -127, 127).astype(np.int8).view(np.uint8) ^ np.uint8(128)
    return Lattice(kind="Q8_0", codes=codes.reshape(whole.shape), scales=scales)
