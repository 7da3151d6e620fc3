"""Statistics of the calibration text: inputs of linear layers and experts, salient channels, keys and queries.

Compensation adds the residuals of each token's salient channels. Let x̃_k be x with the k salient channels of every
1024 set to 0. The remaining output error of a layer is (W - Ŵ) x̃_k. There is no single k: a prompt has no channel
compensated (or all), a small budget allows a few channels, a large one many. A base quantizer that minimizes the error
for x alone moves errors into channels that are later restored. One that minimizes it for x̃_k alone leaves the largest
channels unprotected; their errors then affect every prompt and inflate the scales of all residuals in a row. So base
quantizers minimize the sum over a few k (`levels`) of the remaining error, each relative to that of plain rounding: |(W
- Ŵ) x̃_k|² summed over tokens and divided by |x̃_k|² summed over tokens, because the errors of plain rounding have
about the same size in every channel.

Tokens differ as well, most of all the first one of a text. Its activations are thousands of times larger than usual in
a few layers and small in others, and it receives most of the attention (an attention sink), so that its keys and values
affect every output. It is also rare. So a token's weight is 1 plus the attention that it receives. A layer's
contribution to the residual stream is weighted relative to the stream's size at that token, because the next norm
divides by it.

All experts of a block read the same activations, so the choice of salient channels at `gate_up` follows from all
tokens; at `down` the ranks' maxima are those over all experts, and each expert has its own mean squares. Inputs are
kept, not their second moments: those of one expert alone are in memory at a time. An expert that the text hardly
reaches is rounded plainly, because error feedback would fit the few tokens it has seen, and takes the statistics of all
experts.

Sources: QDEC §4.3 (Fig. 9) for the rank maxima, §3.3 and Fig. 16 for the mean square; Frantar et al. 2023 (OPTQ) for
the Hessian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from models.errors import QuantizationError
from models.packed import KeyStatistics, tensor_names
from models.quantizers import SECOND_MOMENTS
from models.quantizers.groups import FloatArray
from models.recipe import Recipe
from models.spec import ModelSpec, expert_of, router_of
from models.threads import each

SALIENT_CHUNK = 1024
"""Input channels of one search for salient ones (QDEC §4.3); the last chunk of a matrix may be narrower."""


def levels(expected: int) -> tuple[int, ...]:
    """The k_chunk for which a model is optimized, ascending: 0, a quarter of the expected one, and all of it."""
    return tuple(sorted({0, -(-expected // 4), expected}))


def without_salient(x: FloatArray, k_chunk: int) -> FloatArray:
    """Activations with the channels set to 0 that compensation would restore.

    Args:
        x: float32 [T, K].
        k_chunk: Salient channels per 1024: this many of the largest magnitudes of each chunk become 0, and of a
            narrower chunk its share, rounded up. Equal magnitudes are treated alike.

    Returns:
        float32 [T, K]; `x` itself where k_chunk is 0.
    """
    (left,) = without_each(x, (k_chunk,))
    return left


def without_each(x: FloatArray, k_chunks: tuple[int, ...], ordered: FloatArray | None = None) -> list[FloatArray]:
    """`without_salient` for each of some k_chunk.

    Args:
        x: float32 [T, K].
        k_chunks: Salient channels per 1024, each as there.
        ordered: |x| float32 [T, K] with every row ascending, where that is known: a narrow matrix need not sort again.
    """
    if x.shape[1] > SALIENT_CHUNK:
        ordered = None
    found = [np.empty_like(x) if k_chunk else x for k_chunk in k_chunks]
    for start in range(0, x.shape[1], SALIENT_CHUNK):
        part = x[:, start : start + SALIENT_CHUNK]
        magnitudes = np.abs(part)
        width = part.shape[1]
        # Sorting is faster than numpy's partition at more than one place.
        sizes = np.sort(magnitudes, axis=1) if ordered is None else ordered
        for left, k_chunk in zip(found, k_chunks, strict=True):
            if k_chunk:
                place = width - -(-width * k_chunk // SALIENT_CHUNK)
                np.multiply(part, magnitudes < sizes[:, place, None], out=left[:, start : start + SALIENT_CHUNK])
    return found


_CHUNK = 1 << 19
"""Activations processed at a time per thread."""
_HESSIAN_ROWS = 256
"""Rows of second moments computed at a time, right of the diagonal; the rest follows from symmetry."""
_RESTORED_FLOOR = np.float32(0.1)
"""Added to every channel's restored share, in units of the mean, because other texts restore other channels."""


@dataclass(slots=True)
class InputStatistics:
    """Running statistics of the inputs x [T, K] of one linear layer."""

    rank_maximum: FloatArray
    """float32 [K]: for every rank r the maximum over tokens of the r-th largest |x|, descending."""
    square_sum: npt.NDArray[np.float64]
    """float64 [K]: sum of x² over tokens."""
    restored_sum: npt.NDArray[np.float64]
    """float64 [K]: sum of x² over the tokens at which the channel is among those expected to be restored."""
    moments: FloatArray | None = None
    """float32 [K, K]: what `hessian` is right of the diagonal, and in blocks on it; None if it is not gathered."""
    products: torch.dtype | None = None
    """Of the products that are summed up there; None: float32."""
    expected_k_chunk: int = 0
    """Salient channels per 1024 that compensation is expected to restore."""
    shares: tuple[float, ...] | None = None
    """The weight of each level in the Hessian; found from the first tokens."""
    tokens: int = 0

    @classmethod
    def empty(
        cls, width: int, *, second_moments: bool = False, products: torch.dtype | None = None, expected_k_chunk: int = 0
    ) -> InputStatistics:
        """Statistics of no tokens.

        Args:
            width: K.
            second_moments: Whether to gather the Hessian too, 4 K² bytes.
            products: As the field.
            expected_k_chunk: Salient channels per 1024 that compensation is expected to restore.
        """
        return cls(
            rank_maximum=np.zeros(width, np.float32),
            square_sum=np.zeros(width, np.float64),
            restored_sum=np.zeros(width, np.float64),
            moments=np.zeros((width, width), np.float32) if second_moments else None,
            products=products,
            expected_k_chunk=expected_k_chunk,
        )

    def add(self, x: FloatArray, name: str, counts: FloatArray | None = None) -> None:
        """Add activations.

        Args:
            x: float32 [..., K].
            name: The linear layer, for the error.
            counts: float32 [...], not negative: the weight of a squared error at each token, for the Hessian and for
                restored channels; None for equal weights.
        """
        rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
        step = max(1, _CHUNK // max(1, rows.shape[1]))
        parts = [slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]
        k_chunks = levels(self.expected_k_chunk)
        if self.moments is None:  # what is restored is all that is asked for
            k_chunks = tuple(sorted({0, self.expected_k_chunk}))
        weights = None if counts is None else np.sqrt(counts.reshape(-1))

        def look(part: slice) -> tuple[FloatArray, npt.NDArray[np.float64], list[FloatArray]]:
            own = rows[part]
            magnitudes = np.abs(own)
            magnitudes.sort(axis=1)
            squares = np.einsum("tk,tk->k", own, own).astype(np.float64)
            left = without_each(own, k_chunks, magnitudes) if self.expected_k_chunk or self.moments is not None else []
            if weights is not None:
                left = [level * weights[part, None] for level in left]
            return magnitudes.max(0)[::-1], squares, left

        pieces: list[list[FloatArray]] = []
        for part, (maximum, squares, left) in zip(parts, each(look, parts), strict=True):
            if not np.isfinite(maximum[0]):  # NaN sorts last
                raise QuantizationError(
                    f"the full-precision model computes NaN or infinity before {name}; the checkpoint is damaged, "
                    "or its values exceed the range of its format"
                )
            np.maximum(self.rank_maximum, maximum, out=self.rank_maximum)
            self.square_sum += squares
            pieces.append(left)
            self.tokens += part.stop - part.start
        if pieces and pieces[0]:
            # One level at a time, so that little more than one is in memory twice.
            self._add_left([np.concatenate([piece.pop(0) for piece in pieces]) for _ in k_chunks])

    def _add_left(self, left: list[FloatArray]) -> None:
        """Add the activations float32 [t, K] that remain at each level; the first level keeps all."""
        energies = [np.einsum("tk,tk->k", level, level).astype(np.float64) for level in left]
        self.restored_sum += energies[0] - energies[-1]
        if self.moments is None:
            return
        if self.shares is None:
            totals = [float(energy.sum()) for energy in energies]
            self.shares = tuple(totals[0] / total if total > 0 else 0.0 for total in totals)
        moments = torch.from_numpy(self.moments)
        operands = [torch.from_numpy(level).to(self.products or torch.float32) for level in left]
        for start in range(0, len(moments), _HESSIAN_ROWS):
            rows = slice(start, start + _HESSIAN_ROWS)
            for x, share in zip(operands, self.shares, strict=True):
                moments[rows, start:].add_(x[:, rows].T @ x[:, start:], alpha=share)

    @property
    def hessian(self) -> FloatArray | None:
        """float32 [K, K]: second moments of x and of x without its salient channels, see `models.quantize.calibration`.

        It is the Hessian of what base quantizers minimize, but for a factor.
        """
        if self.moments is not None:
            for start in range(0, len(self.moments), _HESSIAN_ROWS):
                end = start + _HESSIAN_ROWS
                self.moments[end:, start:end] = self.moments[start:end, end:].T
        return self.moments

    def mean_square(self) -> FloatArray:
        """float32 [K]: mean of x² over tokens."""
        return (self.square_sum / max(1, self.tokens)).astype(np.float32)

    def restored(self) -> FloatArray | None:
        """float32 [K]: expected restored share of each channel, 1 on average; None if nothing is restored."""
        mean = self.restored_sum.mean() if len(self.restored_sum) else 0.0
        if not mean > 0:
            return None
        found: FloatArray = (self.restored_sum / mean).astype(np.float32)
        return found + _RESTORED_FLOOR


FEWEST_TOKENS = 16
"""Calibration tokens below which an expert is rounded plainly: without second moments."""


def reached(tokens: int) -> bool:
    """Whether so many calibration tokens are enough to know an expert's inputs."""
    return tokens >= FEWEST_TOKENS


class ExpertInputs:
    """The inputs of the experts of one block."""

    def __init__(self, spec: ModelSpec, layer: int, recipe: Recipe) -> None:
        assert spec.mixture is not None
        self._recipe = recipe
        self._router = router_of(layer)
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(spec.mixture.num_experts)]
        self._inside: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(spec.mixture.num_experts)]
        self._whole = {
            "gate_up": InputStatistics.empty(spec.hidden_size, expected_k_chunk=recipe.left_out),
            "down": InputStatistics.empty(spec.mixture.width, expected_k_chunk=recipe.left_out),
        }

    def add(
        self,
        inputs: Mapping[str, torch.Tensor],
        rows: Mapping[str, torch.Tensor],
        counts: torch.Tensor,
        added: torch.Tensor,
    ) -> None:
        """Take in a batch.

        Args:
            inputs: Float32, by the name of the layer that reads them: the router's [B, S, C], each expert's [n, K].
            rows: int64 [n], the rows of the batch that an expert's layer reads, by its name.
            counts: float32 [B * S], how much a squared error of a token's activations weighs.
            added: float32 [B * S], how much one of what a token adds to the residual stream weighs.
        """
        whole = inputs[self._router].flatten(0, -2)
        self._whole["gate_up"].add(whole.numpy(), self._router, counts.numpy())
        for name, own in rows.items():
            expert, kind = _expert_of(name), name.rpartition(".")[2]
            if kind == "gate_up":
                self._rows[expert].append((len(self._batches), own))
            else:
                self._whole["down"].add(inputs[name].numpy(), name, added[own].numpy())
                self._inside[expert].append((inputs[name], added[own]))
        self._batches.append((whole, counts))

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [held]: the tokens that reached each expert."""
        return np.array([sum(len(own) for _, own in parts) for parts in self._rows], np.int32)

    def statistics(self, name: str) -> tuple[InputStatistics, Recipe]:
        """Statistics at the input of an expert's layer, and the recipe to quantize it by."""
        expert, kind = _expert_of(name), name.rpartition(".")[2]
        whole = self._whole[kind]
        if not reached(int(self.tokens[expert])):
            if self._recipe.trellis:
                return replace(whole, moments=np.eye(len(whole.rank_maximum), dtype=np.float32)), self._recipe
            return whole, replace(self._recipe, method="rtn")
        own = InputStatistics.empty(
            len(whole.rank_maximum),
            second_moments=self._recipe.method in SECOND_MOMENTS,
            expected_k_chunk=self._recipe.left_out,
        )
        for x, counts in self._parts(expert, kind):
            own.add(x.numpy(), name, counts.numpy())
        own.rank_maximum = whole.rank_maximum
        if kind == "gate_up":
            own.square_sum, own.tokens = whole.square_sum, whole.tokens
        return own, self._recipe

    def _parts(self, expert: int, kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if kind == "down":
            return self._inside[expert]
        return [(self._batches[at][0][own], self._batches[at][1][own]) for at, own in self._rows[expert]]


def _expert_of(name: str) -> int:
    expert = expert_of(name)
    assert expert is not None
    return expert


class KeyMoments:
    """First moments of a block's keys and second moments of its queries, over the calibration text."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        self.layer = layer
        self._count = 0
        heads = spec.heads_of(layer)
        self._keys = torch.zeros(heads.kv_heads, heads.dim, dtype=torch.float64)
        self._queries = torch.zeros(heads.kv_heads, heads.dim, heads.dim, dtype=torch.float64)

    def observe(self, _layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Count a batch: float32 [B, H, S, D] and [B, H_kv, S, D], rotated. See `models.oracle.KeyObserver`."""
        H_kv, D = self._keys.shape
        shared = queries.transpose(0, 1).reshape(H_kv, -1, D)  # all that meet the keys of a head
        self._queries += (shared.mT @ shared).to(torch.float64)
        self._keys += keys.sum((0, 2), dtype=torch.float64)
        self._count += keys.shape[0] * keys.shape[2]

    def statistics(self) -> KeyStatistics:
        """What was found; one batch at least was counted."""
        if not (torch.isfinite(self._keys).all() and torch.isfinite(self._queries).all()):
            raise QuantizationError(
                f"the full-precision model computes NaN or infinity in the keys or queries of layers.{self.layer}; the "
                "checkpoint is damaged, or its numbers leave the range of its format"
            )
        axis = torch.linalg.eigh(self._queries).eigenvectors[..., -1]
        return KeyStatistics(_float32(self._keys / self._count), _float32(axis))

    def tensors(self) -> dict[str, FloatArray]:
        """The tensors to be stored; none without calibration text."""
        if not self._count:
            return {}
        found = self.statistics()
        return dict(zip(tensor_names(self.layer), (found.mean, found.axis), strict=True))


def _float32(x: torch.Tensor) -> FloatArray:
    return np.ascontiguousarray(x.to(torch.float32).numpy())
