"""Quantization of one weight matrix, piece by piece: a head of a billion weights needs no second copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models import trellis
from models.errors import QuantizationError
from models.packed import PackedLinear, PackedResidual
from models.packing import RUN, pack, packed_width
from models.quantize.calibration import InputStatistics
from models.quantizers import Codes, quantizer
from models.quantizers.groups import FloatArray
from models.quantizers.progressive import ProgressiveCodes, Rounding
from models.quantizers.residual import quantize_residual
from models.quantizers.squeezellm import CodebookCodes
from models.quantizers.trellis import TrellisCodes
from models.recipe import Recipe
from models.store.tensors import Array
from models.threads import each

_PIECE = 1 << 23
"""Weights handled at a time."""
_PART = 1 << 18
"""Weights that a thread packs at a time, so that they stay in the processor's cache."""


class MatrixQuantizer:
    """Fills the tensors of one linear layer, a piece of rows after the other.

    Args:
        name: The linear layer, for example `layers.0.qkv`.
        shape: (N, K).
        recipe: How to quantize.
        statistics: Of the layer's inputs, with second moments for a method that needs them.
        sensitivity: Of the loss to each weight [N, K], for a method that needs it.
        clips: Clip ratio of each row float32 [N], NaN where it is to be searched; for `qoq`.

    Raises:
        QuantizationError: the Hessian is missing or damaged.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        recipe: Recipe,
        statistics: InputStatistics,
        *,
        sensitivity: npt.NDArray[np.floating] | None = None,
        clips: FloatArray | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.recipe = recipe
        self.bits = recipe.layer_bits(name)
        try:
            self._quantize = quantizer(
                recipe.method,
                hessian=statistics.hessian,
                sensitivity=sensitivity,
                rounding=Rounding(two_levels=recipe.progressive, clip=recipe.clip, clips=clips),
            )
        except QuantizationError as error:
            raise QuantizationError(f"{name}: {error}") from error
        self._statistics = statistics
        self._restored = statistics.restored()
        rows, width = shape
        self._group_size = recipe.group_of(width)
        groups = -(-width // self._group_size) if recipe.uniform else 1
        self._codes = np.empty((rows, packed_width(width, self.bits)), np.int32)
        self._scales = np.empty((rows, 1 if recipe.progressive else groups), np.float16)
        self._group_scales = np.empty((rows, groups), np.uint8) if recipe.progressive else None
        self._zeros = np.empty((rows, groups), np.uint8) if recipe.uniform else None
        self._codebook = np.empty((rows, 2**self.bits), np.int8) if recipe.codebook else None
        self._residual: Array | None = None
        self._residual_scales: Array | None = None
        if recipe.residual_bits == 16:
            self._residual = np.empty((width, rows), np.float16)
        elif recipe.residual_bits:
            self._residual = np.empty((width, packed_width(rows, recipe.residual_bits)), np.int32)
            self._residual_scales = np.empty(rows, np.float16)

    def pieces(self) -> list[slice]:
        """Rows to hand to `add`, in order; all but the last hold a multiple of 32."""
        return _slices(*self.shape, _PIECE)

    def add(self, rows: slice, weight: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Quantize some rows.

        Args:
            rows: One of `pieces`.
            weight: Those rows, float32 [n, K].

        Returns:
            Ŵ of those rows, float32 [n, K], and R as it is stored, float32 [n, K], or None.
        """
        try:
            found = self._quantize(weight, rows, self.bits, self._group_size)
            dequantized = np.empty_like(weight)
            residual = None if self._residual is None else np.empty_like(weight)

            def keep(part: slice) -> None:
                own, there = _part(found, part), slice(rows.start + part.start, rows.start + part.stop)
                dequantized[part] = own.dequantize()
                self._keep(there, own)
                if residual is not None:
                    residual[part] = self._add_residual(there, weight[part] - dequantized[part])

            each(keep, _slices(len(weight), weight.shape[1], _PART))
        except QuantizationError as error:
            raise QuantizationError(f"{self.name}: {error}") from error
        return dequantized, residual

    def _keep(self, rows: slice, found: Codes) -> None:
        """Store codes, scales and what stands beside them."""
        self._scales[rows] = found.scales
        if isinstance(found, TrellisCodes):
            self._codes[rows] = trellis.pack(found.codes, self.bits)
            return
        self._codes[rows] = pack(found.codes, self.bits)
        if isinstance(found, CodebookCodes):
            assert self._codebook is not None
            self._codebook[rows] = found.codebook
        else:
            assert self._zeros is not None
            self._zeros[rows] = found.zeros
        if isinstance(found, ProgressiveCodes):
            assert self._group_scales is not None
            self._group_scales[rows] = found.group_scales

    def _add_residual(self, rows: slice, residual: FloatArray) -> FloatArray:
        bits = self.recipe.residual_bits
        assert self._residual is not None
        if self._residual_scales is None:
            self._residual[:, rows] = residual.T
            return residual
        quantized = quantize_residual(residual, bits, self._restored)
        words = pack(quantized.codes.T, bits)
        start = rows.start // RUN * bits
        self._residual[:, start : start + words.shape[1]] = words
        self._residual_scales[rows] = quantized.scales
        return quantized.dequantize()

    def finish(self, bias: torch.Tensor | None) -> PackedLinear:
        statistics = self._statistics
        keep = self.recipe.residual_bits > 0
        residual = None
        if self._residual is not None:
            residual = PackedResidual(
                bits=self.recipe.residual_bits, codes=self._residual, scales=self._residual_scales
            )
        return PackedLinear(
            name=self.name,
            shape=self.shape,
            bits=self.bits,
            group_size=self._group_size,
            codes=self._codes,
            scales=self._scales,
            zeros=self._zeros,
            codebook=self._codebook,
            group_scales=self._group_scales,
            per_token=self.recipe.per_token,
            trellis=self.recipe.trellis,
            bias=None if bias is None else bias.to(torch.float32).numpy(),
            residual=residual,
            rank_maximum=statistics.rank_maximum if keep else None,
            mean_square=statistics.mean_square() if keep else None,
        )


def _part(found: Codes, rows: slice) -> Codes:
    whole: Any = found
    arrays = {field.name: getattr(whole, field.name) for field in fields(whole)}
    part: Codes = replace(
        whole, **{name: array[rows] for name, array in arrays.items() if isinstance(array, np.ndarray)}
    )
    return part


def _slices(rows: int, width: int, weights: int) -> list[slice]:
    """Ranges of rows that are a multiple of 32 but for the last, with about so many weights each."""
    step = max(1, weights // max(1, width) // RUN) * RUN
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def quantize_matrix(
    name: str,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    statistics: InputStatistics,
    watch: Callable[[], None],
    sensitivity: npt.NDArray[np.floating] | None = None,
    clips: FloatArray | None = None,
) -> PackedLinear:
    """Quantize a whole linear layer.

    Args:
        name: The linear layer.
        weight: [N, K] in the checkpoint's dtype.
        bias: [N] or None.
        recipe: How to quantize.
        statistics: Of the layer's inputs.
        watch: Called after each piece; may raise to stop.
        sensitivity: Of the loss to each weight [N, K], for a method that needs it.
        clips: As of `MatrixQuantizer`.

    Raises:
        QuantizationError: a weight is NaN or infinite, or out of range, or the statistics lack what the method needs.
    """
    rows, width = weight.shape
    matrix = MatrixQuantizer(name, (rows, width), recipe, statistics, sensitivity=sensitivity, clips=clips)
    for piece in matrix.pieces():
        matrix.add(piece, weight[piece].to(torch.float32).numpy())
        watch()
    return matrix.finish(bias)


def stored_tensors(linear: PackedLinear) -> dict[str, Array]:
    residual = linear.residual
    arrays: dict[str, Array | None] = {
        "stream" if linear.trellis else "codes": linear.codes,
        "scales": linear.scales,
        "zeros": linear.zeros,
        "minimums": linear.minimums,
        "codebook": linear.codebook,
        "group_scales": linear.group_scales,
        "group_minimums": linear.group_minimums,
        "bias": linear.bias,
        "residual": None if residual is None else residual.codes,
        "residual_scales": None if residual is None else residual.scales,
        "rank_maximum": linear.rank_maximum,
        "mean_square": linear.mean_square,
    }
    return {f"{linear.name}.{kind}": array for kind, array in arrays.items() if array is not None}
