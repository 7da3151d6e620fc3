"""Tensors of a checkpoint that have not been read yet, and those of a safetensors file.

The latter are read into their own memory instead of being mapped. A mapping counts as used memory page by page, and a
file that shrinks under it kills the process, whereas a read raises an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import torch

from models.errors import CheckpointError, UnsupportedModelError
from models.foreign import open_file, read_table


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


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported formats of weights, by their safetensors names."""
FLOATS_OF_8_BITS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
INTEGERS = {"I32": torch.int32}
OCTETS = {"U8": torch.uint8}
"""Formats of which quantized weights are made (`models.low_bit_source`)."""
_ALL = {**DTYPES, **FLOATS_OF_8_BITS, **INTEGERS, **OCTETS}

_DOWNLOAD_AGAIN = "Download the model again."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor:
    """A tensor's location and type."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Its format, for example `BF16`."""
    offset: int
    """First byte in the file."""
    size: int
    """Bytes."""

    def check_readable(self) -> None:
        """Check that the format is one of DTYPES.

        Raises:
            UnsupportedModelError: It is not.
        """
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"{self.path}: the tensor '{self.name}' is stored as {self.dtype} (supported: {', '.join(DTYPES)}). "
                "Take the model's original checkpoint in 16 or 32 bits."
            )

    def rows(self, first: int, count: int) -> ShardTensor:
        row = self.size // max(1, math.prod(self.shape[:-1]))
        return replace(self, shape=(count, self.shape[-1]), offset=self.offset + first * row, size=count * row)

    def read(self) -> torch.Tensor:
        """Read the tensor.

        Raises:
            UnsupportedModelError: The format is not one of DTYPES.
            CheckpointError: The file is gone or was truncated.
        """
        self.check_readable()
        return self.stored()

    def stored(self) -> torch.Tensor:
        """Read the tensor in any of the formats."""
        tensor = torch.empty(self.shape, dtype=_ALL[self.dtype])
        rest = tensor.view(-1).view(torch.uint8).numpy().data
        try:
            with open_file(self.path) as file:
                file.seek(self.offset)
                while rest and (count := file.readinto(rest)):
                    rest = rest[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}). {_DOWNLOAD_AGAIN}") from error
        if rest:
            raise CheckpointError(f"{self.path}: ends within the tensor '{self.name}'. {_DOWNLOAD_AGAIN}")
        return tensor


def read_header(path: Path) -> dict[str, ShardTensor]:
    """Every tensor of a safetensors file by name; only the header is read.

    Raises:
        CheckpointError: The file cannot be read, is truncated or damaged, or is something else.
    """
    try:
        places = read_table(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(_why_unreadable(path, error)) from error
    return {
        name: ShardTensor(
            path=path, name=name, shape=place.shape, dtype=place.dtype, offset=place.offset, size=place.size
        )
        for name, place in places.items()
    }


def _why_unreadable(path: Path, error: Exception) -> str:
    try:
        with open_file(path) as file:
            beginning = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError as denied:
        return f"{path} cannot be read ({denied.strerror})."
    if beginning.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer, not the weights themselves. Run `git lfs pull` in its folder."
    return f"{path} is damaged, truncated or not a safetensors file ({size} bytes; {error}). {_DOWNLOAD_AGAIN}"
