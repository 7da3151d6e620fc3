"""Panels: a matrix with its residuals added, in 8 bits; the CPU's arithmetic for many rows of a prompt.

Many rows share a matrix, so it is unpacked once for all of them, and the unpacked form can include the residuals. With
c a code, z its zero-point, s the scale of its group, r the code of its residual and t the scale of that, a weight is

    w = s (c - z) + t (r - 2^(bits-1))

and lies within an interval that s and t bound, whatever the codes: c in [0, top], r in [0, 2^bits - 1]. That interval
is cut into 254 steps. In fixed point, with A = round(256 s / step) and B = round(256 t / step),

    code = (A c + B r + 128 >> 8) - 127,    w ~ code * step + middle

so a weight takes two 16-bit products. Its error is half a step plus the rounding errors of A and B: under 0.1 of a step
at the usual widths, up to 0.8 with codebooks or 8-bit residuals. If t is small compared with s, a step is s / 36 at 3
bits and s / 17 at 4. With 4-bit residuals that cover the rounding error (t of s / 15 or more), it is at most t / 2 at 3
bits and t at 4.

For few rows a panel does not pay: they use a second product with the residual codes themselves (`restored`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear, PackedResidual
from models.packing import unpack

STEPS = 254
"""Steps of the interval: codes are from -127 to 127."""
MIN_STEP = 1e-30
"""Step of a group whose scales are zero; far below any step from float16 scales."""
ENTRY_TOP = 254
"""Largest code of a matrix with codebooks: an entry plus 127."""
HALVES_TOP = 127
"""Float16 residuals are rounded to 8-bit codes from -127 to 127."""

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The unpacked form of a matrix [N, K]."""

    codes: npt.NDArray[np.int8]
    """int8 [N, K], from -127 to 127."""
    steps: Float32Array
    """float32 [N, G]."""
    middles: Float32Array
    """float32 [N, G], value of code 0."""
    group_size: int
    """Channels per group."""

    def weights(self) -> Float32Array:
        """The dequantized weights, float32 [N, K]."""
        K = self.codes.shape[1]
        steps, middles = (np.repeat(part, self.group_size, axis=1)[:, :K] for part in (self.steps, self.middles))
        return (self.codes.astype(np.float32) * steps + middles).astype(np.float32)


def residual_scales(residual: PackedResidual) -> npt.NDArray[np.float16]:
    """The scale t of every output channel, float16 [N]; for float16 residuals max |R| / 127, rounded up."""
    if residual.scales is not None:
        return residual.scales
    largest = np.abs(residual.codes).max(axis=0).astype(np.float32)
    scales: npt.NDArray[np.float16] = (largest / HALVES_TOP).astype(np.float16)
    short = scales.astype(np.float32) * HALVES_TOP < largest
    scales[short] = np.nextafter(scales[short], np.float16(np.inf))
    return scales


def residual_codes(residual: PackedResidual, width: int) -> npt.NDArray[np.uint8]:
    """The code r of every residual.

    Args:
        residual: Residuals of a matrix with `width` output channels.
        width: N.

    Returns:
        uint8 [K, N]; float16 residuals get 8-bit codes.
    """
    if residual.bits != 16:
        return unpack(np.ascontiguousarray(residual.codes), residual.bits, width)
    scales = residual_scales(residual).astype(np.float32)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return (np.rint(residual.codes.astype(np.float32) * inverse) + 128).astype(np.uint8)


def panel(linear: PackedLinear, channels: npt.NDArray[np.integer]) -> Panel:
    """Build a panel from a matrix and the residuals of some input channels.

    Args:
        linear: The matrix, with residuals.
        channels: integer [k], the compensated channels, the same for all rows.
    """
    assert linear.residual is not None
    N, K = linear.shape
    bits = min(linear.residual.bits, 8)
    codes = unpack(np.ascontiguousarray(linear.codes), linear.bits, K).astype(np.int32)
    s, t = linear.scales.astype(np.float32), residual_scales(linear.residual).astype(np.float32)[:, None]
    if linear.codebook is not None:
        top, zeros = ENTRY_TOP, np.full_like(s, ENTRY_TOP // 2)
        codes = np.take_along_axis(linear.codebook.astype(np.int32), codes, axis=1) + ENTRY_TOP // 2
    else:
        assert linear.zeros is not None
        top, zeros = 2**linear.bits - 1, linear.zeros.astype(np.float32)
    r = np.full((N, K), 2 ** (bits - 1), np.int32)
    r[:, channels] = residual_codes(linear.residual, N).T[:, channels]
    one, half = np.float32, np.float32(0.5)
    steps = np.maximum((one(top) * s + one(2**bits - 1) * t) / one(STEPS), one(MIN_STEP))
    A, B = (np.rint(one(256) * scale / steps).astype(np.int32) for scale in (s, t))
    middles = (one(top) * half - zeros) * s - half * t
    spread = [np.repeat(np.broadcast_to(part, steps.shape), linear.group_size, axis=1)[:, :K] for part in (A, B)]
    if linear.codebook is not None:
        spread = [np.broadcast_to(part, (N, K)) for part in (A, B)]
        G = -(-K // linear.group_size)
        steps, middles = (np.repeat(part, G, axis=1) for part in (steps, middles))
    found = (spread[0] * codes + spread[1] * r + 128 >> 8) - 127
    return Panel(codes=found.astype(np.int8), steps=steps, middles=middles, group_size=linear.group_size)


def restored(linear: PackedLinear, channels: npt.NDArray[np.integer]) -> Float32Array:
    """The residuals of some input channels, as added for few rows: t (r - 2^(bits-1)).

    Args:
        linear: The matrix, with residuals.
        channels: integer [k], the compensated channels.

    Returns:
        float32 [N, K], zero in all other channels.
    """
    assert linear.residual is not None
    codes = residual_codes(linear.residual, linear.shape[0])[channels].astype(np.float32)
    neutral = np.float32(2 ** (min(linear.residual.bits, 8) - 1))
    found = np.zeros(linear.shape, np.float32)
    found[:, channels] = ((codes - neutral) * residual_scales(linear.residual).astype(np.float32)).T
    return found


def product(
    codes: npt.NDArray[np.int8], scales: Float32Array, weights: Panel, bias: Float32Array | None = None
) -> npt.NDArray[np.float64]:
    """Product of a panel with rows of INT8 activations.

    Args:
        codes: int8 [M, K], from `runtime.backends.operations.linear.quantize` with the panel's group size.
        scales: float32 [M, G].
        weights: The panel.
        bias: float32 [N] or None.

    Returns:
        float64 [M, N]; the integer sums are exact.
    """
    size = weights.group_size
    y = np.zeros((codes.shape[0], weights.codes.shape[0]))
    for g in range(scales.shape[1]):
        own = slice(g * size, (g + 1) * size)
        x = codes[:, own].astype(np.int64)
        dots = x @ weights.codes[:, own].astype(np.int64).T
        part = dots * weights.steps[:, g].astype(np.float64)
        part += x.sum(axis=1, keepdims=True) * weights.middles[:, g].astype(np.float64)
        y += part * scales[:, g : g + 1].astype(np.float64)
    return y if bias is None else y + bias
