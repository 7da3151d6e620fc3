"""Oracle of page contents: quantizes and dequantizes pages of each kind, for comparison with every backend.

Source: QServe §4.3, QuantSpec §4.2, GEAR §3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from runtime.kv.kinds import CacheKind, Code, Part
from runtime.kv.oracle import correction, uniform

Stored = Mapping[str, torch.Tensor]
"""A page's arrays by the names of `runtime.kv.kinds.page_fields`, with leading dimensions."""


class LowRank(Protocol):
    """As `correction.low_rank`."""

    def __call__(self, residual: torch.Tensor, rank: int, *, alike: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the factors."""
        ...


_LARGEST = torch.finfo(torch.float16).max


def quantize(
    kind: CacheKind, part: Part, x: torch.Tensor, *, low_rank: LowRank = correction.low_rank
) -> dict[str, torch.Tensor]:
    """Quantize the keys or values of one head, or of many at once.

    Kinds without a window accept any number of tokens, each quantized on its own.

    Args:
        kind: The kind of cache.
        part: Keys or values.
        x: float32 [..., T, D], T = a page where the kind has a window.
        low_rank: Computes GEAR's factors; a backend may have a faster way to the same product.

    Returns:
        The fields of `runtime.kv.kinds.page_fields` with the leading dimensions of x.
    """
    code = kind.code(part)
    if code.bits == 16:
        return {"x": x.to(torch.float16)}
    x = x.to(torch.float16).float()
    vectors = _turned(code, x)
    count = kind.outliers(vectors.shape[-1])
    places = correction.outliers(vectors, count)
    kept = torch.zeros_like(vectors, dtype=torch.bool).scatter_(-1, places, value=True)
    stored = _uniform(kind, code, vectors, kept if count else None)
    if kind.rank:
        residual = _turned(code, vectors - _read_uniform(kind, code, stored, x.shape[-1]))
        residual = residual.masked_fill(_turned(code, kept), 0)
        alike = kind.alike(part)
        stored["a"], stored["b"] = low_rank(residual, min(kind.rank, x.shape[-1]), alike=alike)
    if count:
        missing = vectors - _turned(code, dequantize(kind, part, stored, x.shape[-1]))
        stored["indices"] = places.to(torch.int16)
        stored["outliers"] = missing.gather(-1, places).clamp(-_LARGEST, _LARGEST).to(torch.float16)
    return stored


def dequantize(kind: CacheKind, part: Part, stored: Stored, head_dim: int, *, draft: bool = False) -> torch.Tensor:
    """Dequantize keys or values: D^ + L + S of the parts that are stored.

    Args:
        kind: The kind of cache.
        part: Keys or values.
        stored: The result of `quantize`, or some of GEAR's fields left out.
        head_dim: D.
        draft: Whether to read only the upper plane, if there are two.

    Returns:
        float32 [..., T, D].
    """
    code = kind.code(part)
    if code.bits == 16:
        return stored["x"].float()
    vectors = _read_uniform(kind, code, stored, head_dim, draft=draft)
    if "a" in stored:
        vectors = vectors + _turned(code, correction.product(stored["a"], stored["b"]))
    if "indices" in stored:
        vectors = vectors.scatter_add(-1, stored["indices"].long(), stored["outliers"].float())
    return _turned(code, vectors)


def _turned(code: Code, x: torch.Tensor) -> torch.Tensor:
    """[..., T, D] as vectors, or vectors as [..., T, D]."""
    return x.mT if code.axis == "channel" else x


def _uniform(kind: CacheKind, code: Code, vectors: torch.Tensor, kept: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """D^ of vectors [..., V, n]: codes and scales. The outliers `kept` separately do not affect the scales."""
    bits = 4 if kind.hierarchical else code.bits
    groups = uniform.split(vectors, code.group)
    scales = uniform.scales_of(groups, bits, None if kept is None else uniform.split(kept, code.group))
    codes = uniform.encode(groups, scales, bits)
    if code.exact_mean:
        scales = uniform.with_exact_means(groups, codes, scales)
    if not kind.hierarchical:
        return {"codes": _packed(code, codes, vectors.shape[-1], bits), "scales": scales}
    lower = uniform.encode_lower(groups, codes, scales)
    return {
        "upper": _packed(code, codes, vectors.shape[-1], 4),
        "lower": _packed(code, (lower & 15).to(torch.uint8), vectors.shape[-1], 4),
        "scales": scales,
    }


def _packed(code: Code, codes: torch.Tensor, length: int, bits: int) -> torch.Tensor:
    """Codes [..., V, groups, group] as rows of tokens, packed: uint8 [..., T, D * bits / 8]."""
    return uniform.pack(_turned(code, codes.flatten(-2)[..., :length]).contiguous(), bits)


def _read_uniform(kind: CacheKind, code: Code, stored: Stored, head_dim: int, *, draft: bool = False) -> torch.Tensor:
    """Dequantize codes and scales, as vectors float32 [..., V, n]."""

    def groups(name: str, bits: int) -> torch.Tensor:
        return uniform.split(_turned(code, uniform.unpack(stored[name], bits, head_dim)), code.group)

    if not kind.hierarchical:
        read = uniform.decode(groups("codes", code.bits), stored["scales"])
    elif draft:
        read = uniform.decode(groups("upper", 4), stored["scales"])
    else:
        lower = groups("lower", 4).to(torch.int8)
        read = uniform.decode_both(groups("upper", 4), torch.where(lower > 7, lower - 16, lower), stored["scales"])
    length = head_dim if code.axis == "token" else next(iter(stored.values())).shape[-2]
    return read.flatten(-2)[..., :length]
