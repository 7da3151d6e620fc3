"""MXFP4: floating-point numbers of 4 bits in blocks of 32, which share a power of two, as gpt-oss's experts are stored.

A module has `…_blocks` uint8 [.., rows, G, 16], the first of two numbers in the lower nibble, and `…_scales` uint8
[.., rows, G], exponents plus 127.

Source: OCP Microscaling Formats (MX) Specification 1.0, §5.3.3 and §5.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models.errors import CheckpointError
from models.shard import OCTETS, ShardTensor

NAME = "MXFP4"
BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of the tensors end."""
_BYTES, _LENGTH, _BIAS = 16, 32, 127
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Those without a sign, by their codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFloats:
    """A tensor of such numbers. See `models.stored_tensor.StoredTensor`."""

    blocks: ShardTensor
    """Codes."""
    scales: ShardTensor
    """Exponents."""
    shape: tuple[int, ...]
    """[.., rows, 32 G]."""

    @property
    def path(self) -> Path:
        """The file that holds its codes."""
        return self.blocks.path

    @property
    def name(self) -> str:
        """The name of its codes in that file."""
        return self.blocks.name

    @property
    def dtype(self) -> str:
        """The format."""
        return NAME

    def check_readable(self) -> None:
        """Nothing: other formats are refused before."""

    def rows(self, first: int, count: int) -> BlockFloats:
        """Rows of the tensor as a matrix: all dimensions but the last count rows."""
        groups = self.scales.shape[-1]
        return replace(
            self,
            blocks=self.blocks.rows(first * groups, count * groups),
            scales=self.scales.rows(first, count),
            shape=(count, self.shape[-1]),
        )

    def read(self) -> torch.Tensor:
        """Its numbers in bfloat16, which holds them exactly.

        Raises:
            CheckpointError: the file is gone or was truncated.
        """
        numbers = torch.tensor((*_NUMBERS, *(-number for number in _NUMBERS)))
        codes, exponents = self.blocks.stored(), self.scales.stored().flatten().int() - _BIAS
        both = torch.stack((numbers[(codes & 15).int()], numbers[(codes >> 4).int()]), dim=-1)
        return torch.ldexp(both.view(-1, _LENGTH), exponents[:, None]).to(torch.bfloat16).view(self.shape)


def read_block_floats(entries: Mapping[str, ShardTensor]) -> dict[str, BlockFloats]:
    """The tensors of a checkpoint that are stored so, as `{module}.weight`.

    Raises:
        CheckpointError: one has no scales, or they contradict its shape.
    """
    found = {}
    for name, blocks in entries.items():
        if not name.endswith(BLOCKS):
            continue
        module = name.removesuffix(BLOCKS)
        scales = entries.get(module + SCALES)
        if scales is None or blocks.shape != (*scales.shape, _BYTES) or not math.prod(blocks.shape):
            listed = "missing" if scales is None else f"of shape {list(scales.shape)}"
            raise CheckpointError(
                f"{blocks.path}: '{name}' has shape {list(blocks.shape)}, and its scales are {listed}. "
                "Download the model again."
            )
        if any(each.dtype not in OCTETS for each in (blocks, scales)):
            raise CheckpointError(f"{blocks.path}: '{name}' or its scales are not {NAME}. Download the model again.")
        shape = (*scales.shape[:-1], _LENGTH * scales.shape[-1])
        found[f"{module}.weight"] = BlockFloats(blocks=blocks, scales=scales, shape=shape)
    return found
