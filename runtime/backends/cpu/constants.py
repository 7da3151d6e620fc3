"""Constants of a model's programs: weights as kernels read them, made once, and the addresses that instructions name.

Matrices are repacked as tiles; vectors are padded with zeros to whole blocks or tiles. An array stays where it is for
as long as its `Constants` live. A matrix is repacked once; a block's experts have a table of addresses for each way to
compensate (`ExpertTables`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear, PackedResidual, SourceWeights, Weights
from models.rope import query_growth, tables
from models.spec import XIELU_SLOPES, MixtureSpec, router_of
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import BLOCK, EXPERT, LANES, LINE, Expert, padded
from runtime.backends.cpu.tiles import Arena, TiledLinear, aligned_zeros, tile_exact, tile_linear, tile_residual
from runtime.backends.operations.channels import CHUNK, static_channels
from runtime.backends.operations.panel import residual_scales
from runtime.kv.basis import key_bases
from runtime.kv.kinds import CacheKind


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array begins."""
    return int(array.ctypes.data)


class Constants:
    """The constants of a model.

    Args:
        model: The stored model.
        kind: The kind of cache; some turn keys by a basis.
        context: Tokens of context, for which there are rotary tables.
        arena: Where matrices and vectors are kept.
        lender: Constants of a model that has the same output head.
    """

    def __init__(
        self, model: Weights, kind: CacheKind, context: int, arena: Arena, lender: Constants | None = None
    ) -> None:
        self._model, self._spec, self._arena, self._lender = model, model.spec, arena, lender
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._tiles: dict[str, TiledLinear] = {}
        self._wholes: WeakValueDictionary[tuple[str, int], TiledLinear] = WeakValueDictionary()
        self._turned = {rope: tables(rope, context) for rope in self._spec.ropes}
        self._bases = key_bases(kind, model)
        growth = query_growth(self._spec, np.arange(context))
        self.growth = 0 if growth is None else address_of(self.array("growth", lambda: np.asarray(growth)))
        """Address of the factor of queries at each position; 0: there is none."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the repacked matrices that a token reads."""
        return round(sum(tiled.nbytes * self._spec.share_read(name) for name, tiled in self._tiles.items()))

    def array(self, key: str, make: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """A contiguous array, created once and kept."""
        if key not in self._arrays:
            self._arrays[key] = np.ascontiguousarray(make())
        return self._arrays[key]

    def mapped(self, key: str, table: Callable[[], npt.NDArray[np.float16]]) -> npt.NDArray[np.float16]:
        """A table whose rows are read where they are mapped."""
        found: npt.NDArray[np.float16] = self._arrays.setdefault(key, np.asarray(table()))
        return found

    def linear(self, name: str) -> PackedLinear:
        """A matrix as it is stored."""
        return self._model.linear(name)

    def tiled(self, packed: PackedLinear) -> TiledLinear:
        """A matrix in tiles."""
        if packed.name == "head" and self._lender is not None:
            return self._lender.tiled(packed)
        if packed.name not in self._tiles:
            self._tiles[packed.name] = tile_linear(packed, self._arena)
        return self._tiles[packed.name]

    def bias(self, packed: PackedLinear) -> int:
        """Address of a matrix's bias, padded to whole tiles; 0: it has none."""
        columns = padded(packed.shape[0], LANES)
        return 0 if packed.bias is None else self._widened(f"{packed.name}.bias", packed.bias, columns)

    def residual(self, packed: PackedLinear) -> op.Residual:
        """A matrix's residuals: rows aligned to cache lines, scales, if they have any, padded to whole tiles."""
        name, residual, columns = packed.name, packed.residual, self._columns(packed)
        assert residual is not None

        def rows() -> npt.NDArray[Any]:
            stored = np.asarray(residual.codes)
            width = columns if residual.bits == 16 else stored.shape[1]
            wide = self._arena.zeros((stored.shape[0], padded(width, LINE // stored.itemsize)), stored.dtype)
            wide[:, : stored.shape[1]] = stored
            return wide

        codes = self.array(f"{name}.residual", rows)
        scales = 0 if residual.scales is None else self._widened(f"{name}.residual_scales", residual.scales, columns)
        return op.Residual(address_of(codes), scales, residual.bits, codes.strides[0], codes.shape[0])

    def scaled(self, packed: PackedLinear) -> op.Residual:
        """Residuals with scales, float16 ones included."""
        stored, residual = packed.residual, self.residual(packed)
        assert stored is not None
        if stored.scales is None:
            scales = self.array(f"{packed.name}.derived", lambda: residual_scales(stored))
            key = f"{packed.name}.residual_scales"
            residual = residual._replace(scales=self._widened(key, scales, self._columns(packed)))
        return residual

    def exact(self, name: str, source: SourceWeights) -> op.Exact:
        """A matrix in its source's own precision."""
        tiles = self.array(f"{name}.exact", lambda: tile_exact(source.matrix(name), self._arena))
        return op.Exact(address_of(tiles), [np.float16, np.uint16, np.float32].index(tiles.dtype.type))

    def whole(self, packed: PackedLinear, residual: PackedResidual, k_chunk: int) -> TiledLinear:
        """A matrix's residuals as tiles: of all channels, or of those that `static` chooses. Lives while it is held."""
        key = packed.name, k_chunk
        found = self._wholes.get(key)
        if found is None:
            channels = None if k_chunk == CHUNK else self._static(packed, k_chunk)
            found = self._wholes[key] = tile_residual(residual, self.tiled(packed), self._arena, channels)
        return found

    def kept(self, packed: PackedLinear, k_chunk: int) -> int:
        """Address of the mask of channels shared by prompt rows: uint8 [K padded to 32], 255 or 0."""

        def make() -> npt.NDArray[np.uint8]:
            kept: npt.NDArray[np.uint8] = aligned_zeros((padded(packed.shape[1], BLOCK),), np.uint8)
            kept[self._static(packed, k_chunk)] = 255
            return kept

        return address_of(self.array(f"{packed.name}.kept.{k_chunk}", make))

    def static(self, packed: PackedLinear, k_chunk: int) -> int:
        """Address of the channels that the static selection chooses, int32 [total]; 0: the model has no statistics."""
        return 0 if packed.mean_square is None else address_of(self._static(packed, k_chunk))

    def _static(self, packed: PackedLinear, k_chunk: int) -> npt.NDArray[np.int32]:
        assert packed.mean_square is not None
        mean_square = np.asarray(packed.mean_square)
        return self.array(f"{packed.name}.static.{k_chunk}", lambda: static_channels(mean_square, k_chunk))

    def vector(self, name: str) -> int:
        """Address of a norm's weight, padded to whole blocks."""
        values = np.asarray(self._model.vector(name))
        return self._widened(name, values, padded(values.size, BLOCK))

    def slopes(self, layer: int) -> int:
        """Address of both slopes of a block's xIELU, float32 [2]."""
        names = [f"layers.{layer}.{own}" for own in XIELU_SLOPES]
        return address_of(self.array(names[0], lambda: np.concatenate([self._model.vector(own) for own in names])))

    def taps(self, name: str, taps: int, width: int) -> int:
        """Address of a convolution's weight, float32 [taps, width], zero-padded."""

        def widen() -> npt.NDArray[np.float32]:
            weight = np.asarray(self._model.vector(name)).reshape(taps, -1)
            wide: npt.NDArray[np.float32] = aligned_zeros((taps, width), np.float32)
            wide[:, : weight.shape[1]] = weight
            return wide

        return address_of(self.array(name, widen))

    def router(self, layer: int, mixture: MixtureSpec, width: int) -> int:
        """Address of a router's weight, float32 [scores, width padded to whole blocks]."""

        def widen() -> npt.NDArray[np.float32]:
            wide: npt.NDArray[np.float32] = self._arena.zeros((mixture.scores, padded(width, BLOCK)), np.float32)
            wide[:, :width] = self._model.vector(router_of(layer))
            return wide

        return address_of(self.array(router_of(layer), widen))

    def stream_router(self, layer: int, width: int) -> int:
        """Address of what makes numbers of a stream, float32 [S, width], with the weight of the norm in front."""

        def widen() -> npt.NDArray[np.float32]:
            norm = np.asarray(self._model.vector(f"layers.{layer}.altup_norm"))
            weight = np.asarray(self._model.vector(f"layers.{layer}.altup_router")).reshape(-1, norm.size)
            wide: npt.NDArray[np.float32] = aligned_zeros((len(weight), width), np.float32)
            wide[:, : norm.size] = weight * norm
            return wide

        return address_of(self.array(f"layers.{layer}.altup_router", widen))

    def ones(self) -> int:
        """Address of as many ones as the widest head has channels, float32."""
        widest = max(self._spec.heads_of(layer).dim for layer in self._spec.attention_layers)
        return address_of(self.array("ones", lambda: np.ones(widest, np.float32)))

    def turns(self, layer: int) -> tuple[int, int, int]:
        """Half the rotating channels of a layer, and the addresses of their cosines and sines; 0 where none rotate."""
        rope = self._spec.rope_of(layer)
        if rope is None:
            return 0, 0, 0
        cos, sin = self._turned[rope]
        return rope.rotary_dim // 2, address_of(cos), address_of(sin)

    def basis(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's reflection and mean key; 0 where keys are not turned."""
        if not self._bases:
            return 0, 0
        basis, prefix = self._bases[self._spec.attention_layers.index(layer)], f"layers.{layer}"
        reflection = self.array(f"{prefix}.reflection", lambda: basis.reflection)
        return address_of(reflection), address_of(self.array(f"{prefix}.mean", lambda: basis.mean))

    def _columns(self, packed: PackedLinear) -> int:
        """Outputs of a matrix, padded to whole tiles."""
        return self.tiled(packed).tiles * LANES

    def _widened(self, key: str, values: npt.NDArray[Any], width: int) -> int:
        """Address of a constant vector that is zero-padded to `width`."""

        def widen() -> npt.NDArray[Any]:
            wide = self._arena.zeros((width,), values.dtype)
            wide[: values.size] = values
            return wide

        return address_of(self.array(key, widen))


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
    """The tables of a model."""

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
        shape = (tiled.bits, tiled.tiles, tiled.blocks, tiled.groups, tiled.group_blocks)
        sizes = op.ExpertSizes(*shape, tiled.form)
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
