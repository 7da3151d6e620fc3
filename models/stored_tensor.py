"""A tensor of a checkpoint that has not been read yet, whatever the format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, Self

import torch


class StoredTensor(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    @property
    def path(self) -> Path:
        """The file that holds it."""
        ...

    @property
    def name(self) -> str:
        """Its name in that file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> str:
        """Its format as the file calls it, `BF16` or `Q4_K`."""
        ...

    def check_readable(self) -> None:
        """Check that its format is supported. Raises UnsupportedModelError if not."""
        ...

    def rows(self, first: int, count: int) -> Self:
        """Rows of the tensor as a matrix: all dimensions but the last count rows."""
        ...

    def read(self) -> torch.Tensor:
        """Read it. Raises CheckpointError if the file is gone or was truncated."""
        ...


def weights_by_type(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """Number of weights that are stored in each type, most first; vectors are left out."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
