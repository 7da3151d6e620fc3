"""A tensor of a checkpoint that has not been read yet, whatever the format."""

from __future__ import annotations

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

    def columns(self, first: int, count: int) -> Self:
        """Columns of a matrix."""
        ...

    def read(self) -> torch.Tensor:
        """Read it. Raises CheckpointError if the file is gone or was truncated."""
        ...
