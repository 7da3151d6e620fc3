"""Round-to-nearest with clip search: the simplest base quantizer, which uses only the weights.

The range of every group is shrunk by each ratio of a grid; the ratio wins whose squared errors, weighted by the size of
the weights (`models.quantizers.groups.by_size`), are the least.
"""

from __future__ import annotations

from models.quantizers.groups import RATIOS, FloatArray, GroupCodes, round_to_grid, search


def quantize(weight: FloatArray, bits: int, group_size: int, ratios: tuple[float, ...] = RATIOS) -> GroupCodes:
    """Quantize a matrix in groups along its input channels.

    Args:
        weight: float32 [N, K].
        bits: Width of a code, 2 to 8.
        group_size: Input channels that share a scale.
        ratios: Shrink ratios to try.

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    scales, zeros = search(weight, None, bits, group_size, ratios)
    return round_to_grid(weight, scales, zeros, bits, group_size)
