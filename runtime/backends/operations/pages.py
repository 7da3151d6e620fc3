"""Pages of each kind of KV cache in plain torch, bit for bit as backends store them: uniform codes, GEAR's corrections.

Source: QServe §4.3, QuantSpec §4.2, GEAR §3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from runtime.kv.basis import ITERATIONS, low_rank_start
from runtime.kv.kinds import CacheKind, Code, Part

Stored = Mapping[str, torch.Tensor]
"""A page's arrays by the names of `runtime.kv.kinds.page_fields`, with leading dimensions."""


_LARGEST = torch.finfo(torch.float16).max


def split(vectors: torch.Tensor, group: int) -> torch.Tensor:
    """Split vectors into groups.

    Args:
        vectors: [..., n].
        group: Group size; 0 = n. A shorter last group is padded with its last number.

    Returns:
        [..., groups, group].
    """
    size = group or vectors.shape[-1]
    missing = -vectors.shape[-1] % size
    if missing:
        vectors = torch.cat([vectors, vectors[..., -1:].expand(*vectors.shape[:-1], missing)], dim=-1)
    return vectors.reshape(*vectors.shape[:-1], vectors.shape[-1] // size, size)


def scales_of(groups: torch.Tensor, bits: int, outliers: torch.Tensor | None = None) -> torch.Tensor:
    """Scale and zero of every group: zero = minimum, scale = (maximum - minimum) / (2^bits - 1).

    The numbers are float16 values, so the zero is exact; the scale is rounded to float16. A constant group has scale 0.

    Args:
        groups: float32 [..., groups, group], float16 values.
        bits: Bits of a code.
        outliers: bool [..., groups, group], numbers to ignore; None = use all.

    Returns:
        float16 [..., groups, 2]: scale and zero.
    """
    low, high = groups, groups
    if outliers is not None:
        low, high = groups.masked_fill(outliers, torch.inf), groups.masked_fill(outliers, -torch.inf)
    least, largest = low.amin(-1), high.amax(-1)
    nothing = least > largest  # a group of outliers only
    least, largest = least.masked_fill(nothing, 0), largest.masked_fill(nothing, 0)
    return torch.stack([(largest - least) / (2**bits - 1), least], dim=-1).to(torch.float16)


def encode(groups: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest code of every number, ties to even, by the stored scales.

    Args:
        groups: float32 [..., groups, group].
        scales: float16 [..., groups, 2].
        bits: Bits of a code.

    Returns:
        uint8 [..., groups, group], in [0, 2^bits - 1].
    """
    scale, zero = scales.float().unsqueeze(-2).unbind(-1)
    exact = torch.where(scale > 0, (groups - zero) / scale, torch.zeros_like(groups))
    return torch.round(exact).clamp(0, 2**bits - 1).to(torch.uint8)


def with_exact_means(groups: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scales with zeros refitted so that every group keeps its mean, up to rounding.

    Args:
        groups: float32 [..., groups, group], whole groups.
        codes: uint8 [..., groups, group].
        scales: float16 [..., groups, 2], used for encoding.

    Returns:
        float16 [..., groups, 2].
    """
    scale = scales[..., 0]
    zero = groups.mean(-1) - scale.float() * codes.float().mean(-1)
    return torch.stack([scale, zero.clamp(-_LARGEST, _LARGEST).to(torch.float16)], dim=-1)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize: code * scale + zero. Returns float32 [..., groups, group]."""
    scale, zero = scales.float().unsqueeze(-2).unbind(-1)
    return codes.float() * scale + zero


def encode_lower(groups: torch.Tensor, upper: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The second four bits: the error of the first, in sixteenths of the scale.

    An error of half a scale upwards would be 8; it becomes 7, so both planes together are off by at most a sixteenth of
    the scale, and by at most half of that nearly everywhere.

    Args:
        groups: float32 [..., groups, group].
        upper: uint8 [..., groups, group], their 4-bit codes.
        scales: float16 [..., groups, 2].

    Returns:
        int8 [..., groups, group], in [-8, 7].

    Source: QuantSpec §4.2.
    """
    scale = scales[..., :1].float()
    error = groups - decode(upper, scales)
    exact = torch.where(scale > 0, error / (scale / 16), torch.zeros_like(error))
    return torch.round(exact).clamp(-8, 7).to(torch.int8)


def decode_both(upper: torch.Tensor, lower: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize both planes: (16 * upper + lower) * scale / 16 + zero. Returns float32 [..., groups, group]."""
    scale, zero = scales.float().unsqueeze(-2).unbind(-1)
    return (16 * upper.float() + lower.float()) * (scale / 16) + zero


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, first in the lowest bits of a byte; the last byte is padded with zeros.

    Args:
        codes: uint8 [..., n], below 2^bits.
        bits: 2, 4 or 8.

    Returns:
        uint8 [..., ceil(n * bits / 8)].
    """
    each = 8 // bits
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each))
    filled = filled.reshape(*codes.shape[:-1], filled.shape[-1] // each, each)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (filled << shifts).sum(-1, dtype=torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Inverse of `pack_codes`.

    Args:
        packed: uint8 [..., ceil(count * bits / 8)].
        bits: 2, 4 or 8.
        count: Codes of a row.

    Returns:
        uint8 [..., count].
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts).bitwise_and(2**bits - 1)
    return codes.flatten(-2)[..., :count]


def low_rank(
    residual: torch.Tensor, rank: int, iterations: int = ITERATIONS, *, alike: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the nearest low-rank matrix, approximately: residual ~ a b^T.

    Subspace iteration from a fixed start, so that equal pages have equal factors.

    The distance may use a weighted metric: with R the residual, the columns of a are the first left singular vectors of
    R (I + alike 1 1^T / D)^(1/2), and b is R^T a.

    Args:
        residual: float32 [..., T, D].
        rank: r, at most D.
        iterations: Rounds.
        alike: Extra weight of an error that all channels share.

    Returns:
        a float16 [..., T, r] and b float16 [..., D, r]. The columns of a are orthonormal.

    Source: GEAR Algorithm 2.
    """
    T, D = residual.shape[-2:]
    b = torch.from_numpy(low_rank_start(D, rank)).to(residual.device).expand(*residual.shape[:-2], D, rank)
    a = residual.new_zeros(*residual.shape[:-2], T, rank)
    for _ in range(iterations):
        a = torch.linalg.qr(residual @ (b + alike * b.mean(-2, keepdim=True)))[0]
        b = residual.mT @ a
    return a.to(torch.float16).contiguous(), b.to(torch.float16)


def low_rank_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply the factors: a b^T. Returns float32 [..., T, D]."""
    return a.float() @ b.float().mT


def outliers(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` smallest and the `count` largest numbers of every vector.

    Among equal numbers, the first count as smallest and the last as largest, so that no number counts twice.

    Args:
        vectors: float32 [..., n], n >= 2 * count.
        count: Outliers at each end.

    Returns:
        int64 [..., 2 * count], smallest first.

    Source: GEAR §3, the filter.
    """
    order = torch.sort(vectors, dim=-1, stable=True).indices
    return torch.cat([order[..., :count], order[..., vectors.shape[-1] - count :]], dim=-1)


class LowRank(Protocol):
    """As `low_rank`."""

    def __call__(self, residual: torch.Tensor, rank: int, *, alike: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the factors."""
        ...


def quantize_page(
    kind: CacheKind, part: Part, x: torch.Tensor, *, low_rank: LowRank = low_rank
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
    places = outliers(vectors, count)
    kept = torch.zeros_like(vectors, dtype=torch.bool).scatter_(-1, places, value=True)
    stored = _uniform(kind, code, vectors, kept if count else None)
    if kind.rank:
        residual = _turned(code, vectors - _read_uniform(kind, code, stored, x.shape[-1]))
        residual = residual.masked_fill(_turned(code, kept), 0)
        alike = kind.alike(part)
        stored["a"], stored["b"] = low_rank(residual, min(kind.rank, x.shape[-1]), alike=alike)
    if count:
        missing = vectors - _turned(code, dequantize_page(kind, part, stored, x.shape[-1]))
        stored["indices"] = places.to(torch.int16)
        stored["outliers"] = missing.gather(-1, places).clamp(-_LARGEST, _LARGEST).to(torch.float16)
    return stored


def dequantize_page(kind: CacheKind, part: Part, stored: Stored, head_dim: int, *, draft: bool = False) -> torch.Tensor:
    """Dequantize keys or values: D^ + L + S of the parts that are stored.

    Args:
        kind: The kind of cache.
        part: Keys or values.
        stored: The result of `quantize_page`, or some of GEAR's fields left out.
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
        vectors = vectors + _turned(code, low_rank_product(stored["a"], stored["b"]))
    if "indices" in stored:
        vectors = vectors.scatter_add(-1, stored["indices"].long(), stored["outliers"].float())
    return _turned(code, vectors)


def _turned(code: Code, x: torch.Tensor) -> torch.Tensor:
    """[..., T, D] as vectors, or vectors as [..., T, D]."""
    return x.mT if code.axis == "channel" else x


def _uniform(kind: CacheKind, code: Code, vectors: torch.Tensor, kept: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """D^ of vectors [..., V, n]: codes and scales. The outliers `kept` separately do not affect the scales."""
    bits = 4 if kind.hierarchical else code.bits
    groups = split(vectors, code.group)
    scales = scales_of(groups, bits, None if kept is None else split(kept, code.group))
    codes = encode(groups, scales, bits)
    if code.exact_mean:
        scales = with_exact_means(groups, codes, scales)
    if not kind.hierarchical:
        return {"codes": _packed(code, codes, vectors.shape[-1], bits), "scales": scales}
    lower = encode_lower(groups, codes, scales)
    return {
        "upper": _packed(code, codes, vectors.shape[-1], 4),
        "lower": _packed(code, (lower & 15).to(torch.uint8), vectors.shape[-1], 4),
        "scales": scales,
    }


def _packed(code: Code, codes: torch.Tensor, length: int, bits: int) -> torch.Tensor:
    """Codes [..., V, groups, group] as rows of tokens, packed: uint8 [..., T, D * bits / 8]."""
    return pack_codes(_turned(code, codes.flatten(-2)[..., :length]).contiguous(), bits)


def _read_uniform(kind: CacheKind, code: Code, stored: Stored, head_dim: int, *, draft: bool = False) -> torch.Tensor:
    """Dequantize codes and scales, as vectors float32 [..., V, n]."""

    def groups(name: str, bits: int) -> torch.Tensor:
        return split(_turned(code, unpack_codes(stored[name], bits, head_dim)), code.group)

    if not kind.hierarchical:
        read = decode(groups("codes", code.bits), stored["scales"])
    elif draft:
        read = decode(groups("upper", 4), stored["scales"])
    else:
        lower = groups("lower", 4).to(torch.int8)
        read = decode_both(groups("upper", 4), torch.where(lower > 7, lower - 16, lower), stored["scales"])
    length = head_dim if code.axis == "token" else next(iter(stored.values())).shape[-2]
    return read.flatten(-2)[..., :length]
