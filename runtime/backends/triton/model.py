"""GPU model: weights in the kernels' layout, residuals in page-locked memory, cache and buffers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from models.packed import PackedLinear, Weights
from models.rope import query_growth, tables
from models.spec import XIELU_SLOPES, RopeSpec, expert_of, first_expert, router_of
from runtime.backends.decoder import DecoderOptions
from runtime.backends.experts import hottest
from runtime.backends.operations.channels import k_chunk_of, layer_kind
from runtime.backends.triton.cache import GpuCache
from runtime.backends.triton.experts import GpuExperts, HostRecords, stack
from runtime.backends.triton.kernels.gate import How, Slopes
from runtime.backends.triton.kernels.recurrent import DeltaLayer, Rates, Recent
from runtime.backends.triton.kernels.residual_gemm import Shared, Staging
from runtime.backends.triton.kernels.rope import Basis, Rope
from runtime.backends.triton.kernels.routing import GpuRouter
from runtime.backends.triton.kernels.select import Selection, make_selection, static_table
from runtime.backends.triton.kernels.w4a8 import W4A8Linear, repack_w4a8
from runtime.backends.triton.layout import GpuLinear, repack
from runtime.backends.triton.placement import Placement
from runtime.backends.triton.residual import (
    REMEDY,
    GpuResidual,
    load_residuals,
    ordinary,
    page_locked,
    words_of,
)
from runtime.backends.triton.sizes import COPIED_BYTES
from runtime.errors import Problem, RequestError
from runtime.kv.basis import key_bases
from runtime.kv.kinds import KINDS
from tuner.candidates import n_tb_candidates

logger = logging.getLogger(__name__)

_DEFAULT_N_TB = 8
"""Default thread blocks of a compensation without tuning: in QDEC Fig. 17, 8 is near the best on every device."""


@dataclass(slots=True)
class Linear:
    """A linear layer on the device, or one type of layer of all experts of a block."""

    packed: PackedLinear  # The stored matrix (mapped); of experts the first one's
    index: int  # Its index in `ModelSpec.linear_names`
    weight: GpuLinear | W4A8Linear | GpuExperts  # The matrix in the kernels' layout, or those of a block's experts
    experts: tuple[PackedLinear, ...] = ()  # The stored matrices of a block's experts; empty: it is no layer of experts
    residual: GpuResidual | None = None
    """Residuals in host memory; None until the layer is first compensated, or if memory could not be page-locked."""
    selection: Selection | None = None  # Its channel selection; None if it is not compensated
    n_tb: int = 0  # Thread blocks of its compensation
    shared: Shared | None = None  # The residuals shared by prompt rows; None if these are not compensated together
    by_rows: bool = False
    """Whether prompt rows are compensated like decoded tokens: the head's, if prompts are compensated."""


class GpuModel:
    """All data of one model that stays on the device between steps.

    Args:
        weights: The stored model.
        options: How it is to be run.
        device: `cuda`, or `cpu` under Triton's interpreter.
    """

    def __init__(self, weights: Weights, options: DecoderOptions, device: torch.device) -> None:
        spec = weights.spec
        self.device, self.spec, self.options = device, spec, options
        self._refused: set[str] = set()
        self.problems: tuple[Problem, ...] = ()
        """Problems with page-locking, with advice."""
        self.linears = self._place(weights)
        """By name; those of a block's experts by the first one's."""
        self.token_group = next((w.group_size for w in self._weights() if isinstance(w, W4A8Linear)), None)
        """Channels per sum of INT8 tokens, 0 = the whole row; None if products read half precision."""
        self.trellis = any(isinstance(w, GpuLinear) and w.trellis for w in self._weights())
        """Whether products read rotated activations."""
        self.staging = Staging([], device, None)
        """Copies residuals of a prompt's layers to the device."""
        self.copied = torch.empty(0, dtype=torch.int32, device=device)
        """int32, where several rows of a step share the residuals that they fetch."""
        self.norms = {name: self._move(np.array(weights.vector(name), np.float32)) for name in spec.vector_names()}
        """Vectors by name. Those of attention and of an MLP beside it are one where they are equal."""
        for layer in range(spec.num_layers if spec.parallel else 0):
            one, other = (f"layers.{layer}.{of}_norm" for of in ("input", "post"))
            if np.array_equal(weights.vector(one), weights.vector(other)):
                self.norms[other] = self.norms[one]
        self.one = torch.ones(1, device=device) if spec.scaled else None
        """float32 [1], by which the stream is multiplied within a block, where it is by a number of each at its end."""
        self.placement = self._placement()
        """Where experts are; None if the model has none."""
        self.routers = {
            layer: self._router(weights, layer) for layer in range(spec.num_layers) if spec.has_experts(layer)
        }
        """Of each block with experts."""
        self.tables: dict[str, npt.NDArray[np.float16]] = {}
        """Mapped tables in main memory, of which a step's rows are copied to buffers of these names: of the stream's
        embeddings, float16 [V, C], and of the blocks' own, float16 [V, blocks * P], if there are any."""
        if spec.embeds or spec.token_width:
            self.tables["embeddings"] = np.asarray(weights.embedding(), np.float16)
        if spec.token_width:
            self.tables["own_tokens"] = np.asarray(weights.token_table(), np.float16)
        self.ropes = self._ropes()
        """Of each layer; angles of 0 where it has none."""
        self.cache = GpuCache(
            KINDS[options.kv],
            spec,
            context=options.context,
            slots=options.slots,
            max_rows=options.max_rows,
            pages=options.pages,
            device=device,
        )
        bases, own = key_bases(self.cache.kind, weights), spec.attention_layers
        placed = [Basis(self._move(basis.reflection), self._move(basis.mean)) for basis in bases]
        self.bases = dict(zip(own, placed or [Basis(None, None)] * len(own), strict=True))
        """Of each layer with a cache."""
        self.recent = {layer: self._recent(layer) for layer in spec.state_layers}
        """Convolutions of layers with a state, and the tokens that these remember."""
        self.deltas = {layer: self._delta(layer) for layer in spec.state_layers if spec.delta is not None}
        """Delta rules of layers."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decoded token reads on the device; of experts, on average."""
        mixture = self.spec.mixture
        share = 1.0 if mixture is None else mixture.experts_per_token / mixture.num_experts
        linears = sum(w.nbytes * (share if isinstance(w, GpuExperts) else 1) for w in self._weights())
        routers = sum(router.weight.nbytes for router in self.routers.values())
        return round(linears) + routers + sum(norm.nbytes for norm in self.norms.values())

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int]) -> None:
        """Change the compensation of decoded tokens; residuals needed for the first time are loaded.

        Raises:
            RequestError: k_chunk or n_tb is malformed, or the model keeps no residuals.
        """
        wanted = {name: k_chunk_of(k_chunk, name) for name in self.linears}
        self._check_residuals(wanted)
        blocks = {name: self._blocks(linear, n_tb) for name, linear in self.linears.items()}
        self._load_residuals([name for name, number in wanted.items() if number])
        self._make_room(wanted)
        options = self.options
        for name, linear in self.linears.items():
            linear.n_tb, linear.selection = blocks[name], None
            if wanted[name] and linear.residual is not None:
                linear.selection = make_selection(
                    linear.packed,
                    k_chunk=wanted[name],
                    mode=options.select,
                    seed=options.seed,
                    layer=linear.index,
                    device=self.device,
                    experts=_choosing(linear),
                )

    def set_prompt_k_chunk(self, prompt_k_chunk: Mapping[str, int] | int, stream: torch.cuda.Stream | None) -> None:
        """Change the shared compensation of prompt rows; `stream` fetches, None: the current one.

        Raises:
            RequestError: it is malformed, or the model keeps no residuals.
            torch.OutOfMemoryError: the device has no room for the residuals of a layer.
        """
        wanted = {name: k_chunk_of(prompt_k_chunk, name) for name in self.linears}
        self._check_residuals(wanted)
        blocks = [name for name, number in wanted.items() if number and layer_kind(name) != "head"]
        self._load_residuals(blocks)
        for linear in self.linears.values():
            linear.shared, linear.by_rows = None, False
        self.staging = Staging([], self.device, None)  # so that the previous buffers' memory is free for the new ones
        shared = {name: self._shared(self.linears[name], wanted[name]) for name in blocks}
        self.staging = Staging([found for found in shared.values() if found is not None], self.device, stream)
        for name, linear in self.linears.items():
            linear.shared = shared.get(name)
            linear.by_rows = layer_kind(name) == "head" and wanted[name] > 0

    def _make_room(self, wanted: Mapping[str, int]) -> None:
        """Allocate `copied` when decoded tokens are first compensated; it stays, as graphs contain its address."""
        if self.copied.numel() or self.options.max_rows < 2 or not any(wanted.values()):
            return
        alone = [linear.packed for linear in self.linears.values() if not linear.experts]
        sizes = [words_of(packed.shape, packed.residual.bits) for packed in alone if packed.residual is not None]
        self.copied = torch.empty(min(max(sizes, default=0), COPIED_BYTES // 4), dtype=torch.int32, device=self.device)

    def close(self) -> None:
        """Release every tensor, so that a reference to the closed model holds no memory."""
        self.linears.clear()
        self.norms.clear()
        self.routers.clear()
        self.placement = None
        for held in (self.tables, self.bases, self.recent, self.deltas):
            held.clear()
        self.ropes.clear()
        self.staging = Staging([], self.device, None)
        self.copied = torch.empty(0)
        self.one = None
        self.cache.close()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Main memory that kernels can read; raises PageLockError."""
        return ordinary(nbytes) if self.device.type == "cpu" else page_locked(nbytes)

    def _weights(self) -> list[GpuLinear | W4A8Linear | GpuExperts]:
        return [linear.weight for linear in self.linears.values()]

    def _place(self, weights: Weights) -> dict[str, Linear]:
        """The model's matrices in the layouts of their kernels."""
        grouped: dict[str, list[PackedLinear]] = {}
        host = HostRecords(self._allocate)
        indices = {name: index for index, name in enumerate(self.spec.linear_names())}
        for name in indices:
            grouped.setdefault(first_expert(name), []).append(weights.linear(name))
        found = {}
        for name, packed in grouped.items():
            experts = tuple(packed) if expert_of(name) is not None else ()
            weight = (
                stack(packed, self.device, repack, resident=self._resident(weights, name), host=host)
                if experts
                else _placed(packed[0], self.device)
            )
            found[name] = Linear(packed[0], indices[name], weight, experts)
        tail = max((linear.weight.tail for linear in found.values() if isinstance(linear.weight, GpuLinear)), default=0)
        for linear in found.values():
            if isinstance(linear.weight, GpuLinear):
                linear.weight = replace(linear.weight, other_tail=tail)
        return found

    def _resident(self, weights: Weights, name: str) -> tuple[int, ...] | None:
        """The experts to be kept on the device, of the block that a layer belongs to; None: all."""
        mixture, most = self.spec.mixture, self.options.experts_on_device
        assert mixture is not None
        if most is None or most >= mixture.num_experts:
            return None
        return hottest(weights.expert_tokens(int(name.split(".")[1])), most, mixture)

    def _placement(self) -> Placement | None:
        blocks: dict[int, list[GpuExperts]] = {}
        for name, linear in self.linears.items():
            if isinstance(linear.weight, GpuExperts):
                blocks.setdefault(int(name.split(".")[1]), []).append(linear.weight)
        return Placement(blocks, self.spec.mixture, self.device) if self.spec.mixture is not None else None

    def _router(self, weights: Weights, layer: int) -> GpuRouter:
        assert self.spec.mixture is not None
        name = router_of(layer)
        weight, eps = self._move(np.array(weights.vector(name), np.float32)), None
        if self.spec.mixture.parallel_mlp:
            weight, eps = weight * self.norms[f"{name}_norm"], self.spec.eps_of(f"{name}_norm")
        bias, correction = (self.norms.get(f"{name}_{kind}") for kind in ("bias", "correction"))
        return GpuRouter(mixture=self.spec.mixture, weight=weight, bias=bias, correction=correction, eps=eps)

    def _recent(self, layer: int) -> Recent:
        assert self.cache.states is not None
        weight, bias = (self.norms.get(f"layers.{layer}.{name}") for name in ("conv", "conv_bias"))
        return Recent(self.cache.states.recent[layer], weight, bias)

    def _delta(self, layer: int) -> DeltaLayer:
        assert self.spec.delta is not None
        assert self.cache.states is not None
        decay, dt, skip, gain = (self.norms.get(f"layers.{layer}.{name}") for name in ("decay", "dt", "skip", "gain"))
        matrices = self.cache.states.matrices[layer]
        rates = Rates(decay, dt, skip)
        return DeltaLayer(self.spec.delta, self.recent[layer], rates, gain, self.spec.gain_eps, matrices)

    def activation(self, layer: int) -> How:
        """That of a block's MLP or experts."""
        slopes = (self.norms[f"layers.{layer}.{own}"] for own in XIELU_SLOPES)
        kind = self.spec.activation
        return How(kind, self.spec.gate_limit, Slopes(*slopes) if kind == "xielu" else None)

    def _check_residuals(self, wanted: Mapping[str, int]) -> None:
        """Raise a `RequestError` if a layer to be compensated has no residuals."""
        for name, number in wanted.items():
            if number and self.linears[name].packed.residual is None:
                raise RequestError(
                    f"k_chunk is {number}, but {name} was stored without residuals; use k_chunk 0, or quantize the "
                    "model again with residual bits"
                )

    def _shared(self, linear: Linear, k_chunk: int) -> Shared | None:
        """The residuals of a layer shared by prompt rows; None if they have no page-locked memory."""
        if linear.residual is None:
            return None
        table, width = static_table(linear.experts or (linear.packed,), k_chunk), linear.packed.shape[1]
        whole = table.shape[1] == width
        rows = (table + width * torch.arange(len(table))[:, None]).int().flatten()
        selection = None
        if linear.experts:
            selection = make_selection(
                linear.packed, k_chunk=k_chunk, mode="static", device=self.device, experts=_choosing(linear)
            )
        channels = None if whole else rows.to(self.device)
        return Shared(residual=linear.residual, channels=channels, selection=selection)

    def _load_residuals(self, names: Sequence[str]) -> None:
        """Load residuals needed for the first time into page-locked memory."""
        missing = [name for name in names if self.linears[name].residual is None and name not in self._refused]
        if not missing:
            return
        experts = {name: linear.experts for name, linear in self.linears.items() if linear.experts}
        loaded = load_residuals([self.linears[name].packed for name in missing], self.device, experts)
        for name in missing:
            self.linears[name].residual = loaded.layers.get(name)
        if loaded.warning:
            self._refused.update(name for name in missing if name not in loaded.layers)
            logger.warning("%s", loaded.warning)
            what, _, fix = loaded.warning.partition(f". {REMEDY}")
            self.problems += (Problem(what=what, fix=f"{REMEDY}{fix}", failure=True),)

    def _blocks(self, linear: Linear, n_tb: Mapping[str, int]) -> int:
        N, K = linear.packed.shape
        kind = layer_kind(linear.packed.name)
        asked = n_tb.get(kind, _DEFAULT_N_TB)
        if asked < 1:
            raise RequestError(f"n_tb of {kind} is {asked}: compensation needs at least one thread block")
        return max(count for count in n_tb_candidates(N, K) if count <= asked)

    def _ropes(self) -> list[Rope]:
        """The rotary tables of each layer, every embedding's once."""
        spec, context = self.spec, self.options.context
        grown = query_growth(spec, np.arange(context))
        growth = None if grown is None else self._move(grown)
        found: dict[RopeSpec | None, Rope] = {}
        for of in spec.ropes:
            cos, sin = map(self._move, tables(of, context))
            found[of] = Rope(cos, sin, growth)
        if spec.nope_layers:
            ones = np.ones((context, max((of.rotary_dim // 2 for of in spec.ropes), default=1)), np.float32)
            found[None] = Rope(self._move(ones), self._move(np.zeros_like(ones)), growth)
        return [found[spec.rope_of(layer)] for layer in range(spec.num_layers)]

    def _move(self, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _placed(packed: PackedLinear, device: torch.device) -> GpuLinear | W4A8Linear:
    """A matrix in the layout of its kernels."""
    return repack_w4a8(packed, device) if packed.per_token else repack(packed, device)


def _choosing(linear: Linear) -> tuple[PackedLinear, ...]:
    """The experts whose rows choose channels by statistics of their own: at `down`, as all read the same before."""
    return linear.experts if layer_kind(linear.packed.name) == "down" else ()
