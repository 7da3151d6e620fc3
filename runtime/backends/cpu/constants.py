"""Constants of a model's programs: weights as kernels read them, made once, and the addresses that instructions name.

Matrices are repacked as tiles; vectors are padded with zeros to whole blocks or tiles. An array stays where it is for
as long as its `Constants` live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear, PackedResidual
from models.rope import query_growth, tables
from models.spec import MixtureSpec, router_of
from models.weights import Weights
from runtime.backends.cpu.arena import LINE, Arena, aligned_zeros
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.sizes import BLOCK, LANES
from runtime.backends.cpu.tiles import TiledLinear, padded, tile_linear, tile_residual
from runtime.backends.operations.channels import static_channels
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
    """

    def __init__(self, model: Weights, kind: CacheKind, context: int, arena: Arena) -> None:
        self._model, self._spec, self._arena = model, model.spec, arena
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._tiles: dict[str, TiledLinear] = {}
        self._wholes: dict[str, TiledLinear] = {}
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

    def linear(self, name: str) -> PackedLinear:
        """A matrix as it is stored."""
        return self._model.linear(name)

    def tiled(self, packed: PackedLinear) -> TiledLinear:
        """A matrix in tiles."""
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

    def whole(self, packed: PackedLinear, residual: PackedResidual) -> op.Whole:
        """A matrix's residuals as tiles."""
        if packed.name not in self._wholes:
            self._wholes[packed.name] = tile_residual(residual, self.tiled(packed), self._arena)
        weights = self._wholes[packed.name].weights
        return op.Whole(weights.codes, weights.scales, weights.zeros)

    def kept(self, packed: PackedLinear, k_chunk: int) -> int:
        """Address of the mask of channels shared by prompt rows: uint8 [K padded to 32], 255 or 0."""

        def make() -> npt.NDArray[np.uint8]:
            assert packed.mean_square is not None
            kept: npt.NDArray[np.uint8] = aligned_zeros((padded(packed.shape[1], BLOCK),), np.uint8)
            kept[static_channels(np.asarray(packed.mean_square), k_chunk)] = 255
            return kept

        return address_of(self.array(f"{packed.name}.kept.{k_chunk}", make))

    def static(self, packed: PackedLinear, k_chunk: int) -> int:
        """Address of the channels that the static selection chooses, int32 [total]; 0: the model has no statistics."""
        mean_square = packed.mean_square
        if mean_square is None:
            return 0
        key = f"{packed.name}.static.{k_chunk}"
        return address_of(self.array(key, lambda: static_channels(np.asarray(mean_square), k_chunk)))

    def vector(self, name: str) -> int:
        """Address of a norm's weight, padded to whole blocks."""
        values = np.asarray(self._model.vector(name))
        return self._widened(name, values, padded(values.size, BLOCK))

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
