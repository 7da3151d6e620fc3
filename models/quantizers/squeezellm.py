"""SqueezeLLM: one codebook for each output channel, its entries the weighted k-means of the channel's weights.

The error of a weight counts by the sensitivity of the loss to it. In one dimension cells are ranges of the sorted
weights, so a row is sorted once and every sum over a cell is a difference of two prefix sums:

1. Cells are begun where an optimal quantizer of many entries would have them.
2. Dynamic programming finds the best borders among some places between each border's neighbours, twice.
3. Lloyd's iteration moves the borders by single weights until nothing changes.
4. The means become whole multiples of the row's scale, and weights take the nearest of them.

The error is within 0.1 % of the least there is (found by dynamic programming over all weights) on average, at 4 bits
1 % with whole entries.

Source: Kim et al. 2024 (SqueezeLLM), §4.1; Panter and Dite 1951 for the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.quantizers.groups import LARGEST_SCALE, FloatArray, to_fp16_scale
from models.threads import CHUNK, each_chunk


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


TOP = 127
"""Largest absolute entry."""
FLOOR = 1e-3
"""Added to every sensitivity, in units of the row's mean: weights that the calibration never used count a little."""
SHARED = 0.3
"""How much of a weight's importance is that of its input channel: evens out what few calibration tokens leave to chance
(KL divergence from full precision 0 to 4 % lower at 3 bits, 0 to 5 % at 4, on models of 0.3 to 3 million weights)."""
_CANDIDATES = 32
"""Places that the dynamic programme tries for each border of a cell."""
_ROUNDS = 2
"""How often it does."""
_SCALES = 16
"""Scales tried for the entries of a row."""
_ITERATIONS = 30
"""Most of Lloyd's iterations."""
_SMALLEST = np.float16(1e-6)
"""Least importance of a weight."""
_ROWS = 128
"""Rows worked on together."""

Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


def channel_importance(sensitivity: npt.NDArray[np.floating[Any]]) -> FloatArray:
    """Mean importance of each input channel, float32 [K], where that of each row of [N, K] is 1 on average."""
    rows, width = sensitivity.shape
    total = np.zeros(width)
    step = max(1, CHUNK // max(1, width))
    for start in range(0, rows, step):
        total += _even(sensitivity[start : start + step]).sum(0, dtype=np.float64)
    mean: FloatArray = (total / max(1, rows)).astype(np.float32)
    return mean


def quantize(
    weight: FloatArray, sensitivity: npt.NDArray[np.floating[Any]], bits: int, channels: FloatArray | None = None
) -> CodebookCodes:
    """Quantize a matrix with a codebook for each row.

    Args:
        weight: float32 [N, K].
        sensitivity: [N, K], not negative: what a squared error of each weight costs, in any unit of each row's own.
        bits: Width of a code, 2 to 4.
        channels: From `channel_importance` of the whole layer, to be mixed in; None to take the sensitivities alone.
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
            importance = _importance(sensitivity[part], channels)
            line = _Line.of(weight[part], importance)
            places = _start(line, 2**bits)
            for _ in range(_ROUNDS):
                places = _improve(line, places)
            entries, mass = _lloyd(line, line.means(places))
            scales, integers = _to_integers(entries, mass)
            result.scales[part] = scales
            result.codebook[part] = integers
            result.codes[part] = _nearest(weight[part], scales, integers)

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


def _importance(sensitivity: npt.NDArray[np.floating[Any]], channels: FloatArray | None) -> npt.NDArray[np.float16]:
    """Importance of each weight, above zero, with 1 for the largest of a row."""
    found = _even(sensitivity)
    if channels is not None:
        found *= 1 - SHARED
        found += SHARED * channels
    found += FLOOR
    shares: npt.NDArray[np.float16] = (found / found.max(1, keepdims=True)).astype(np.float16)
    return np.maximum(shares, _SMALLEST)


def _even(sensitivity: npt.NDArray[np.floating[Any]]) -> FloatArray:
    """Sensitivities float32 [n, K] that are 1 on average in each row; rows of zeros stay so."""
    found: FloatArray = sensitivity.astype(np.float32)
    largest = found.max(1, initial=0.0, keepdims=True)
    if not np.isfinite(largest).all() or found.min(initial=0.0) < 0:
        raise QuantizationError("the sensitivities hold NaN, infinity or negative numbers")
    found /= np.where(largest > 0, largest, 1)
    found /= np.where(largest > 0, found.mean(1, keepdims=True), 1)
    return found


def _start(line: _Line, cells: int) -> Places:
    """Places [n, cells + 1] that cut each row into cells of about equal importance.

    An optimal quantizer's entries lie as dense as the cube root of the importance per length. A fourth root is two
    square roots; what it is off by is nothing to what `_improve` moves.
    """
    rows, width = line.values.shape
    share = np.zeros((rows, width))
    np.subtract(line.values[:, 1:], line.values[:, :-1], out=share[:, 1:])
    share *= share
    share *= np.diff(line.mass, axis=1)
    np.sqrt(np.sqrt(share, out=share), out=share)
    np.cumsum(share, axis=1, out=share)
    total = share[:, -1:]
    np.divide(share, total, out=share, where=total > 0)
    share += 2.0 * np.arange(rows)[:, None]
    wanted = np.linspace(0, 1, cells + 1)[None, 1:-1] + 2.0 * np.arange(rows)[:, None]
    places = np.empty((rows, cells + 1), np.intp)
    places[:, 0], places[:, -1] = 0, width
    places[:, 1:-1] = np.searchsorted(share.reshape(-1), wanted, side="right") - width * np.arange(rows)[:, None]
    return places


def _improve(line: _Line, places: Places) -> Places:
    """The best cut of each row where every border may move as far as the two next to it, in `_CANDIDATES` steps.

    Args:
        line: The rows.
        places: [n, cells + 1], among the candidates themselves.
    """
    rows, width, cells = *line.values.shape, places.shape[1] - 1
    steps = np.arange(_CANDIDATES)
    candidates = np.empty((rows, cells + 1, _CANDIDATES), np.intp)
    candidates[:, 0], candidates[:, -1] = 0, width
    low, high = places[:, :-2, None], places[:, 2:, None]
    candidates[:, 1:-1] = low + (high - low) * steps // (_CANDIDATES - 1)
    candidates[:, 1:-1, 0] = places[:, 1:-1]
    mass, moment = _around_mean(line, candidates)
    best = np.zeros((_CANDIDATES, rows), np.float32)
    bests = [best]
    for cell in range(cells):
        gain = _gain(mass[cell], moment[cell], mass[cell + 1], moment[cell + 1])
        gain += best[:, None]
        best = gain.max(0)
        bests.append(best)
    # Back from the end: which candidate of the border before led to the best is found again, for the one chosen only.
    found = places.copy()
    at = np.zeros((1, rows), np.intp)
    for cell in range(cells - 1, 0, -1):
        chosen_mass = np.take_along_axis(mass[cell + 1], at, axis=0)
        chosen_moment = np.take_along_axis(moment[cell + 1], at, axis=0)
        gain = _gain(mass[cell], moment[cell], chosen_mass, chosen_moment)[:, 0]
        at = (gain + bests[cell]).argmax(0)[None]
        found[:, cell] = np.take_along_axis(candidates[:, cell], at.T, axis=1)[:, 0]
    return found


def _around_mean(line: _Line, places: Places) -> tuple[FloatArray, FloatArray]:
    """Mass and moment before places [n, B, S], as shares and around each row's mean: float32 [B, S, n] each.

    Rows come last, so that every operation runs over many of them; around the mean, gains are not small differences of
    large numbers.
    """
    flat = places.reshape(len(places), -1)
    total = line.mass[:, -1:]
    mass = np.take_along_axis(line.mass, flat, axis=1) / total
    moment = np.take_along_axis(line.moment, flat, axis=1) / total
    moment -= mass * (line.moment[:, -1:] / total)
    moment /= line.reach
    shape = (*places.shape[1:], len(places))
    return mass.T.astype(np.float32).reshape(shape), moment.T.astype(np.float32).reshape(shape)


def _gain(mass: FloatArray, moment: FloatArray, next_mass: FloatArray, next_moment: FloatArray) -> FloatArray:
    """What one cell from each candidate [S, n] to each of the next border's [Z, n] saves of the squared error.

    Returns:
        float32 [S, Z, n]; -inf where the cell would end before it begins.
    """
    inside = next_mass - mass[:, None]
    gain: FloatArray = next_moment - moment[:, None]
    gain *= gain
    backwards = inside < 0
    np.maximum(inside, np.float32(1e-30), out=inside)
    gain /= inside
    np.copyto(gain, -np.inf, where=backwards)
    return gain


def _lloyd(line: _Line, entries: Doubles) -> tuple[Doubles, Doubles]:
    """Entries [n, E] that are the means of the weights nearest to them, and the importance [n, E] of these."""
    places = line.places((entries[:, 1:] + entries[:, :-1]) / 2)
    for _ in range(_ITERATIONS):
        entries = line.means(places, entries)
        before, places = places, line.places((entries[:, 1:] + entries[:, :-1]) / 2)
        if np.array_equal(places, before):
            break
    return entries, line.sums(places)[0]


def _to_integers(entries: Doubles, mass: Doubles) -> tuple[FloatArray, npt.NDArray[np.int8]]:
    """The scale that moves entries least when they become whole multiples of it.

    Args:
        entries: [n, E], the means of cells.
        mass: [n, E], importance of the weights in each cell.

    Returns:
        Scales float32 [n, 1] holding fp16 numbers, and entries int8 [n, E] in these units.
    """
    smallest = np.abs(entries).max(1, keepdims=True) / TOP
    best_scale = np.empty(smallest.shape, np.float32)
    best_error = np.full(smallest.shape, np.inf)
    for trial in range(_SCALES):
        scale = to_fp16_scale((smallest * (1 + 0.25 * trial / _SCALES)).astype(np.float32))
        moved = np.clip(np.rint(entries / scale), -TOP, TOP) * scale - entries
        error = (mass * moved * moved).sum(1, keepdims=True)
        better = error < best_error
        best_error[better] = error[better]
        best_scale[better] = scale[better]
    return best_scale, np.clip(np.rint(entries / best_scale), -TOP, TOP).astype(np.int8)


def _nearest(weight: FloatArray, scales: FloatArray, whole: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Code [n, K] of the entry nearest to each weight."""
    values = whole.astype(np.float32) * scales
    codes = np.zeros(weight.shape, np.uint8)
    above = np.empty(weight.shape, np.bool_)
    for border in ((values[:, 1:] + values[:, :-1]) / 2).T:
        np.greater(weight, border[:, None], out=above)
        codes += above.view(np.uint8)
    return codes
