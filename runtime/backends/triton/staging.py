"""Staging of a prompt's residuals: copies each layer's to the device one layer ahead of the product.

Two buffers alternate: while a layer is computed from one, the next layer's residuals are copied to the other, on a
separate stream. So the link is always busy, and only costs time by which it exceeds the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.backends.triton.kernels.residual_gemm import stage
from runtime.backends.triton.kernels.select import Selection
from runtime.backends.triton.residual import GpuResidual


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A layer's residuals shared by prompt rows."""

    residual: GpuResidual
    """The residuals."""
    channels: torch.Tensor | None
    """int32 [k] on the device, ascending; None: all channels. Of experts the rows of `residual.codes`, [E * k]."""
    selection: Selection | None = None
    """Of experts: the same channels as a selection, with which a few rows fetch those of their experts alone."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and words to copy to the device."""
        K, words = self.residual.codes.shape
        return (K if self.channels is None else self.channels.numel()), words


class Staging:
    """Copies residuals to the device, in the order in which a step's layers run.

    Args:
        layers: Each layer's shared residuals, in that order.
        device: The destination.
        stream: The stream that copies; None: the current one, without overlap.

    Raises:
        torch.OutOfMemoryError: the device has no room for the buffers.
    """

    def __init__(self, layers: Sequence[Shared], device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._layers, self._stream = layers, stream
        largest = max((rows * words for rows, words in (layer.shape for layer in layers)), default=0)
        self._buffers = [torch.empty(largest, dtype=torch.int32, device=device) for _ in range(2)]
        self._arrived: list[torch.cuda.Event | None] = [None, None]
        self._step: Sequence[Shared] = ()
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def begin(self, *, few: bool = False) -> None:
        """Begin a step: start copying the first layer's residuals, if any layer has some.

        Args:
            few: Whether the step's rows are so few that they fetch experts' residuals by themselves.
        """
        self._next = 0
        self._step = [layer for layer in self._layers if layer.selection is None or not few]
        if self._step:
            self._fetch(0)

    def take(self) -> torch.Tensor:
        """The next layer's residuals, int32 [k, words], valid until the call after the next; copies the following."""
        own = self._next
        arrived = self._arrived[own % 2]
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        self._next += 1
        if self._next < len(self._step):
            self._fetch(self._next)
        return self._place(own)

    def _place(self, number: int) -> torch.Tensor:
        rows, words = self._step[number].shape
        return self._buffers[number % 2][: rows * words].view(rows, words)

    def _fetch(self, number: int) -> None:
        """Start copying a layer's residuals after all earlier launches, including the last reader of its buffer."""
        layer, to = self._step[number], self._place(number)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if layer.channels is None:
                to.copy_(layer.residual.codes, non_blocking=True)
            else:
                stage(layer.residual.codes, layer.channels, to)
            if self._stream is not None:
                self._arrived[number % 2] = self._stream.record_event()
