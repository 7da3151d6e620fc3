"""A stored model's weights as the backends receive them, memory-mapped; matrices are packed by `models.packing`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from models.packing import packed_width
from models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedResidual:
    """The quantized residual R = W - Ŵ, input-channel-major: one input channel's values for all N outputs together.

    Source: QDEC §4.2.
    """

    bits: int
    """2, 4, 8, or 16 for half precision."""
    codes: npt.NDArray[np.int32] | npt.NDArray[np.float16]
    """int32 [K, ceil(N / 32) * bits] = [K, N] codes in canonical packing; value = (code - 2^(bits-1)) * scale[n].
    At 16 bits: float16 [K, N], the values themselves."""
    scales: npt.NDArray[np.float16] | None
    """float16 [N], one for each output channel; None at 16 bits."""


HALF_STEPS: npt.NDArray[np.int8] = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""The floating-point numbers of 4 bits by their codes, times two (OCP Microscaling Formats 1.0, §5.3.3)."""

E4M3_STEPS: npt.NDArray[np.int32] = np.array(
    [(-1) ** (code >> 7) * (code % 8 + 8 * (code & 120 > 0) << max(1, code >> 3 & 15)) for code in range(256)], np.int32
)
"""Those of 8 bits, times 1024, but for two codes that are no number (OCP 8-bit Floating Point 1.0, §5.2)."""

NOT_A_NUMBER = 255
"""A scale that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """One linear layer, uniform or with a codebook.

    Uniform: Ŵ[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] with g = k // group_size, or code[n, k] * scale[n, g] +
    minimum[n, g]; the last group of a row is shorter where group_size does not divide K. With a codebook: Ŵ[n, k] =
    codebook[n, code[n, k]] * scale[n, 0]. Progressive: Ŵ[n, k] = (code[n, k] - zero[n, g]) * group_scale[n, g] *
    scale[n, 0], whose first product is a whole number in [-127, 127]. Of two levels (llama.cpp's Q4_K and Q6_K):
    Ŵ[n, k] = code[n, k] * group_scale[n, g] * scale[n, s] + group_minimum[n, g] * minimum[n, s] with s = k // 256.
    Floating-point numbers: Ŵ[n, k] = `HALF_STEPS`[code[n, k]] * 2^(scale[n, g] - 128) (MXFP4), or
    `E4M3_STEPS`[code[n, k]] / 1024 * scale[n, g] (FP8).
    """

    name: str
    """For example `layers.3.qkv`."""
    shape: tuple[int, int]
    """(N, K)."""
    bits: int
    """3 or 4, of weights that were low-bit before also 5, 6 or 8."""
    group_size: int
    """Input channels that share a scale; a multiple of 32, or 16. With a codebook, those of an activation do."""
    codes: npt.NDArray[np.int32]
    """int32 [N, ceil(K / 32) * bits] = [N, K] unsigned codes in canonical packing."""
    scales: npt.NDArray[np.float16]
    """float16 [N, G], G = ceil(K / group_size); with a codebook, and progressive, [N, 1]; two levels: [N, K / 256].
    uint8 [N, G] of floating-point numbers of 4 bits: exponents plus 127; float32 [N, G] of those of 8 bits."""
    zeros: npt.NDArray[np.uint8] | None
    """uint8 [N, G], integer zero-points in [0, 2^bits); None with a codebook or minimums, and at 8 bits, where it is
    128."""
    minimums: npt.NDArray[np.float16] | None = None
    """float16, as scales, in place of zero-points; 4 or 5 bits, and of two levels."""
    codebook: npt.NDArray[np.int8] | None = None
    """int8 [N, 2^bits], ascending, in [-127, 127]; None where the matrix is uniform."""
    group_scales: npt.NDArray[np.uint8] | npt.NDArray[np.int8] | None = None
    """uint8 [N, G], in [1, 16], where the matrix is progressive; int8 [N, G] where it has two levels; else None."""
    group_minimums: npt.NDArray[np.int8] | None = None
    """int8 [N, G] where the matrix has two levels; else None."""
    trellis: bool = False
    """Whether the codes are streams of a trellis (`models.trellis`), with scales [N, 1]."""
    per_token: bool = False
    """Whether products are those of whole numbers, with activations in INT8 that have one scale a token."""
    bias: npt.NDArray[np.float32] | None
    """float32 [N] or None."""
    residual: PackedResidual | None
    """None when the recipe keeps no residuals."""
    rank_maximum: npt.NDArray[np.float32] | None
    """float32 [K]: for every rank r the maximum over calibration tokens of the r-th largest |x|, descending (QDEC §4.3:
    [0] is b0, [k - 1] is b15 for k channels). None when the recipe keeps no residuals."""
    mean_square: npt.NDArray[np.float32] | None
    """float32 [K]: mean of x² over calibration tokens, the static selector's metric. None as above."""

    @property
    def floats(self) -> bool:
        """Whether codes are those of floating-point numbers of 4 bits."""
        return self.scales.dtype == np.uint8

    @property
    def floats_8(self) -> bool:
        """The same of 8 bits."""
        return self.scales.dtype == np.float32

    @property
    def factors(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
        """Scales and minimums of the groups of a matrix without codebooks, float32 [N, G]; exact."""
        if self.floats:
            return np.ldexp(np.float32(1), self.scales.astype(np.int32) - 128), None
        if self.floats_8:
            return self.scales * np.float32(2.0**-10), None
        parts = (self.scales, self.group_scales), (self.minimums, self.group_minimums)
        scales, minimums = (_product(part, None if self.group_minimums is None else own) for part, own in parts)
        assert scales is not None
        return scales, minimums


def _product(
    values: npt.NDArray[np.float16] | None, of_groups: npt.NDArray[np.integer] | None
) -> npt.NDArray[np.float32] | None:
    if values is None or of_groups is None:
        return None if values is None else values.astype(np.float32)
    groups = of_groups.shape[1] // values.shape[1]
    return np.repeat(values.astype(np.float32), groups, axis=1) * of_groups.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """A low-bit matrix as a checkpoint stores it; groups are those of `models.recipe.KEPT_GROUPS`, or the checkpoint's.

    Q4_0: (code - 8) * scale; Q5_0: (code - 16) * scale; Q4_1 and Q5_1: code * scale + minimum; Q8_0: (code - 128) *
    scale; integers: (code - zero) * scale; Q4_K and Q6_K: code * group scale * scale + group minimum * minimum. A file
    has Q4_K's minimums without their sign, and none of Q6_K: there codes are 32 higher. MXFP4: see `PackedLinear`.
    """

    kind: str
    codes: npt.NDArray[np.uint8]
    """uint8 [N, K]."""
    scales: npt.NDArray[np.float16]
    """float16 [N, G], of either sign; [N, K / 256] of two levels; uint8 [N, G] of MXFP4; float32 [N, G] of FP8."""
    minimums: npt.NDArray[np.float16] | None = None
    """float16, as scales; None of integers, Q4_0, Q5_0 and Q8_0."""
    zeros: npt.NDArray[np.uint8] | None = None
    """uint8, as scales, of integers; else None."""
    group_scales: npt.NDArray[np.int8] | None = None
    """int8 [N, G] of two levels; else None."""
    group_minimums: npt.NDArray[np.int8] | None = None
    """Likewise."""


class SourceWeights(Protocol):
    """The source's own weights of a stored model."""

    def matrix(self, name: str) -> npt.NDArray[Any]:
        """A linear layer [N, K] by its name: float16, float32, or uint16, the bits of bfloat16."""
        ...


def rows_of(linear: PackedLinear, rows: slice) -> PackedLinear:
    """Some output channels of a matrix, as views of its arrays. `rows` starts at a multiple of 32."""
    residual = linear.residual
    if residual is not None:
        bits, scales = residual.bits, residual.scales
        columns = rows if scales is None else slice(packed_width(rows.start, bits), packed_width(rows.stop, bits))
        residual = PackedResidual(
            bits=bits, codes=residual.codes[:, columns], scales=None if scales is None else scales[rows]
        )
    return replace(
        linear,
        shape=(rows.stop - rows.start, linear.shape[1]),
        codes=linear.codes[rows],
        scales=linear.scales[rows],
        zeros=None if linear.zeros is None else linear.zeros[rows],
        minimums=None if linear.minimums is None else linear.minimums[rows],
        codebook=None if linear.codebook is None else linear.codebook[rows],
        group_scales=None if linear.group_scales is None else linear.group_scales[rows],
        group_minimums=None if linear.group_minimums is None else linear.group_minimums[rows],
        bias=None if linear.bias is None else linear.bias[rows],
        residual=residual,
    )


Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class KeyStatistics:
    """Of one block."""

    mean: Float32Array
    """float32 [H_kv, D]: the mean key of each head."""
    axis: Float32Array
    """float32 [H_kv, D], of length 1: the direction that the queries of a key-value head have most in common, the first
    eigenvector of their second moments."""


def tensor_names(layer: int) -> tuple[str, str]:
    return f"layers.{layer}.key_mean", f"layers.{layer}.query_axis"


def tensor_shape(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """Shape of both: [H_kv, D]."""
    heads = spec.heads_of(layer)
    return heads.kv_heads, heads.dim


class Weights(Protocol):
    """The weights of one model, by the names of `models.architecture`."""

    @property
    def spec(self) -> ModelSpec: ...

    def linear(self, name: str) -> PackedLinear:
        """A linear layer of `ModelSpec.linear_names`, packed."""
        ...

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm's weight, float32 [C] or [D], or a router's, float32 [E, C]."""
        ...

    @property
    def mtp(self) -> Weights | None:
        """The block that predicts a further token, as a model of its own (`models.mtp`); None: there is none."""
        return None

    def key_statistics(self, layer: int) -> KeyStatistics | None: ...

    def embedding(self) -> npt.NDArray[np.float16]:
        """The embedding table. float16 [V, C]."""
        ...

    def token_table(self) -> npt.NDArray[np.float16]:
        """Embeddings of the blocks' own, side by side. float16 [V, blocks * P]."""
        ...

    def expert_tokens(self, layer: int) -> npt.NDArray[np.int32]:
        """Calibration tokens that went to each expert of a block. int32 [held]."""
        ...

    def release(self) -> None:
        """Free the memory of what was read, as far as it can be read again; arrays stay valid."""
        ...
