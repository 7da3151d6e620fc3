"""Channel budgets, buckets of the approximate top-k, and the selectors that do not read x.

Plain numpy, shared by every backend, so that all select the same channels from the same activations.

Source: QDEC §4.3, Fig. 8 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.spec import LAYER_KINDS as LAYER_KINDS
from runtime.compensation import CHUNK as CHUNK
from runtime.compensation import k_chunk_of as k_chunk_of
from runtime.compensation import layer_kind as layer_kind

BUCKETS = 32
"""Buckets of the approximate top-k, one per thread of a warp."""
HALF = BUCKETS // 2
"""Buckets below b15, and as many from b15 up."""


def chunk_budget(width: int, k_chunk: int) -> int:
    """Channels selected in a chunk of `width` channels: its share of k_chunk, rounded up.

    Args:
        width: Channels of the chunk, at most 1024.
        k_chunk: Salient channels of a full chunk, in [0, 1024].

    Returns:
        0 for k_chunk 0, else at least 1 and at most `width`.
    """
    return min(width, -(-k_chunk * width // CHUNK))


def chunk_budgets(width: int, k_chunk: int) -> tuple[int, ...]:
    """`chunk_budget` of every chunk of a matrix with `width` input channels."""
    return tuple(chunk_budget(min(CHUNK, width - start), k_chunk) for start in range(0, width, CHUNK))


def total_budget(width: int, k_chunk: int) -> int:
    """Total channels selected of `width` input channels: k, the sum over the chunks."""
    return sum(chunk_budgets(width, k_chunk))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Maps a magnitude |x| to one of 32 buckets; bucket 0 has the largest. All arithmetic is in float32.

    b15 and up: bucket max(0, 15 - floor((|x| - b15) * upper_scale)), so 0 from b0 up. Below b15: bucket max(16, 31 -
    floor(|x| * lower_scale)). The 31 boundaries b0 .. b30 of Fig. 9 are `boundaries`.
    """

    b0: float
    """Boundary of bucket 0: the largest magnitude of the whole calibration set."""
    b15: float
    """Lower boundary of bucket 15: the maximum over calibration tokens of the k-th largest magnitude."""
    upper_scale: float
    """Buckets per unit between b15 and b0: 15 / (b0 - b15), 0 where the two coincide."""
    lower_scale: float
    """Buckets per unit between 0 and b15: 16 / b15, 0 where b15 is 0."""

    @property
    def boundaries(self) -> npt.NDArray[np.float32]:
        """Float32 [31], descending: b0 .. b15 uniform, then b16 .. b30 uniform towards 0."""
        upper = np.linspace(self.b0, self.b15, HALF)
        lower = self.b15 * np.arange(HALF - 1, 0, -1) / HALF
        return np.concatenate([upper, lower]).astype(np.float32)


def buckets(rank_maximum: npt.NDArray[np.float32], k: int) -> Buckets:
    """The buckets for selecting k channels of a layer.

    Args:
        rank_maximum: float32 [K], descending: over calibration tokens, the maximum of the r-th largest magnitude.
        k: Channels selected in the whole matrix (`total_budget`), in [1, K].

    Returns:
        The buckets, with float32 values, so that every backend computes the same.
    """
    b0, b15 = np.float32(rank_maximum[0]), np.float32(rank_maximum[k - 1])
    tiny = np.finfo(np.float32).tiny
    upper = np.float32(HALF - 1) / (b0 - b15) if b0 - b15 > tiny else np.float32(0)
    lower = np.float32(HALF) / b15 if b15 > tiny else np.float32(0)
    return Buckets(b0=float(b0), b15=float(b15), upper_scale=float(upper), lower_scale=float(lower))


def _chunk_top(metric: npt.NDArray[np.floating], k_chunk: int) -> npt.NDArray[np.int32]:
    """Indices [k] of the largest metric of every chunk, ascending; ties go to the lowest index. int32."""
    chosen = []
    for start in range(0, metric.size, CHUNK):
        part = metric[start : start + CHUNK]
        best = np.argsort(-part, kind="stable")[: chunk_budget(part.size, k_chunk)]
        chosen.append(np.sort(best) + start)
    return np.concatenate(chosen).astype(np.int32)


def static_channels(mean_square: npt.NDArray[np.float32], k_chunk: int) -> npt.NDArray[np.int32]:
    """Static selection: the channels of each chunk with the largest mean square activation in calibration.

    The metric is E[x²], the diagonal of the Hessian of the layer's squared output error.

    Args:
        mean_square: float32 [K], mean of x² over calibration tokens.
        k_chunk: Salient channels per 1024.

    Returns:
        int32 [k], ascending.

    Source: QDEC §3.3, Fig. 16.
    """
    return _chunk_top(mean_square, k_chunk)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: a bijection of 64-bit integers with random-looking output. All sums wrap."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def random_keys(width: int, *, seed: int, layer: int, position: int) -> npt.NDArray[np.float64]:
    """Keys of the random selector: the channels with the largest keys of a chunk are selected.

    A counter-based generator: key[c] is the top 53 bits of mix(mix(mix(mix(seed) ^ layer) ^ position) ^ c), so a
    compiled backend computes it with a few integer operations and no state.

    Args:
        width: K.
        seed: `DecoderOptions.seed`; its low 64 bits count.
        layer: Index of the linear layer in `ModelSpec.linear_names`.
        position: Position of the row in its sequence.

    Returns:
        float64 [K] in [0, 1).
    """
    state = _mix(np.array([seed % 2**64], np.uint64))
    for counter in (layer, position):
        state = _mix(state ^ np.uint64(counter))
    keys = _mix(state ^ np.arange(width, dtype=np.uint64))
    return (keys >> np.uint64(11)).astype(np.float64) / 2**53


def random_channels(width: int, k_chunk: int, *, seed: int, layer: int, position: int) -> npt.NDArray[np.int32]:
    """Random selection for the ablation: every set of each chunk's share of channels is equally likely.

    The same seed, layer and position always give the same channels, on every backend and in any order of steps.

    Args:
        width: K.
        k_chunk: Salient channels per 1024.
        seed: See `random_keys`.
        layer: See `random_keys`.
        position: See `random_keys`.

    Returns:
        int32 [k], ascending.

    Source: QDEC Fig. 16.
    """
    return _chunk_top(random_keys(width, seed=seed, layer=layer, position=position), k_chunk)


def recall(x: npt.NDArray[np.float32], channels: npt.NDArray[np.integer]) -> float:
    """Share of the selected channels that are among the k = len(channels) largest magnitudes of the vector.

    Args:
        x: float32 [K], activations.
        channels: integer [k], the selected channels, distinct; k >= 1.

    Returns:
        In [0, 1]; channels of equal magnitude count alike.

    Source: QDEC Fig. 15.
    """
    magnitude = np.abs(x)
    threshold = np.partition(magnitude, x.size - channels.size)[x.size - channels.size]
    return float(np.count_nonzero(magnitude[channels] >= threshold) / channels.size)
