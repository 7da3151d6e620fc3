"""Kinds of KV cache: the fields of their pages, and sizes in bytes. Does not import torch.

Every kind stores *pages* of a fixed number of tokens in packed form. Most also have a *window* in half precision: it
keeps a sequence's first tokens, which nearly every query attends to (attention sinks), for good, followed by recent
tokens, from which whole pages are flushed. What is stored depends only on the sequence's tokens, not on the steps in
which they arrived.

Source: QServe §4.3 (`int4`), QuantSpec §4.2-4.3 (`hierarchical`), KIVI as in GEAR §3 (`kivi2`), GEAR §3 (the rest).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from models.spec import ModelSpec

KVKind = Literal["fp16", "int8", "int4", "hierarchical", "kcvt4", "kivi2", "gear4", "gear2", "gear-l4", "gear-l2"]
Axis = Literal["token", "channel"]
Part = Literal["keys", "values"]

PARTS: tuple[Part, Part] = ("keys", "values")
"""The two halves of a cache."""
LARGEST = 32000.0
"""What keys and values are limited to: differences of two, and what is read of their codes, stay in half precision."""
LOW_RANK = 4
"""Rank of GEAR's correction of a page (GEAR §3: rank 4 for a prompt)."""
SPARSITY = 0.02
"""Share of every vector that GEAR stores exactly as outliers, half of it at either end."""
ALIKE = 64
"""Extra weight of an error that all channels of a turned key share: queries have this direction in common
(`runtime.kv.basis`). On SmolLM2 half of a query's energy lies in it, which the weight 64 models for D = 64."""
SINKS = 64
"""First tokens that kinds of 4 bits and fewer keep in half precision. One or a few take much of the attention, and
their keys lie far from all others; kernels traverse a window in steps of 64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Quantization of a page's keys or values: x = code * scale + zero.

    A *vector* is what one token has (axis `token`, D numbers) or what one channel has over the page's tokens (axis
    `channel`, as many numbers as the page has tokens). Each group of a vector has a scale of its own.
    """

    bits: int
    """Bits of a code: 2, 4 or 8; 16: half precision, not quantized. A hierarchical code counts both planes: 8."""
    axis: Axis = "token"
    """The axis that a vector spans."""
    group: int = 0
    """Numbers of a vector that share a scale and a zero; 0 = all of it. The last group may be shorter."""
    exact_mean: bool = False
    """Whether the zero is refitted to the codes, so that each group keeps its mean: rounding then adds no error in the
    direction in which all channels are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKind:
    """One kind of cache."""

    name: KVKind
    """Name for `--kv`."""
    page: int
    """Tokens of a page."""
    windowed: bool = False
    """Whether recent tokens stay in half precision until a page of them is quantized at once. If not, every token is
    quantized on arrival."""
    sinks: int = 0
    """First tokens of a sequence, which stay in the window; pages hold those after them. A multiple of 64, so that
    kernels traverse them in whole blocks."""
    keep: int = 0
    """Recent tokens that always stay in the window: a page is flushed while it holds sinks + keep + page tokens or
    more."""
    turned: bool = False
    """Whether keys are stored in a basis that rounding hurts less (`runtime.kv.basis`)."""
    keys: Code
    """Quantization of keys."""
    values: Code
    """Quantization of values."""
    hierarchical: bool = False
    """Whether codes are two planes of 4 bits, x = (16 upper + lower) * scale / 16 + zero. A draft reads only the
    upper."""
    rank: int = 0
    """Rank of the low-rank correction of a head's page, keys and values each; 0 = none."""
    sparsity: float = 0.0
    """Share of every vector stored exactly as outliers; 0 = none."""

    @property
    def unpaged(self) -> int:
        """Tokens that a sequence never has in pages: its first and its most recent ones."""
        return self.sinks + self.keep

    @property
    def has_draft(self) -> bool:
        """Whether drafts can read less than the target."""
        return self.hierarchical

    def code(self, part: Part) -> Code:
        """Quantization of keys or values."""
        return self.keys if part == "keys" else self.values

    def alike(self, part: Part) -> int:
        """Extra weight of an error that all channels share, in the low-rank correction."""
        return ALIKE if self.turned and part == "keys" else 0

    def outliers(self, length: int) -> int:
        """Outliers taken from each end of a vector of `length` numbers.

        The nearest count to sparsity / 2 of the vector's own length, at least one, and never more than all of it.
        """
        if self.sparsity == 0:
            return 0
        return min(max(1, math.floor(length * self.sparsity / 2 + 0.5)), length // 2)

    def window_capacity(self, max_rows: int) -> int:
        """Capacity of a slot's window in tokens, if a step has at most `max_rows` rows."""
        return self.unpaged + self.page + max_rows if self.windowed else 0

    def max_pages(self, context: int) -> int:
        """Most pages of a slot of `context` tokens."""
        if self.windowed:
            return max(0, context - self.unpaged) // self.page
        return -(-context // self.page)

    def stored_pages(self, length: int) -> int:
        """Pages of a sequence of `length` tokens before its next step."""
        return max(0, length - self.unpaged) // self.page if self.windowed else -(-length // self.page)

    def whole_pages(self, length: int) -> int:
        """Pages that contain only a sequence's first `length` tokens: those a fork can share permanently."""
        return max(0, length - self.sinks) // self.page


def _kinds() -> dict[KVKind, CacheKind]:
    """All kinds by name."""
    half = Code(bits=16)
    int8, int4 = Code(bits=8), Code(bits=4, exact_mean=True)
    upper_lower = (Code(bits=8, axis="channel"), Code(bits=8))
    kcvt4 = (Code(bits=4, axis="channel"), Code(bits=4))
    kivi2 = (Code(bits=2, axis="channel", group=64), Code(bits=2, group=64))

    def gear(name: KVKind, backbone: tuple[Code, Code], sparsity: float) -> CacheKind:
        keys, values = backbone
        return CacheKind(
            name=name,
            page=128,
            windowed=True,
            sinks=SINKS,
            turned=True,
            keys=keys,
            values=values,
            rank=LOW_RANK,
            sparsity=sparsity,
        )

    kinds = [
        CacheKind(name="fp16", page=64, keys=half, values=half),
        CacheKind(name="int8", page=64, turned=True, keys=int8, values=int8),
        CacheKind(name="int4", page=64, windowed=True, sinks=SINKS, turned=True, keys=int4, values=int4),
        CacheKind(
            name="hierarchical",
            page=128,
            windowed=True,
            keep=128,
            keys=upper_lower[0],
            values=upper_lower[1],
            hierarchical=True,
        ),
        CacheKind(name="kcvt4", page=128, windowed=True, sinks=SINKS, turned=True, keys=kcvt4[0], values=kcvt4[1]),
        CacheKind(name="kivi2", page=128, windowed=True, sinks=SINKS, turned=True, keys=kivi2[0], values=kivi2[1]),
        gear("gear4", kcvt4, SPARSITY),
        gear("gear2", kivi2, SPARSITY),
        gear("gear-l4", kcvt4, 0.0),
        gear("gear-l2", kivi2, 0.0),
    ]
    return {kind.name: kind for kind in kinds}


KINDS: Mapping[KVKind, CacheKind] = MappingProxyType(_kinds())
"""Every kind by its name."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array in a page's record of a layer's head."""

    name: str
    """`x`, `codes`, `upper`, `lower`, `scales`, `a`, `b`, `indices` or `outliers`."""
    dtype: Literal["float16", "uint8", "int16"]
    """Type of its numbers."""
    shape: tuple[int, ...]
    """Its shape; `x`, `codes`, `upper` and `lower` have a row for each token."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * {"float16": 2, "uint8": 1, "int16": 2}[self.dtype]


def page_fields(kind: CacheKind, part: Part, head_dim: int) -> tuple[Field, ...]:
    """The fields of a page of one layer's key-value head, in storage order.

    Args:
        kind: The kind of cache.
        part: Keys or values.
        head_dim: D.

    Returns:
        `x` float16 [page, D] for an unquantized cache; otherwise `codes` (packed uint8 [page, D * bits / 8], low bits
        first) or the planes `upper` and `lower` (packed uint8 [page, D / 2]); `scales` float16 [vectors, groups, 2]
        with scale and zero; GEAR's `a` [page, r] and `b` [D, r] float16; `indices` int16 and `outliers` float16
        [vectors, 2 * outliers].
    """
    code, T, D = kind.code(part), kind.page, head_dim
    if code.bits == 16:
        return (Field("x", "float16", (T, D)),)
    if kind.hierarchical:
        packed = (T, packed_bytes(D, 4))
        fields = [Field("upper", "uint8", packed), Field("lower", "uint8", packed)]
    else:
        fields = [Field("codes", "uint8", (T, packed_bytes(D, code.bits)))]
    vectors, length = (T, D) if code.axis == "token" else (D, T)
    fields.append(Field("scales", "float16", (vectors, -(-length // (code.group or length)), 2)))
    if kind.rank:
        rank = min(kind.rank, D)
        fields += [Field("a", "float16", (T, rank)), Field("b", "float16", (D, rank))]
    if count := 2 * kind.outliers(length):
        fields += [Field("indices", "int16", (vectors, count)), Field("outliers", "float16", (vectors, count))]
    return tuple(fields)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes packed side by side."""
    return -(-count * bits // 8)


def record_bytes(kind: CacheKind, part: Part, head_dim: int) -> int:
    """Bytes of what a page keeps for one layer and key-value head, of keys or of values."""
    return sum(field.nbytes for field in page_fields(kind, part, head_dim))


def page_bytes(kind: CacheKind, spec: ModelSpec, layers: Sequence[int] | None = None) -> int:
    """Bytes of a page: keys and values of some layers with a cache, by default all, and all key-value heads."""
    heads = map(spec.heads_of, spec.attention_layers if layers is None else layers)
    return sum(own.kv_heads * sum(record_bytes(kind, part, own.dim) for part in PARTS) for own in heads)


def window_token_bytes(kind: CacheKind, spec: ModelSpec) -> int:
    """Bytes of one token in the window: half precision in all layers with a cache; 0 where the kind has no window."""
    return 4 * sum(spec.heads_of(layer).kv_width for layer in spec.attention_layers) if kind.windowed else 0


def bytes_per_token(kind: CacheKind, spec: ModelSpec) -> float:
    """Bytes per token once stored in a page of every layer, including its share of the page's common data.

    Args:
        kind: The kind of cache.
        spec: The model.
    """
    return page_bytes(kind, spec) / kind.page


DEFAULT_KV: KVKind = "int4"
"""The default kind: QServe's KV4, within 0.6 % of `fp16`'s perplexity (docs/kv.md)."""
CHAT_KINDS: tuple[KVKind, ...] = (DEFAULT_KV, "int8", "fp16", "hierarchical")
"""The kinds offered by the settings screen; the others are for comparison with the papers."""
SPECULATIVE_KV: KVKind = "hierarchical"
"""The kind of cache whose drafts by the model read less than verification does."""


def cache_for(kv: KVKind | None, *, drafts: bool, checked: str | None) -> KVKind:
    """The kind of cache for a model.

    Args:
        kv: The requested kind; None: not specified.
        drafts: Whether the model will draft for itself.
        checked: The kind that its certificate found to be no harm; None: not checked.
    """
    return kv or (SPECULATIVE_KV if drafts else usual_cache(checked))


def usual_cache(checked: str | None) -> KVKind:
    """The default kind for a model; `checked` as in `cache_for`."""
    return KINDS[cast("KVKind", checked)].name if checked in KINDS else DEFAULT_KV
