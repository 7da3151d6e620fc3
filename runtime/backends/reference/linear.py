"""Linear layer of the reference backend: dequantized at load, with error compensation per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from models import per_token
from models.packed import PackedLinear
from runtime.backends.decoder import CompensationMode, DecoderOptions
from runtime.backends.operations import channels as budget
from runtime.backends.operations.compensation import (
    approximate,
    compensate,
    compensate_shared,
    dequantize_residual,
    exact,
)
from runtime.backends.operations.linear import dequantize, gemm_w4a8, gemv, integer_weights
from runtime.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByRow:
    """Selection of each row's own channels."""

    k_chunk: int
    """Channels per 1024; 0 = none."""
    buckets: budget.Buckets | None = None
    """Buckets of the approximate selection."""
    static: torch.Tensor | None = None
    """int64 [k], channels of the static selection."""


class ReferenceLinear:
    """One linear layer in float32.

    Raises:
        RequestError: compensation is asked for, and the model keeps no residuals.
    """

    def __init__(self, packed: PackedLinear, index: int, options: DecoderOptions) -> None:
        self._width = packed.shape[1]
        self._index = index
        self._by_rows = budget.layer_kind(packed.name) == "head"  # for prompts as well
        self._options = options
        self._weight = integer_weights(packed) if packed.per_token else dequantize(packed)
        self.bias = None if packed.bias is None else torch.from_numpy(np.array(packed.bias, np.float32))
        """float32 [N], or None."""
        self._packed = packed
        self._residual: torch.Tensor | None = None
        self.recall_sum = 0.0
        """Sum of the recall of all selections."""
        self.selections = 0
        """Number of selections measured so far."""
        self._shared: torch.Tensor | None = None
        self.set_k_chunk(options.k_chunk)
        self.set_draft_k_chunk(options.draft_k_chunk)
        self.set_prompt_k_chunk(options.prompt_k_chunk)

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int) -> None:
        """Change the compensation of decoded rows.

        Raises:
            RequestError: compensation was requested for a model without residuals.
        """
        self._rows = self._by_row(k_chunk, "k_chunk")

    def set_draft_k_chunk(self, k_chunk: Mapping[str, int] | int) -> None:
        """Change the compensation of drafted rows.

        Raises:
            RequestError: compensation was requested for a model without residuals.
        """
        self._drafted = self._by_row(k_chunk, "k_chunk of drafts")

    def set_prompt_k_chunk(self, prompt_k_chunk: Mapping[str, int] | int) -> None:
        """Change the shared compensation of prompt rows.

        Raises:
            RequestError: compensation was requested for a model without residuals.
        """
        k_chunk = budget.k_chunk_of(prompt_k_chunk, self._packed.name)
        self._in_prompts, self._shared = k_chunk > 0, None
        if k_chunk:
            _, mean_square = self._statistics(f"k_chunk of prompts is {k_chunk}")
            self._shared = torch.from_numpy(budget.static_channels(mean_square, k_chunk)).long()

    def _by_row(self, asked: Mapping[str, int] | int, what: str) -> _ByRow:
        """Build the selection of each row's channels.

        Raises:
            RequestError: compensation was requested for a model without residuals.
        """
        k_chunk = budget.k_chunk_of(asked, self._packed.name)
        if k_chunk == 0:
            return _ByRow(k_chunk=0)
        rank_maximum, mean_square = self._statistics(f"{what} is {k_chunk}")
        if self._options.select == "approx":
            return _ByRow(
                k_chunk=k_chunk,
                buckets=budget.buckets(rank_maximum, budget.total_budget(self._width, k_chunk)),
            )
        if self._options.select == "static":
            static = torch.from_numpy(budget.static_channels(mean_square, k_chunk)).long()
            return _ByRow(k_chunk=k_chunk, static=static)
        return _ByRow(k_chunk=k_chunk)

    def _statistics(self, asked: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Rank maxima and mean squares of the input, for compensation. Loads the residuals if needed.

        Raises:
            RequestError: the model keeps no residuals.
        """
        packed = self._packed
        if packed.residual is None or packed.rank_maximum is None or packed.mean_square is None:
            raise RequestError(
                f"{asked}, but {packed.name} was stored without residuals; use 0, or quantize the model again with "
                "residual bits"
            )
        if self._residual is None:
            self._residual = dequantize_residual(packed.residual, packed.shape[0])
        return packed.rank_maximum, packed.mean_square

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, *, way: CompensationMode, draft: bool = False
    ) -> torch.Tensor:
        """The layer's output.

        Args:
            x: float32 [M, K].
            positions: int64 [M], position of every row in its sequence (the random selector's counter).
            way: Compensation mode.
            draft: Whether the rows are drafted.

        Returns:
            float32 [M, N].

        Raises:
            InvalidActivationError: NaN or infinity in the input of a selection.
        """
        base = self._product(x)
        if way == "none" or self._residual is None:
            return base
        if way == "shared" and not self._by_rows:
            return base if self._shared is None else compensate_shared(base, x, self._shared, self._residual)
        own = self._drafted if draft else self._rows
        if own.k_chunk == 0 or (way == "shared" and not self._in_prompts):
            return base
        channels = self._select(own, x, positions)
        if self._options.measure_recall:
            pairs = zip(x.numpy(), channels.numpy(), strict=True)
            self.recall_sum += sum(budget.recall(row, chosen) for row, chosen in pairs)
            self.selections += x.shape[0]
        return compensate(base, x, channels, self._residual)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output without compensation, float32 [M, N]."""
        if self._packed.per_token:
            return gemm_w4a8(*per_token.quantize(x), self._weight, self._packed)
        return gemv(x, self._weight, self.bias)

    def _select(self, own: _ByRow, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Selected channels of every row. Returns int64 [M, k]."""
        if own.buckets is not None:
            return approximate(x, own.k_chunk, own.buckets)
        if own.static is not None:
            return own.static.expand(x.shape[0], -1)
        if self._options.select == "exact":
            return exact(x, own.k_chunk)
        seed = self._options.seed
        rows = [
            budget.random_channels(self._width, own.k_chunk, seed=seed, layer=self._index, position=position)
            for position in positions.tolist()
        ]
        return torch.from_numpy(np.stack(rows)).long()
