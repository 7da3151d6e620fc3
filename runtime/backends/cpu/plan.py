"""Plan: records a model's forward pass as a program, once, through the graph of `models.architecture`.

`PlanOperations` writes instructions instead of computing, much as a CUDA graph is captured. An instruction may do more
than its node: a norm or gate, and what joins the splits of attention, also quantizes, so it is written by the linear
layer that reads it and knows the groups; a linear layer also adds, if its output is added as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from models.architecture import LEAST_SQUARE, Interpreter, Node, step_graph
from models.packed import PackedLinear, Weights
from models.spec import (
    JOIN,
    LAUREL_LINEARS,
    QUERIES,
    STATE_QKV,
    MixtureSpec,
    ModelSpec,
    expert_of,
    is_of_tokens,
    router_of,
)
from runtime.backends.cpu.cache import CpuCache
from runtime.backends.cpu.constants import Constants, ExpertTables, Table, address_of
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.instructions import SELECT_APPROX, SELECT_EXACT, SELECT_RANDOM, SELECT_STATIC
from runtime.backends.cpu.data.records import BLOCK, COUNTS, LANES, PAIR, PIECE, RUN_ROWS, SEGMENT, Routes, padded
from runtime.backends.cpu.link import has_residuals_beside, link_written, most_scratch
from runtime.backends.cpu.tiles import Arena, TiledLinear, aligned_zeros
from runtime.backends.decoder import DecoderOptions
from runtime.backends.operations.channels import CHUNK, buckets, k_chunk_of, layer_kind, total_budget
from runtime.errors import RequestError
from runtime.kv.states import SMALL_STEP

MODES = {"approx": SELECT_APPROX, "exact": SELECT_EXACT, "static": SELECT_STATIC, "random": SELECT_RANDOM}
NOWHERE = op.Matrix(0, 0)
"""No rows."""
ROW_PADDING = 16
"""Buffer rows are padded to whole row blocks."""


@dataclass(frozen=True, slots=True)
class Activations:
    """A [rows, width] matrix of float32 activations in a buffer."""

    place: op.Matrix
    """Its place in memory."""
    width: int
    """Channels."""
    wanted: bool = False
    """Whether these are only the rows whose logits are wanted, rather than all rows of the step."""


class Destination(NamedTuple):
    """Where a linear layer's output goes."""

    place: Activations
    accumulate: bool  # Whether it is added to what is there


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded forward pass."""

    words: npt.NDArray[np.int64]
    """int64 [instructions, WIDTH]."""
    kinds: tuple[str, ...]
    """For every instruction the layer type it belongs to: `qkv`, ..., `head` for the product and its channel selection,
    otherwise empty."""
    result: npt.NDArray[np.float32]
    """float32 [rows, V padded to 16], the logits; of a part without a head the stream, [rows, C padded to 32]."""
    scratch: int
    """Bytes of scratch per thread."""
    selections: tuple[int, int]
    """Number of layers in which a row of the step, and a row whose logits are wanted, select channels."""
    residuals: tuple[TiledLinear, ...]
    """Tiles that only this program, and others that hold them, read."""


class PlanOperations(Interpreter[Activations]):
    """Runs a graph by writing a program.

    Args:
        model: The stored model; its matrices are repacked, one at a time.
        options: Decoder options.
        cache: The KV cache that the program reads and writes.
        threads: Threads that will run the program.
        lender: Constants of a model that has the same output head.
    """

    def __init__(
        self,
        model: Weights,
        options: DecoderOptions,
        cache: CpuCache,
        threads: int,
        lender: Constants | None = None,
    ) -> None:
        self._model = model
        self._spec: ModelSpec = model.spec
        self._graph = step_graph(model.spec)
        self._options = options
        self._cache, self._threads = cache, threads
        self._k_chunk: Mapping[str, int] | int = 0
        self._prompt: Mapping[str, int] | int | None = None
        self._few = False
        self.paged = True
        """Whether programs are linked with attention to pages."""
        self._program: list[op.Instruction] = []
        self._kinds: list[str] = []
        self._residuals: list[TiledLinear] = []
        self._arena = Arena()
        self._constants = Constants(model, cache.kind, options.context, self._arena, lender)
        self._buffers: dict[str, npt.NDArray[Any]] = {}
        self._rows = padded(options.max_rows, ROW_PADDING)
        self._names = {name: i for i, name in enumerate(self._spec.linear_names())}
        self._widest_input = max(self._spec.linear_shape(name)[1] for name in self._names)
        self._widest: dict[str, int] = {}
        for name in filter(lambda name: expert_of(name) is None, self._names):
            kind = _buffer_of(name)
            self._widest[kind] = max(self._widest.get(kind, 0), self._spec.linear_shape(name)[0])
        self._tables = ExpertTables(self._constants)
        self.recall_sums: npt.NDArray[np.float32] = self._buffer("recall sums", (self._rows,), np.float32)
        self._selections = [0, 0]

    def record(
        self, k_chunk: Mapping[str, int] | int, prompt: Mapping[str, int] | int | None = None, *, few: bool = False
    ) -> Program:
        """Record the forward pass. Weights are repacked the first time only.

        Args:
            k_chunk: Salient channels per 1024, as in `DecoderOptions`.
            prompt: The `prompt_k_chunk` of rows that are compensated together; None: each row by its own channels.
            few: Whether there are so few rows that a separate product with the residuals is cheaper than a panel.

        Returns:
            The program. The arrays that it refers to live as long as this object, or as the program holds them.

        Raises:
            RequestError: compensation was requested for a model without residuals.
            BackendError: a kernel cannot be compiled here.
        """
        self._k_chunk, self._prompt, self._few = k_chunk, prompt, few
        self._program, self._kinds, self._selections = [], [], [0, 0]
        self._residuals = []
        self.run(self._graph)
        result, cap = self._buffers["logits" if self._spec.has_head else "stream"], self._spec.logit_cap
        if self._spec.has_head:
            self._emit(op.Check(_matrix(result), padded(self._spec.vocab_size, LANES), cap or 0.0))
        words = aligned_zeros((len(self._program), op.WIDTH), np.int64)
        for own, instruction in zip(words, self._program, strict=True):
            op.write(own, instruction)
        link_written(words, self._program, self._threads, paged=self.paged)
        selections = (self._selections[0], self._selections[1])
        residuals = tuple(self._residuals)
        return Program(words, tuple(self._kinds), result, most_scratch(words), selections, residuals)

    def release(self) -> None:
        """Release the model's mapped files: programs use copies, except for the embeddings."""
        self._model.release()

    @property
    def constants(self) -> Constants:
        return self._constants

    @property
    def weight_bytes(self) -> int:
        """Bytes of the repacked matrices that a token reads."""
        return self._constants.weight_bytes

    @property
    def stream(self) -> npt.NDArray[np.float32]:
        """float32 [rows, C], the residual stream: after a step, the output of the last block."""
        return self._buffers["stream"]

    @property
    def final_norm(self) -> npt.NDArray[np.float32]:
        """float32 [C], the weight of the norm before the head."""
        return np.asarray(self._model.vector("norm"), np.float32)

    # Kinds of nodes (models.architecture.Kind)

    def embed(self, node: Node) -> Activations:  # noqa: ARG002  the first node
        return self._embedding("embedded" if self._spec.joins else "stream")

    def tokens(self, node: Node) -> Activations:
        if node.layer < 0:
            return self._embedding("embedded")
        P = self._spec.token_width
        table, inner = self._constants.mapped("tokens", self._model.token_table), self._matrix("inner", 2 * P)
        out = replace(inner, place=op.Matrix(inner.place.at + 4 * P, inner.place.stride), width=P)
        self._emit(op.Embed(address_of(table) + 2 * node.layer * P, table.strides[0], P, out.place))
        return out

    def _embedding(self, buffer: str) -> Activations:
        """Write the tokens' embeddings to a buffer."""
        table, out = (
            self._constants.mapped("embed", self._model.embedding),
            self._matrix(buffer, self._spec.hidden_size),
        )
        self._emit(op.Embed(address_of(table), table.strides[0], out.width, out.place))
        return out

    def enter(self, node: Node) -> Activations:  # noqa: ARG002  the first node
        """The decoder has written the stream."""
        return self._matrix("stream", self._spec.hidden_size)

    def join(self, node: Node) -> Activations:
        C = self._spec.hidden_size
        out = self._matrix("joined", 2 * C)
        for at, part in enumerate(("embed", "hidden")):
            half = op.Matrix(out.place.at + 4 * C * at, out.place.stride)
            self._settle(self.of(node, at), f"layers.{node.layer}.{part}_norm", half, accumulate=False)
        return out

    def linear(self, node: Node) -> Activations:
        packed = self._model.linear(node.name)
        tiled = self._constants.tiled(packed)
        k_chunk, shared = self._channels(packed)
        values, to = self._prepare(node.inputs[0], tiled), self._destination(node, packed)
        if shared and not self._few and not has_residuals_beside(packed):
            return self._panel(packed, tiled, shared, to)
        if k_chunk == CHUNK and not self._options.measure_recall:  # nothing to choose: all residuals are read
            return self._product(values, packed, tiled, 0, CHUNK, to)
        total = total_budget(packed.shape[1], k_chunk)
        if total:
            self._emit(self._selection(values, packed, k_chunk, total), kind=layer_kind(node.name))
        return self._product(values, packed, tiled, total, shared, to)

    def _destination(self, node: Node, packed: PackedLinear) -> Destination:
        """Where a linear layer writes: to what it is added to, if nothing comes between."""
        reader = self._graph.reader(node)
        if reader is not None and reader.kind == "add" and not reader.norm:
            return Destination(self.of(reader), accumulate=True)
        return Destination(self._output(packed), accumulate=False)

    def norm(self, node: Node) -> Activations:
        y = self.of(node)
        self._settle(y, node.norm, y.place, accumulate=False)
        return y

    def experts(self, node: Node) -> Activations:
        mixture, layer, (x, routed) = self._spec.mixture, node.layer, node.inputs
        assert mixture is not None
        gate_up, down = self._table(layer, "gate_up"), self._table(layer, "down")
        first = self._constants.tiled(gate_up.first)
        read = None if routed is x else self._route(self._prepare(routed, first), layer, mixture)
        values = self._prepare(x, first)
        routes = self._route(values, layer, mixture) if read is None else read
        slots = slots_of(self._rows, mixture)
        most, rotated = max(self._spec.hidden_size, mixture.width), gate_up.sizes.form == op.TRELLIS
        rounded = plain = self._rounded("expert ", slots, most)
        if rotated and gate_up.shared:
            plain = self._rounded("plain expert ", slots, most)
        to = op.Input(values.width, False, op.Matrix(0, 0), rounded, gate_up.sizes.group_blocks, rotated=rotated)
        self._emit(op.Spread(values.place, routes, to))
        if plain is not rounded:
            self._emit(op.Spread(values.place, routes, to._replace(rounded=plain, rotated=False)))
        both = _matrix(
            self._buffer("expert gate_up", (slots, padded(self._spec.mlp_parts * mixture.width, BLOCK)), np.float32)
        )
        rows = rounded, plain
        self._multiply(gate_up, values.place, routes, rows, both, by_row=True)
        inside = _matrix(self._buffer("expert input", (slots, padded(mixture.width, BLOCK)), np.float32))
        to = op.Input(mixture.width, False, inside, rounded, down.sizes.group_blocks, rotated=rotated)
        self._emit(op.GateExperts(both, routes, to, *self._form(layer)))
        if plain is not rounded:
            self._emit(op.Spread(inside, routes, to._replace(rounded=plain, rotated=False), by_slot=True))
        out, reader = self._matrix("expert output", down.first.shape[0]), self._graph.reader(node)
        assert reader is not None
        apart = reader.norm != ""
        total = self._matrix("experts", self._spec.hidden_size) if apart else self.of(reader)
        self._multiply(down, inside, routes, rows, out.place, by_row=False, total=total.place, fresh=apart)
        return total

    def attend(self, node: Node) -> Activations:
        """Who reads it joins the splits and applies the gates."""
        spec, layer, qkv = self._spec, node.layer, self.of(node)
        parts, latent = self._parts(qkv, layer), spec.latent
        q = self.of(node, len(node.inputs) - 1).place
        heads, alone = spec.heads_of(layer), spec.mixer(layer) == "shared"
        q_norm, k_norm = (f"layers.{layer}.{part}_norm" if spec.qk_norm else "" for part in "qk")
        if spec.qk_norm and spec.qk_norm_form == "all":
            for norm, x in zip((q_norm, k_norm)[: 1 if alone else 2], parts, strict=False):
                self._settle(x, norm, x.place, accumulate=False)
            q_norm = k_norm = ""
        k_norm = "" if alone else k_norm
        stored = self._cache.stored(spec.cache_of(layer))
        reflection, mean = self._constants.basis(spec.cache_of(layer))
        half, cos, sin = self._constants.turns(layer)
        self._emit(
            op.Heads(
                q=q,
                kv=NOWHERE if alone else parts[1].place,
                heads=heads.heads,
                kv_heads=heads.kv_heads,
                dim=heads.dim,
                half=half,
                cos=cos,
                sin=sin,
                q_norm=self._constants.vector(q_norm) if q_norm else 0,
                k_norm=self._constants.vector(k_norm) if k_norm else self._constants.ones() if latent else 0,
                eps=spec.eps_of(f"layers.{layer}.q_norm"),
                scale=heads.dim**-0.5,
                stored=stored,
                reflection=reflection,
                mean=mean,
                norm_last=spec.qk_norm_form == "after_rope",
                growth=self._constants.growth,
                v_norm=self._constants.ones() if spec.v_norm or latent else 0,
                latent=latent.rank if latent else 0,
                alone=alone,
            )
        )
        widest = max(spec.heads_of(own).dim for own in spec.attention_layers)
        part = padded(widest, LANES) + LANES
        most = max(spec.heads_of(own).heads for own in range(spec.num_layers))
        partial = self._buffer("partial", (self._rows * self._cache.max_splits * most * part,), np.float32)
        self._emit(
            op.Attend(
                q=q,
                heads=heads.heads,
                kv_heads=heads.kv_heads,
                dim=heads.dim,
                window=spec.windows[layer] or 0,
                rows=RUN_ROWS,
                stored=stored,
                out=address_of(partial),
                exact=self._cache.exact(layer),
                cap=spec.score_cap or 0.0,
            )
        )
        return Activations(q, heads.heads * spec.attended_dim(layer))

    def _parts(self, qkv: Activations, layer: int) -> tuple[Activations, ...]:
        """Queries, keys, values and gates, as far as the block has them."""
        parts, start = [], 0
        for width in self._spec.attention_widths(layer):
            parts.append(replace(qkv, place=op.Matrix(qkv.place.at + 4 * start, qkv.place.stride), width=width))
            start += width
        return tuple(parts)

    def convolve(self, node: Node) -> Activations:
        """Written by who reads it."""
        x = self.of(node)
        return replace(x, width=x.width // 3)

    def delta(self, node: Node) -> Activations:
        """Who reads it writes the norm and the gates."""
        x, layer = self.of(node), node.layer
        delta, prefix, taps = self._spec.delta, f"layers.{layer}", self._spec.conv_kernel_size
        assert delta is not None
        width, heads = padded(delta.channels, LANES), padded(delta.value_heads, LANES)
        mixed = self._matrix("mixed", width + 2 * heads)
        waiting = 2 * SMALL_STEP
        before = _matrix(self._buffer("before", (self._options.slots * waiting, width + 2 * heads), np.float32))
        out, state = self._matrix("recurred", delta.value_width), self._cache.state(layer)
        weight = self._constants.taps(f"{prefix}.conv", taps, width)
        self._emit(
            op.Mix(
                x=x.place,
                out=mixed.place,
                before=before,
                waiting=waiting,
                channels=delta.channels,
                keys=delta.key_width,
                heads=delta.value_heads,
                taps=taps,
                weight=weight,
                decay=self._constants.vector(f"{prefix}.decay"),
                dt=self._constants.vector(f"{prefix}.dt"),
                bias=self._constants.vector(f"{prefix}.conv_bias") if self._spec.conv_bias else 0,
                mamba=delta.mamba,
                most=delta.most,
                state=state,
            )
        )
        self._emit(
            op.DeltaRule(
                x=mixed.place,
                before=before,
                waiting=waiting,
                out=out.place,
                channels=delta.channels,
                key_heads=delta.key_heads,
                heads=delta.value_heads,
                key_dim=delta.key_dim,
                dim=delta.value_dim,
                scale=delta.key_dim**-0.5,
                rows=self._rows + waiting,
                skip=self._constants.vector(f"{prefix}.skip") if delta.mamba else 0,
                state=state,
            )
        )
        return out

    def gate(self, node: Node) -> Activations:
        """Written by who reads it, but for where gates end."""
        gate, up = self.of(node), self.of(node, len(node.inputs) - 1)
        if gate is up:
            inside = replace(gate, width=gate.width // self._spec.mlp_parts)
            if (cut := self._spec.cut(node.layer)) is not None:
                self._emit(op.Cut(inside.place, inside.width, cut))
            return inside
        assert up.place.at == gate.place.at + 4 * gate.width
        return gate

    def add(self, node: Node) -> Activations:
        """Without a norm, what is added was written there."""
        x, y = self.of(node), self.of(node, 1)
        if node.norm:
            for at in range(1, x.width // y.width) if x.width > y.width else (0,):
                self._settle(y, node.norm, self._stream(x, at).place, accumulate=True, scale=node.scale)
        return x

    def spread(self, node: Node) -> Activations:
        C, count = self._spec.hidden_size, len(node.inputs)
        out = replace(self._matrix("streams", count * padded(C, BLOCK)), width=count * C)
        first = self._stream(out, 0)
        self._level(self.of(node), None, first, C**0.5)
        for at in range(1, count):
            self._level(self.of(node, at), first, self._stream(out, at), least=LEAST_SQUARE / C)
        return out

    def merge(self, node: Node) -> Activations:
        out, first, share = self._matrix("stream", self._spec.hidden_size), self.of(node), 1 / len(node.inputs)
        self._level(first, None, out, share)
        for at in range(1, len(node.inputs)):
            self._level(self.of(node, at), first, out, share, least=LEAST_SQUARE, accumulate=True)
        return out

    def predict(self, node: Node) -> Activations:
        return self._mingle(node, "predict")

    def correct(self, node: Node) -> Activations:
        assert self.of(node).place == self.of(node, 1).place  # the block changed the first stream in place
        return self._mingle(node, "correct")

    def _mingle(self, node: Node, kind: str) -> Activations:
        x, C, altup = self.of(node), self._spec.hidden_size, self._spec.altup
        assert altup is not None
        wide, prefix = padded(C, BLOCK), f"layers.{node.layer}.altup_"
        self._emit(
            op.Streams(
                x=x.place,
                first=self._matrix("predicted", C).place,
                streams=altup.streams,
                width=C,
                padded=wide,
                eps=self._spec.eps_of(f"{prefix}norm"),
                router=self._constants.stream_router(node.layer, wide),
                weight=self._constants.vector(prefix + kind),
                corrects=kind == "correct",
            )
        )
        return x

    def _level(
        self,
        x: Activations,
        like: Activations | None,
        out: Activations,
        scale: float = 1.0,
        *,
        least: float = 0.0,
        accumulate: bool = False,
    ) -> None:
        C, of = self._spec.hidden_size, NOWHERE if like is None else like.place
        self._emit(op.Level(x.place, of, C, padded(C, BLOCK), least, scale, out.place, accumulate))

    def _stream(self, x: Activations, at: int) -> Activations:
        """One of several streams."""
        C = self._spec.hidden_size
        return replace(x, place=op.Matrix(x.place.at + 4 * padded(C, BLOCK) * at, x.place.stride), width=C)

    def rows(self, node: Node) -> Activations:
        x = self.of(node)
        out = replace(self._matrix("last", x.width), wanted=True)
        self._emit(op.Gather(x.place, x.width, out.place))
        return out

    def read(self, node: Node) -> Activations:
        """Written by who reads it."""
        x = self._stream(self.of(node), node.stream) if node.stream else self.of(node)
        return replace(x, width=self._spec.read_width(node.norm))

    leave = cap = Interpreter.left  # the decoder and the program's last instruction do these

    # Writing instructions

    def _settle(self, x: Activations, norm: str, out: op.Matrix, *, accumulate: bool, scale: str = "") -> None:
        """Write the norm of activations that stay in float32."""
        weight, factor = self._constants.vector(norm), self._constants.vector(scale) if scale else 0
        self._emit(op.NormInplace(x.place, x.width, weight, self._spec.eps_of(norm), out, accumulate, factor))

    def _channels(self, packed: PackedLinear) -> tuple[int, int]:
        """Channels per 1024 chosen per row, and those shared by all rows of a prompt.

        Raises:
            RequestError: there are some, and no residuals.
        """
        name = packed.name
        k_chunk, shared = k_chunk_of(self._k_chunk, name), 0
        if self._prompt is not None:
            shared = k_chunk_of(self._prompt, name)
            k_chunk, shared = (k_chunk if shared else 0, 0) if layer_kind(name) == "head" else (0, shared)
        lacking = packed.residual is None or packed.rank_maximum is None or packed.mean_square is None
        if max(k_chunk, shared) and lacking:
            raise RequestError(
                f"k_chunk is {max(k_chunk, shared)}, but {name} was stored without residuals; use k_chunk 0, or "
                "quantize the model again with residual bits"
            )
        return k_chunk, shared

    def _table(self, layer: int, kind: str) -> Table:
        """The experts of a block. If all channels are compensated, rows share them."""
        names = self._expert_names(layer, kind)
        k_chunk, shared = self._channels(self._model.linear(names[0]))
        if k_chunk == CHUNK and not self._options.measure_recall:
            k_chunk, shared = 0, CHUNK
        return self._tables.table(names, k_chunk, shared)

    def _expert_names(self, layer: int, kind: str) -> list[str]:
        assert self._spec.mixture is not None
        return [f"layers.{layer}.experts.{expert}.{kind}" for expert in range(self._spec.mixture.num_experts)]

    def _route(self, x: Activations, layer: int, mixture: MixtureSpec) -> Routes:
        """Write the instructions that send rows to experts."""
        experts, chosen, pairs = mixture.num_experts, mixture.experts_per_token, self._rows * mixture.experts_per_token
        weight = self._constants.router(layer, mixture, x.width)
        logits = _matrix(self._buffer("router logits", (self._rows, padded(mixture.scores, LANES)), np.float32))
        bias = self._constants.vector(f"{router_of(layer)}_bias") if mixture.bias else 0
        self._emit(op.Score(x.place, padded(x.width, BLOCK), weight, mixture.scores, logits, bias))
        records = (("counts", 1, COUNTS), ("segments", min(experts, pairs), SEGMENT), ("pairs", pairs, PAIR))
        routes = Routes(*(address_of(self._buffer(f"router {name}", (count,), kind)) for name, count, kind in records))
        numbers = address_of(self._buffer("router chosen", (pairs,), np.int64))
        shares = address_of(self._buffer("router shares", (pairs,), np.float32))
        self._emit(
            op.Route(
                logits,
                experts,
                chosen,
                mixture.shared,
                gated=mixture.gated,
                sigmoids=mixture.scoring == "sigmoid",
                correction=self._constants.vector(f"{router_of(layer)}_correction") if mixture.corrected else 0,
                scale=mixture.scale,
                normalized=mixture.normalized,
                chosen_at=numbers,
                shares_at=shares,
                to=routes,
            )
        )
        return routes

    def _multiply(
        self,
        table: Table,
        values: op.Matrix,
        routes: Routes,
        x: tuple[op.Quantized, op.Quantized],
        out: op.Matrix,
        *,
        by_row: bool,
        total: op.Matrix = NOWHERE,
        fresh: bool = False,
    ) -> None:
        """Write the choice of channels, then the product of rows with their experts, added to `total` if given."""
        packed, chosen = table.first, total_budget(table.first.shape[1], table.k_chunk)
        kind = layer_kind(packed.name)
        experts = op.Experts(table.address, table.sizes, routes, *x, by_row, out, total, fresh, kept=table.shared > 0)
        if chosen:
            select = self._selection(Activations(values, packed.shape[1]), packed, table.k_chunk, chosen)
            if not by_row:
                select = self._selection_by_slot(select, table, routes)
            self._emit(select, kind=kind)
            experts = experts._replace(total=chosen, values=values, chosen=select.chosen)
        self._emit(experts, kind=kind)

    def _selection_by_slot(self, select: op.Select, table: Table, routes: Routes) -> op.Select:
        """The choice of channels of rows that each belong to one expert."""
        assert self._spec.mixture is not None
        self._selections[False] += self._spec.mixture.experts_per_token - 1
        shape = (slots_of(self._rows, self._spec.mixture), padded(select.width, LANES))
        chosen = _matrix(self._buffer("expert chosen", shape, np.int32))
        if select.static:
            layer, kind = int(table.first.name.split(".")[1]), layer_kind(table.first.name)
            static = self._tables.static(self._expert_names(layer, kind), table.k_chunk)
            select = select._replace(static=static)
        return select._replace(chosen=chosen, routes=routes)

    def _prepare(self, node: Node, tiled: TiledLinear) -> Activations:
        """Write the instruction that computes a node in float32 and INT8: norm, gate, merge of attention's splits."""
        x, spec, prefix = self.values[node], self._spec, f"layers.{node.layer}"
        assert tiled.groups == -(-padded(x.width, BLOCK) // max(BLOCK // 2, BLOCK * tiled.group_blocks))
        out = replace(self._matrix("input", self._widest_input), width=x.width, wanted=x.wanted)
        per_token, rounded = tiled.group_scales is not None, self._rounded()
        to = op.Input(
            width=x.width,
            wanted=x.wanted,
            out=out.place,
            rounded=rounded if per_token else rounded._replace(sums=0),
            group_blocks=tiled.group_blocks,
            per_token=per_token,
            rotated=tiled.form == op.TRELLIS,
        )
        if node.kind == "attend":
            heads, gates = (
                spec.heads_of(node.layer),
                self._parts(self.of(node), node.layer)[-1].place if spec.gated else NOWHERE,
            )
            sinks = self._constants.vector(f"{prefix}.sinks") if spec.sinks else 0
            partial = address_of(self._buffers["partial"])
            softplus, each = spec.gate_form == "softplus", heads.dim if spec.head_gates else 1
            given = spec.attended_dim(node.layer)
            self._emit(op.Merge(partial, to, heads.heads, heads.dim, given, gates, sinks, softplus, each))
        elif node.kind == "gate":
            self._emit(op.Gate(x.place, to, *self._form(node.layer)))
        elif node.kind == "convolve":
            self._emit(self._convolution(x, node.layer, to))
        elif node.kind == "delta":
            assert spec.delta is not None
            inputs, gain = self.of(node).place, self._constants.vector(f"{prefix}.gain") if spec.delta.normed else 0
            gates = op.Matrix(inputs.at + 4 * spec.delta.inputs, inputs.stride)
            norms = spec.delta.key_heads if spec.delta.mamba else spec.delta.value_heads
            width = spec.delta.value_width // norms
            self._emit(op.Finish(x.place, gates, to, gain, norms, width, spec.gain_eps, spec.delta.mamba))
        else:
            weight = self._constants.vector(node.norm) if node.norm else 0
            self._emit(op.Norm(x.place, to, weight, spec.eps_of(node.norm)))
        return out

    def _form(self, layer: int) -> tuple[int, float, int]:
        """What a block's MLP does between its matrices, as of `Gate`."""
        slopes = self._constants.slopes(layer) if self._spec.activation == "xielu" else 0
        return op.FORMS[self._spec.activation], self._spec.gate_limit, slopes

    def _convolution(self, x: Activations, layer: int, to: op.Input) -> op.Convolve:
        """The gated short convolution of a layer."""
        prefix, taps = f"layers.{layer}", self._spec.conv_kernel_size
        return op.Convolve(
            x=x.place,
            to=to,
            weight=self._constants.taps(f"{prefix}.conv", taps, padded(x.width, BLOCK)),
            bias=self._constants.vector(f"{prefix}.conv_bias") if self._spec.conv_bias else 0,
            taps=taps,
            state=self._cache.state(layer),
        )

    def _rounded(self, owner: str = "", rows: int = 0, most: int = 0) -> op.Quantized:
        """Buffers of INT8 activations, with room for groups of half a block; by default those of a step's rows."""
        rows, width = rows or self._rows, padded(most or self._widest_input, BLOCK)
        codes = self._buffer(f"{owner}codes", (rows, padded(width, PIECE)), np.int8)
        kinds = {"scales": np.float32, "shifts": np.float32, "sums": np.int32}
        factors = (self._buffer(f"{owner}{name}", (rows, 2 * width // BLOCK), kind) for name, kind in kinds.items())
        return op.Quantized(address_of(codes), *map(address_of, factors))

    def _selection(self, values: Activations, packed: PackedLinear, k_chunk: int, total: int) -> op.Select:
        """The instruction that chooses channels."""
        static, border, options = 0, op.Border(0.0, 0.0, 0.0), self._options
        if options.select == "static":
            static = self._constants.static(packed, k_chunk)
        if options.select == "approx" and packed.rank_maximum is not None:
            found = buckets(np.asarray(packed.rank_maximum), total)
            border = op.Border(found.b15, found.upper_scale, found.lower_scale)
        self._selections[values.wanted] += 1
        return op.Select(
            x=values.place,
            width=packed.shape[1],
            wanted=values.wanted,
            k_chunk=k_chunk,
            total=total,
            chosen=self._chosen(),
            mode=MODES[options.select],
            border=border,
            static=static,
            seed=options.seed % 2**63,
            layer=self._names[packed.name],
            measure=options.measure_recall,
            hits=address_of(self.recall_sums),
        )

    def _product(
        self,
        values: Activations,
        packed: PackedLinear,
        tiled: TiledLinear,
        total: int,
        shared: int,
        to: Destination,
    ) -> Activations:
        kind = layer_kind(packed.name)
        tiles = shared and (has_residuals_beside(packed) or (shared == CHUNK and not self._few))
        whole = packed.residual if tiles else None
        if whole is not None and whole.bits != op.WHOLE_BITS:
            whole = None
        out = replace(to.place, wanted=values.wanted)
        x = plain = self._rounded()
        if whole is not None and shared < CHUNK:
            plain = self._picked(values, packed, tiled, shared)
        elif tiled.form == op.TRELLIS and shared:
            plain = self._unrotated(values, tiled)
        linear = op.Linear(
            weights=tiled.weights,
            x=x,
            wanted=values.wanted,
            out=out.place,
            bias=self._constants.bias(packed),
            accumulate=to.accumulate,
            plain=plain,
        )
        if total and packed.residual is not None:
            residual = self._constants.residual(packed)
            linear = linear._replace(total=total, residual=residual, values=values.place, chosen=self._chosen())
        elif whole is not None:
            self._residuals.append(self._constants.whole(packed, whole, shared))
            linear = linear._replace(whole=self._residuals[-1].whole)
        elif shared:
            linear = linear._replace(residual=self._constants.scaled(packed), kept=self._constants.kept(packed, shared))
        if self._options.exact is not None:
            exact = self._constants.exact(packed.name, self._options.exact)
            linear = linear._replace(values=values.place, exact=exact)
        self._emit(linear, kind=kind)
        return out

    def _picked(self, values: Activations, packed: PackedLinear, tiled: TiledLinear, shared: int) -> op.Quantized:
        """Write the INT8 rows of the channels that prompt rows share, side by side."""
        rounded = self._rounded("plain ")._replace(sums=0)
        out = self._matrix("picked", self._widest_input).place
        channels = self._constants.static(packed, shared)
        to = op.Input(total_budget(packed.shape[1], shared), values.wanted, out, rounded, tiled.group_blocks)
        self._emit(op.Pick(values.place, channels, to))
        return rounded

    def _unrotated(self, values: Activations, tiled: TiledLinear) -> op.Quantized:
        """Write the INT8 rows that residuals meet, where those of the weights are rotated."""
        rounded = self._rounded("plain ")._replace(sums=0)
        to = op.Input(values.width, values.wanted, values.place, rounded, tiled.group_blocks)
        self._emit(op.Norm(values.place, to, 0, 0.0))
        return rounded

    def _panel(self, packed: PackedLinear, tiled: TiledLinear, k_chunk: int, to: Destination) -> Activations:
        """Write the product of prompt rows with the matrix and the residuals of some channels."""
        self._emit(
            op.Panel(
                weights=tiled.weights,
                x=self._rounded(),
                out=to.place.place,
                bias=self._constants.bias(packed),
                accumulate=to.accumulate,
                residual=self._constants.scaled(packed),
                kept=self._constants.kept(packed, k_chunk),
            ),
            kind=layer_kind(packed.name),
        )
        return to.place

    def _output(self, packed: PackedLinear) -> Activations:
        """The buffer of a layer's outputs, as wide as the widest of its type needs; that of `inner` is twice that."""
        kind = _buffer_of(packed.name)
        most = self._widest[kind] * (2 if kind == "inner" else 1)
        return replace(self._matrix(kind, most), width=packed.shape[0])

    def _chosen(self) -> op.Matrix:
        return _matrix(self._buffer("chosen", (self._rows, padded(self._widest_input, LANES)), np.int32))

    def _matrix(self, name: str, width: int) -> Activations:
        """The named activation buffer, zero-padded to whole blocks of channels."""
        return Activations(_matrix(self._buffer(name, (self._rows, padded(width, BLOCK)), np.float32)), width)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if name not in self._buffers:
            self._buffers[name] = self._arena.zeros(shape, dtype)
        assert self._buffers[name].shape == shape
        return self._buffers[name]

    def _emit(self, instruction: op.Instruction, *, kind: str = "") -> None:
        self._program.append(instruction)
        self._kinds.append(kind)


def _buffer_of(name: str) -> str:
    """The buffer of a linear layer's outputs."""
    if name.endswith(JOIN):
        return "stream"
    own = name.split(".", 2)[-1]
    if own.startswith(("spread", "merge")):
        return own.replace("merge", "spread")
    if own == LAUREL_LINEARS[0]:  # whose channels behind the last are zeros
        return own
    if is_of_tokens(name) and name.endswith("gate_up"):
        return name.split(".")[2]
    if name.endswith(STATE_QKV):
        return "state"
    return "queries" if name.endswith(QUERIES) else {"head": "logits"}.get(kind := layer_kind(name), kind)


def slots_of(rows: int, mixture: MixtureSpec) -> int:
    """Most slots that rows take in the order of experts, each expert's in row blocks of its own."""
    pairs = rows * mixture.experts_per_token
    return pairs + (ROW_PADDING - 1) * min(mixture.num_experts, pairs)


def _matrix(array: npt.NDArray[Any]) -> op.Matrix:
    return op.Matrix(address_of(array), array.strides[0])
