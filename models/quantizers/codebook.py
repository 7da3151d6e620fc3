"""Codebook quantization, the result of every non-uniform base method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.quantizers.groups import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookCodes:
    """Ŵ[n, k] = codebook[n, codes[n, k]] * scales[n, 0].

    The entries are whole numbers, so that integer arithmetic computes with exactly the values that are stored.
    """

    codes: npt.NDArray[np.uint8]
    """uint8 [N, K], each below 2^bits."""
    scales: npt.NDArray[np.float16]
    """float16 [N, 1], positive."""
    codebook: npt.NDArray[np.int8]
    """int8 [N, 2^bits], ascending in each row, in [-127, 127]."""

    def dequantize(self) -> FloatArray:
        """Ŵ as float32 [N, K]."""
        values = self.codebook.astype(np.float32) * self.scales.astype(np.float32)
        return np.take_along_axis(values, self.codes.astype(np.intp), axis=1)
