"""Tables of experts: for each of a block's experts the addresses of its matrix, which stays where it is.

A matrix is repacked once; a table is made for each way to compensate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear
from runtime.backends.cpu.arena import aligned_zeros
from runtime.backends.cpu.constants import Constants
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.experts import EXPERT, Expert
from runtime.backends.cpu.data.sizes import BLOCK
from runtime.backends.cpu.tiles import padded
from runtime.backends.operations.channels import CHUNK, static_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The matrices of a block's experts, of one layer type."""

    first: PackedLinear
    """That of the first expert, as stored."""
    address: int
    """Address of `Expert` records."""
    sizes: op.ExpertSizes
    """What the matrices have in common."""
    k_chunk: int
    """Channels per 1024 that each row chooses."""
    shared: int
    """Channels per 1024 that all rows share."""


class ExpertTables:
    """The tables of a model.

    Args:
        constants: The matrices, repacked.
    """

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._made: dict[str, npt.NDArray[Any]] = {}

    def table(self, names: list[str], k_chunk: int, shared: int) -> Table:
        """A table.

        Args:
            names: The matrices, one for each expert.
            k_chunk: Channels per 1024 that each row chooses.
            shared: Channels per 1024 that all rows share.
        """
        first = self._constants.linear(names[0])
        tiled = self._constants.tiled(first)
        sizes = op.ExpertSizes(tiled.bits, tiled.tiles, tiled.blocks, tiled.groups, tiled.group_blocks)
        if k_chunk or shared:
            of = self._constants.scaled(first)
            sizes = sizes._replace(residual_bits=of.bits, stride=of.stride, rows=of.rows)
        key = f"{names[0]}.{bool(k_chunk or shared)}.{shared}"
        if key not in self._made:
            compensated, masks = k_chunk > 0 or shared > 0, self._masks(names, shared)
            records = aligned_zeros((len(names),), EXPERT)
            for at, name in enumerate(names):
                records[at] = self._record(self._constants.linear(name), compensated, masks, at)
            self._made[key] = records
        address = int(self._made[key].ctypes.data)
        return Table(first=first, address=address, sizes=sizes, k_chunk=k_chunk, shared=shared)

    def static(self, names: list[str], k_chunk: int) -> int:
        """Address of the channels that the static selection chooses for each expert, int32 [E, total]."""

        def make() -> npt.NDArray[np.int32]:
            return np.stack([static_channels(self._mean_square(name), k_chunk) for name in names])

        key = f"{names[0]}.static.{k_chunk}"
        if key not in self._made:
            self._made[key] = make()
        return int(self._made[key].ctypes.data)

    def _masks(self, names: list[str], shared: int) -> npt.NDArray[np.uint8] | None:
        """Shared channels of each expert: uint8 [E, K padded to 32], 255 or 0; None if there are none."""
        if not shared:
            return None
        width = self._constants.linear(names[0]).shape[1]
        masks: npt.NDArray[np.uint8] = aligned_zeros((len(names), padded(width, BLOCK)), np.uint8)
        for mask, name in zip(masks, names, strict=True):
            mask[slice(width) if shared == CHUNK else static_channels(self._mean_square(name), shared)] = 255
        self._made[f"{names[0]}.masks.{shared}"] = masks
        return masks

    def _mean_square(self, name: str) -> npt.NDArray[np.float32]:
        found = self._constants.linear(name).mean_square
        assert found is not None
        return np.asarray(found)

    def _record(self, packed: PackedLinear, compensated: bool, masks: npt.NDArray[np.uint8] | None, at: int) -> Expert:
        own = self._constants.tiled(packed).weights
        expert = Expert(own.codes, own.scales, own.zeros, bias=self._constants.bias(packed))
        if compensated:
            residual = self._constants.scaled(packed)
            expert = expert._replace(residual=residual.codes, residual_scales=residual.scales)
        return expert if masks is None else expert._replace(kept=int(masks[at].ctypes.data))
