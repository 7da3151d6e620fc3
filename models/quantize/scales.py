"""Scales of channels, found before a block is rounded: AWQ's, and SmoothAttention's.

AWQ's enlarge important input channels before rounding and shrink their inputs. A channel's weights keep the rounding
step of their group, so multiplying them by s divides by s what their rounding does to the output, as long as the
group's range does not grow. What makes a channel matter is the magnitude m of its inputs, the root of its second
moment; u is how much of their group's range its weights use. Scales m^α and m^α / u^(1 - α) are tried for a grid of α,
among them no scaling at all, and the layer's output error decides, with round-to-nearest for the rounding.

SmoothAttention smooths key channels, which lose less in a low-bit KV cache. Keys tend to have a few channels much
larger than the rest, always the same ones. Where a token's key shares one scale over its channels, these take the range
and the others are rounded away. So every channel of the keys is divided by the root of its largest magnitude and the
queries' channel, which is not quantized, multiplied by it: their product stays the same.

Sources: Lin et al. 2024 (AWQ) §3.2 for m^α (with mean magnitudes); its code for normalization and for u. QServe §3.2,
equations 3 to 5, for SmoothAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.quantize.calibration import InputStatistics
from models.quantize.working import WorkingBlock, scalable, sources
from models.quantizers.groups import RATIOS, FloatArray, rtn
from models.recipe import Recipe
from models.spec import ModelSpec

GRID = 10
"""Values of α tried, 0 to 1 - 1 / GRID."""
MAX_ROWS, MAX_WEIGHTS = 256, 1 << 19
"""Output channels and weights whose errors are looked at; in wide matrices 32 output channels at least."""
_RATIOS = RATIOS[::4]
SMALLEST_SHARE = 1e-3
"""Minimum of a channel's m or u in units of the mean over channels, since a channel that is silent in the calibration
text may not be silent in others."""


def scale_block(
    working: WorkingBlock, statistics: Mapping[str, InputStatistics], recipe: Recipe, watch: Callable[[], None]
) -> None:
    found = {}
    for name, seen in statistics.items():
        kind = name.rpartition(".")[2]
        if not scalable(working.spec, kind):
            continue
        weight, _ = working.linear(name)
        part = weight[sample(*weight.shape)].numpy()
        try:
            found[kind] = search(part, seen, recipe.layer_bits(name), recipe.group_size, sources(working.spec, name))
        except QuantizationError as error:
            raise QuantizationError(f"{name}: {error}") from error
        watch()
    for kind, scales in found.items():
        working.scale_inputs(kind, scales)


def search(
    weight: FloatArray, statistics: InputStatistics, bits: int, group_size: int, tied: npt.NDArray[np.intp]
) -> FloatArray:
    """Find the scales of a linear layer's input channels.

    Args:
        weight: float32 [n, K], the output channels to judge by; see `sample`.
        statistics: Of the inputs, with second moments.
        bits: Width of a code.
        group_size: Input channels that share a scale and a zero-point.
        tied: [K]: channels with the same number get the same scale.

    Returns:
        float32 [K], positive; all ones where no scaling is better than any.
    """
    hessian = statistics.hessian
    assert hessian is not None
    best, least = np.ones(weight.shape[1], np.float32), np.inf
    for scales in _candidates(weight, np.sqrt(np.diagonal(hessian)), group_size, tied):
        error = rtn(weight * scales, bits, group_size, _RATIOS).dequantize()
        error /= scales
        error -= weight
        loss = float(np.vdot(error @ hessian, error))
        if loss < least:
            best, least = scales, loss
    return best


def sample(rows: int, width: int) -> npt.NDArray[np.intp]:
    """Output channels that are enough for `search`, from all over a matrix of so many rows and columns."""
    count = min(rows, MAX_ROWS, max(32, MAX_WEIGHTS // max(1, width)))
    return np.arange(count) * rows // max(1, count)


def _candidates(
    weight: FloatArray, magnitude: FloatArray, group_size: int, tied: npt.NDArray[np.intp]
) -> Iterator[FloatArray]:
    """The scales to try, none first. float32 [K] each, the largest times the smallest being 1."""
    inputs, use = _shared(magnitude, tied), _shared(_range_use(weight, group_size), tied)
    for power in (0.0, 1.0):  # of u
        for step in range(GRID):
            alpha = step / GRID
            scales = inputs**alpha / use ** (power * (1 - alpha))
            yield (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)


def _range_use(weight: FloatArray, group_size: int) -> FloatArray:
    """How much of its group's largest magnitude a channel's weights have, averaged over rows. float32 [K]."""
    share: FloatArray = np.abs(weight)
    for start in range(0, weight.shape[1], group_size):
        part = share[:, start : start + group_size]
        largest = part.max(1, initial=0, keepdims=True)
        part /= np.where(largest > 0, largest, 1)
    mean: FloatArray = share.mean(0)
    return mean


def _shared(values: FloatArray, tied: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Means over the channels that are tied, none below the smallest that counts. float64 [K]."""
    means = np.bincount(tied, values)[tied] / np.bincount(tied)[tied]
    mean = float(means.mean())
    return np.maximum(means, SMALLEST_SHARE * mean) if mean > 0 else np.ones(len(means))


ALPHA = 0.5
"""Power of a channel's magnitude that its keys are divided by."""
SMALLEST_SHARE = 1e-3
"""Minimum of a channel's magnitude in units of its head's largest, since a channel that is silent in the calibration
text may not be silent in others."""


def smooth_attention(working: WorkingBlock, magnitude: FloatArray) -> None:
    """Smooth the keys of a block.

    Args:
        working: The block; changed in place.
        magnitude: float32 [H_kv, D], the largest magnitude of each channel of the rotated keys in the calibration text.
    """
    if not np.isfinite(magnitude).all():
        raise QuantizationError(
            f"the full-precision model computes NaN or infinity in the keys of layers.{working.layer}; the checkpoint "
            "is damaged, or its numbers leave the range of its format"
        )
    working.scale_keys(smoothing(working.spec, magnitude))


def smoothing(spec: ModelSpec, magnitude: FloatArray) -> FloatArray:
    """Divisors of the key channels.

    Channels that rotate together get the same, so that scaling and rotation can change places; so do heads, where all
    share the weight of a norm. The largest times the smallest of a head is 1: the largest magnitude
    of keys does not grow, that of queries by less than 6 times.

    Args:
        spec: The architecture.
        magnitude: float32 [H_kv, D], finite, not negative.

    Returns:
        float32 [H_kv, D], positive; ones in a head whose keys are all zero.
    """
    paired = magnitude.astype(np.float64)
    before = np.zeros_like(paired)
    while not np.array_equal(before, paired):  # of two rotary widths, one may undo what the other has paired
        before = paired.copy()
        for half in {rope.rotary_dim // 2 for rope in spec.ropes}:
            paired[:, :half] = paired[:, half : 2 * half] = np.maximum(paired[:, :half], paired[:, half : 2 * half])
    if spec.qk_norm and spec.qk_norm_form != "all":
        paired[:] = paired.max(0)
    largest = paired.max(1, keepdims=True)
    share = np.maximum(paired / np.where(largest > 0, largest, 1), SMALLEST_SHARE)  # at most 1
    scales = share**ALPHA
    scales /= np.sqrt(scales.max(1, keepdims=True) * scales.min(1, keepdims=True))
    return scales.astype(np.float32)
