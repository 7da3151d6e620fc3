"""SqueezeLLM: one codebook for each output channel, its entries the weighted k-means of the channel's weights.

The error of a weight counts by the sensitivity of the loss to it. In one dimension cells are ranges of the sorted
weights, so a row is sorted once and every sum over a cell is a difference of two prefix sums:

1. The row is cut into short ranges of about equal importance, and the best partition of these into cells is found by
   dynamic programming.
2. Lloyd's iteration moves the cell borders on single weights until nothing changes.
3. The means become whole multiples of the row's scale, with as much of [-127, 127] used as the largest allows; weights
   take the nearest of them.

Source: Kim et al. 2024 (SqueezeLLM), §4.1; Panter and Dite 1951 for the importance of a range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.quantizers.codebook import CodebookCodes
from models.quantizers.groups import LARGEST_SCALE, FloatArray, to_fp16_scale
from models.quantizers.rows import each_chunk

TOP = 127
"""Largest absolute entry."""
FLOOR = 1e-3
"""Added to every sensitivity, in units of the row's mean: weights that the calibration never used count a little."""
_RANGES = 40
"""Ranges that a row is cut into for the dynamic programme."""
_ITERATIONS = 30
"""Most of Lloyd's iterations."""
_ROWS = 128
"""Rows worked on together."""

Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


def quantize(weight: FloatArray, sensitivity: npt.NDArray[np.floating[Any]], bits: int) -> CodebookCodes:
    """Quantize a matrix with a codebook for each row.

    Args:
        weight: float32 [N, K].
        sensitivity: [N, K], not negative: what a squared error of each weight costs, in any unit of each row's own.
        bits: Width of a code, 2 to 4.

    Raises:
        QuantizationError: a weight or sensitivity is NaN or infinite, or a scale would leave fp16's range.
    """
    rows, width = weight.shape
    result = CodebookCodes(
        codes=np.empty((rows, width), np.uint8),
        scales=np.empty((rows, 1), np.float16),
        codebook=np.empty((rows, 2**bits), np.int8),
    )

    def work(chunk: slice) -> None:
        for start in range(chunk.start, chunk.stop, _ROWS):
            part = slice(start, min(start + _ROWS, chunk.stop))
            _check(weight[part])
            importance = _importance(sensitivity[part])
            line = _Line.of(weight[part], importance)
            entries = _lloyd(line, line.means(_partition(line, 2**bits)))
            scales, whole = _to_whole(entries)
            result.scales[part] = scales
            result.codebook[part] = whole
            result.codes[part] = _nearest(weight[part], scales, whole)

    each_chunk(rows, width, work)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Sorted rows and what sums over ranges of them need. A place p in 0..K lies before the p-th smallest weight."""

    values: FloatArray
    """float32 [n, K]: the weights, ascending."""
    mass: Doubles
    """float64 [n, K + 1]: sum of the importance of the weights before each place."""
    moment: Doubles
    """float64 [n, K + 1]: sum of importance times weight before each place."""
    flat: Doubles
    """float64 [n * K]: all rows one after another in ascending order, row r moved to [4 r - 1, 4 r + 1]."""
    reach: Doubles
    """float64 [n, 1]: largest absolute weight, 1 where that is 0."""

    @classmethod
    def of(cls, weight: FloatArray, importance: npt.NDArray[np.float16]) -> _Line:
        """Sort the rows of a matrix [n, K] with their importance."""
        rows, width = weight.shape
        # A float32 leaves 29 bits of a float64 empty: the importance travels in them, so that one sort moves both.
        keys = (weight + np.float32(0)).astype(np.float64)
        keys.view(np.uint64)[...] |= importance.view(np.uint16)
        keys.sort(axis=1)
        sorted_importance = (keys.view(np.uint64) & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
        values = keys.astype(np.float32)
        mass, moment = np.zeros((rows, width + 1)), np.zeros((rows, width + 1))
        np.cumsum(sorted_importance, axis=1, out=mass[:, 1:])
        sorted_importance *= values
        np.cumsum(sorted_importance, axis=1, out=moment[:, 1:])
        reach = np.maximum(np.abs(values[:, :1]), np.abs(values[:, -1:])).astype(np.float64)
        reach[reach == 0] = 1
        flat = values / reach
        flat += 4.0 * np.arange(rows)[:, None]
        return cls(values=values, mass=mass, moment=moment, flat=flat.reshape(-1), reach=reach)

    def places(self, borders: Doubles) -> Places:
        """For each border [n, B] the place before the first weight above it, with 0 and K around: [n, B + 2]."""
        rows, width = self.values.shape
        lifted = np.clip(borders / self.reach, -1.5, 1.5) + 4.0 * np.arange(rows)[:, None]
        found = np.empty((rows, borders.shape[1] + 2), np.intp)
        found[:, 0], found[:, -1] = 0, width
        found[:, 1:-1] = np.searchsorted(self.flat, lifted, side="right") - width * np.arange(rows)[:, None]
        return found

    def sums(self, places: Places) -> tuple[Doubles, Doubles]:
        """Mass and moment between neighbouring places [n, B + 1], each [n, B]."""
        mass = np.take_along_axis(self.mass, places, axis=1)
        moment = np.take_along_axis(self.moment, places, axis=1)
        return mass[:, 1:] - mass[:, :-1], moment[:, 1:] - moment[:, :-1]

    def means(self, places: Places, without: Doubles | None = None) -> Doubles:
        """Mean of the weights between neighbouring places; of none, `without` or the weight at the place."""
        mass, moment = self.sums(places)
        if without is None:
            at = np.minimum(places[:, :-1], self.values.shape[1] - 1)
            without = np.take_along_axis(self.values, at, axis=1).astype(np.float64)
        return np.divide(moment, mass, out=without.copy(), where=mass > 0)


def _check(weight: FloatArray) -> None:
    largest = np.abs(weight).max(initial=0.0)
    if not np.isfinite(largest):
        raise QuantizationError("the weights hold NaN or infinity; the checkpoint is damaged")
    if largest / TOP > LARGEST_SCALE:
        raise QuantizationError(f"weights reach {largest:.3g}, too far for fp16 scales")


def _importance(sensitivity: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float16]:
    """Sensitivities above zero, with 1 for the largest of a row."""
    found = sensitivity.astype(np.float32)
    largest = found.max(1, initial=0.0, keepdims=True)
    if not np.isfinite(largest).all() or found.min(initial=0.0) < 0:
        raise QuantizationError("the sensitivities hold NaN, infinity or negative numbers")
    found /= np.where(largest > 0, largest, 1)
    found += np.maximum(FLOOR * found.mean(1, keepdims=True), 1e-6)
    shares: npt.NDArray[np.float16] = (found / found.max(1, keepdims=True)).astype(np.float16)
    return shares


def _partition(line: _Line, cells: int) -> Places:
    """Places that cut each row into cells, [n, cells + 1]: the best among cuts at the borders of ranges."""
    borders = _ranges(line)
    # Around the row's mean, so that gains are not small differences of large numbers.
    mass = np.take_along_axis(line.mass, borders, axis=1)
    moment = np.take_along_axis(line.moment, borders, axis=1)
    moment = moment - mass * (moment[:, -1:] / mass[:, -1:])
    # gain[n, i, j]: what one cell from border i to border j saves of the squared error around the mean.
    inside = mass[:, None, :] - mass[:, :, None]
    gain = np.square(moment[:, None, :] - moment[:, :, None])
    np.divide(gain, inside, out=gain, where=inside > 0)
    gain[inside <= 0] = 0
    count = borders.shape[1]
    gain[:, np.tri(count, k=-1, dtype=bool)] = -np.inf
    best = gain[:, 0]
    cuts = []
    for _ in range(cells - 1):
        sums = best[:, :, None] + gain
        cut = sums.argmax(1)
        cuts.append(cut)
        best = np.take_along_axis(sums, cut[:, None], axis=1)[:, 0]
    chosen = np.empty((len(borders), cells + 1), np.intp)
    chosen[:, 0], chosen[:, -1] = 0, count - 1
    for cell in range(cells - 1, 0, -1):
        chosen[:, cell] = np.take_along_axis(cuts[cell - 1], chosen[:, cell + 1 : cell + 2], axis=1)[:, 0]
    return np.take_along_axis(borders, chosen, axis=1)


def _ranges(line: _Line) -> Places:
    """Borders [n, R + 1] of ranges that matter about equally, 0 and K among them.

    An optimal quantizer's cells lie as dense as the cube root of the importance per length.
    """
    rows, width = line.values.shape
    count = min(_RANGES, width)
    step = np.diff(line.values.astype(np.float64), axis=1, append=line.values[:, -1:])
    share = np.cumsum(np.cbrt(np.diff(line.mass, axis=1) * step * step), axis=1)
    total = share[:, -1:]
    share = np.divide(share, total, out=np.zeros_like(share), where=total > 0)
    share += 2.0 * np.arange(rows)[:, None]
    wanted = np.linspace(0, 1, count + 1)[None, 1:-1] + 2.0 * np.arange(rows)[:, None]
    borders = np.empty((rows, count + 1), np.intp)
    borders[:, 0], borders[:, -1] = 0, width
    borders[:, 1:-1] = np.searchsorted(share.reshape(-1), wanted, side="right") - width * np.arange(rows)[:, None]
    return borders


def _lloyd(line: _Line, entries: Doubles) -> Doubles:
    """Entries [n, E] that are the means of the weights nearest to them."""
    before = None
    for _ in range(_ITERATIONS):
        places = line.places((entries[:, 1:] + entries[:, :-1]) / 2)
        if before is not None and np.array_equal(places, before):
            break
        entries = line.means(places, entries)
        before = places
    return entries


def _to_whole(entries: Doubles) -> tuple[FloatArray, npt.NDArray[np.int8]]:
    """Scales float32 [n, 1] holding fp16 numbers, and entries int8 [n, E] in these units."""
    largest = np.abs(entries).max(1, keepdims=True)
    scales = to_fp16_scale((largest / TOP).astype(np.float32))
    whole = np.clip(np.rint(entries / scales), -TOP, TOP)
    return scales, whole.astype(np.int8)


def _nearest(weight: FloatArray, scales: FloatArray, whole: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Code [n, K] of the entry nearest to each weight."""
    values = whole.astype(np.float32) * scales
    codes = np.zeros(weight.shape, np.uint8)
    above = np.empty(weight.shape, np.bool_)
    for border in ((values[:, 1:] + values[:, :-1]) / 2).T:
        np.greater(weight, border[:, None], out=above)
        codes += above.view(np.uint8)
    return codes
