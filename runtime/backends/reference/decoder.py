"""Reference decoder: runs the graph of `models.architecture` with plain torch operations.

Weights are dequantized to float32 at load, so it needs four bytes per parameter (eight in compensated layers). It is
meant for small models and for checking the other backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from models.architecture import Eager, Node, step_graph
from models.packed import PackedLinear, Weights
from models.rope import query_growth, tables
from models.routing import route
from models.spec import first_expert, router_of
from runtime.backends.decoder import (
    DecoderOptions,
    Float32Array,
    Step,
    check_step,
    compensation_of,
    options_of_mtp,
    sensitive,
)
from runtime.backends.operations.layers import clamped_gate, gelu_gate, rms_norm, rotate, silu_gate, soft_cap, to_basis
from runtime.backends.operations.linear import gemv
from runtime.backends.reference.cache import ReferenceCache
from runtime.backends.reference.linear import ReferenceLinear
from runtime.backends.reference.states import StateMixers
from runtime.drafting import LARGEST_GAMMA
from runtime.errors import InvalidActivationError
from runtime.kv.basis import key_bases
from runtime.kv.kinds import KINDS, CacheKind


def _packed_bytes(linear: PackedLinear) -> int:
    """Bytes read by one product with the matrix, including bias, without residuals."""
    offsets = (linear.zeros, linear.minimums, linear.group_scales, linear.group_minimums)
    parts = (linear.codes, linear.scales, linear.codebook, linear.bias, *offsets)
    return sum(part.nbytes for part in parts if part is not None)


class ReferenceDecoder:
    """A stored model in plain torch, float32. Implements `runtime.backends.decoder.Decoder`.

    Raises:
        RequestError: options.k_chunk asks for compensation that the stored model has no residuals for, or is malformed.
    """

    backend = "reference"

    def __init__(self, model: Weights, options: DecoderOptions, head: ReferenceLinear | None = None) -> None:
        """Load a model; `head` is that of the model that this one is a block of."""
        self.spec = model.spec
        self.options = replace(options, sensitive_layers=sensitive(options.sensitive_layers, model.spec))
        self.weight_bytes = 0
        self.linears: dict[str, ReferenceLinear] = {}
        names = {name: index for index, name in enumerate(self.spec.linear_names())}
        for name in names:
            if name == "head" and head is not None:
                self.linears[name] = head
                continue
            packed = model.linear(name)
            self.weight_bytes += int(_packed_bytes(packed) * self.spec.share_read(name))
            self.linears[name] = ReferenceLinear(packed, names[first_expert(name)], options)
        self.vectors, self.routers = (
            {name: torch.from_numpy(np.array(model.vector(name), np.float32)) for name in names}
            for names in (self.spec.vector_names(), self.spec.router_names())
        )
        self.weight_bytes += sum(weight.nbytes for weight in (*self.vectors.values(), *self.routers.values()))
        self.embedding = torch.from_numpy(np.array(model.embedding(), np.float16))
        self.tokens = torch.from_numpy(np.array(model.token_table(), np.float16)) if self.spec.token_width else None
        self.stream = torch.zeros(0, self.spec.hidden_size)
        """float32 [M, C], the residual stream behind the last block, of the last step that asked for logits."""
        self._remember(model)
        self.mtp: ReferenceDecoder | None = None
        if options.mtp and model.mtp is not None:
            self.mtp = ReferenceDecoder(model.mtp, options_of_mtp(options), self.linears["head"])
            self.kv_bytes += self.mtp.kv_bytes

    def _remember(self, model: Weights | None) -> None:
        """Prepare all that depends on positions: rotations and the cache, in the basis that `model` knows."""
        spec, options = self.spec, self.options
        self.turns = {
            rope: tuple(torch.from_numpy(table) for table in tables(rope, options.context)) for rope in spec.ropes
        }
        growth = query_growth(spec, np.arange(options.context))
        self.growth = None if growth is None else torch.from_numpy(growth)
        self.cache = ReferenceCache(
            KINDS[options.kv],
            spec,
            context=options.context,
            slots=options.slots,
            max_rows=options.max_rows,
            pages=options.pages,
        )
        self.kv_bytes = self.cache.nbytes
        self.bases = [] if model is None else bases_of(self.cache.kind, model)
        self.mixers = StateMixers(self.spec, self.vectors, self.cache.states) if self.cache.states else None

    @property
    def recall(self) -> float | None:
        """Mean recall over all selections of all layers so far; None if it is not measured."""
        selections = sum(linear.selections for linear in self.linears.values())
        if selections == 0:
            return None
        return sum(linear.recall_sum for linear in self.linears.values()) / selections

    def forward(self, step: Step) -> Float32Array:
        """Run one step.

        Returns:
            See `runtime.backends.decoder.Decoder.forward`.

        Raises:
            RequestError: a number is out of range, or the cache cannot take the rows: see
                `runtime.kv.control.KVCache.begin`.
            InvalidActivationError: a NaN or infinity reached a selection or the logits.
        """
        check_step(step, self.spec, self.options)
        with torch.inference_mode():
            return _finite(_Pass(self, step).run(step_graph(self.spec)), step)

    def hidden(self, step: Step) -> Float32Array:
        check_step(step, self.spec, self.options)
        with torch.inference_mode():
            return _finite(_Pass(self, step).run(step_graph(self.spec, hidden=True)), step)

    def left(self) -> Float32Array:
        with torch.inference_mode():
            return rms_norm(self.stream, self.vectors["norm"], self.spec.norm_eps).numpy()

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        """See `runtime.backends.decoder.Decoder.set_k_chunk`. Thread blocks are ignored."""
        for linear in self.linears.values():
            linear.set_k_chunk(k_chunk)
        self.options = replace(self.options, k_chunk=k_chunk, n_tb=dict(n_tb or {}))

    def set_prompt_k_chunk(self, prompt_k_chunk: Mapping[str, int] | int) -> None:
        for linear in self.linears.values():
            linear.set_prompt_k_chunk(prompt_k_chunk)
        self.options = replace(self.options, prompt_k_chunk=prompt_k_chunk)

    def set_draft_k_chunk(self, draft_k_chunk: Mapping[str, int] | int) -> None:
        for linear in self.linears.values():
            linear.set_draft_k_chunk(draft_k_chunk)
        self.options = replace(self.options, draft_k_chunk=draft_k_chunk)

    def set_sensitive_layers(self, layers: Sequence[int]) -> None:
        self.options = replace(self.options, sensitive_layers=sensitive(layers, self.spec))

    def session(self) -> AbstractContextManager[None]:
        """Nothing to keep ready: torch manages its own threads."""
        return nullcontext()

    def close(self) -> None:
        """Release the buffers. Safe to call twice."""
        self.linears.clear()
        self.cache.close()
        if self.mtp is not None:
            self.mtp.close()


def _finite(found: torch.Tensor, step: Step) -> Float32Array:
    """The result of a step; raises if it is not finite."""
    if not bool(torch.isfinite(found).all()):
        raise InvalidActivationError(
            f"a NaN or infinity reached the logits of position {int(step.positions.max(initial=0))}; the model is "
            "damaged or its numbers left the range of its format: verify it, or quantize it again"
        )
    return found.numpy()


def bases_of(kind: CacheKind, model: Weights) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Reflection and mean key of each layer with a cache, float32 [H_kv, D]; none if the kind stores keys unturned."""
    bases = key_bases(kind, model)
    return [(torch.from_numpy(basis.reflection), torch.from_numpy(basis.mean)) for basis in bases]


class _Pass(Eager):
    """One step.

    A few rows outside a prompt are computed one by one, so that each has the same bits as alone: torch's products sum
    in an order that depends on the number of rows, and greedy answers of drafted or batched steps would diverge from
    those of single ones. Many rows belong to a text being scored, and are computed together.
    """

    def __init__(self, decoder: ReferenceDecoder, step: Step) -> None:
        decoder.cache.begin(step.slots, step.positions, flush=step.flush, draft=step.draft)
        if decoder.mixers is not None:
            decoder.mixers.absorb(step.slots, step.positions)
        self._decoder = decoder
        self.spec = decoder.spec
        self._way, self._draft = compensation_of(step, decoder.options), step.draft
        self._ids = torch.from_numpy(np.asarray(step.tokens, np.int64))
        self._slots = torch.from_numpy(np.asarray(step.slots, np.int64))
        self._positions = torch.from_numpy(np.asarray(step.positions, np.int64))
        self._logit_rows = torch.from_numpy(np.asarray(step.logit_rows, np.int64))
        self._stream = step.stream
        self._linear_positions = self._positions
        self._singly = not step.prefill and len(step.tokens) <= LARGEST_GAMMA + 1

    def embed(self, node: Node) -> torch.Tensor:  # noqa: ARG002  the first node
        return self._decoder.embedding[self._ids].float()

    def tokens(self, node: Node) -> torch.Tensor:
        if node.layer < 0:
            return self.embed(node)
        assert self._decoder.tokens is not None
        width = self.spec.token_width
        return self._decoder.tokens[self._ids, node.layer * width : (node.layer + 1) * width].float()

    def enter(self, node: Node) -> torch.Tensor:  # noqa: ARG002  the first node
        return torch.from_numpy(np.array(self._stream, np.float32))

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._decoder.vectors[name], self.spec.eps_of(name))

    def linear(self, node: Node) -> torch.Tensor:
        x, layer, positions = self.of(node), self._decoder.linears[node.name], self._linear_positions
        return self._by_rows(x, lambda row: layer(x[row], positions[row], way=self._way, draft=self._draft))

    def rotate(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        rope = self.spec.rope_of(layer)
        assert rope is not None
        cos, sin = (table[self._positions] for table in self._decoder.turns[rope])
        return rotate(self.heads(x, layer), cos, sin).flatten(1)

    def attention(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: int) -> torch.Tensor:
        cache, window, owner = self._decoder.cache, self.spec.windows[layer], self.spec.cache_of(layer)
        q, reflection, mean = self.heads(q, layer), None, torch.zeros(())
        if self._decoder.growth is not None:
            q = q * self._decoder.growth[self._positions, None, None]
        if self._decoder.bases:
            reflection, mean = self._decoder.bases[self.spec.attention_layers.index(owner)]
            heads = self.spec.heads_of(owner)
            q = to_basis(q, reflection.repeat_interleave(heads.heads // heads.kv_heads, dim=0))
        if k is not None and v is not None:
            k, v = self.heads(k, layer), self.heads(v, layer)
            if self.spec.v_norm:
                v = rms_norm(v, torch.ones(()), self.spec.eps_of("v_norm"))
            k = k if reflection is None else to_basis(k, reflection) - mean
            cache.append(layer, self._slots, self._positions, k, v)
        slots, positions = self._slots, self._positions
        draft = self._draft and layer not in self._decoder.options.sensitive_layers
        sinks = self._decoder.vectors[f"layers.{layer}.sinks"] if self.spec.sinks else None
        return self._by_rows(
            q,
            lambda row: cache.attend(owner, q[row], slots[row], positions[row], window, draft=draft, sinks=sinks),
        ).flatten(1)

    def delta(self, node: Node) -> torch.Tensor:
        assert self._decoder.mixers is not None
        return self._decoder.mixers.delta_rule(self.of(node), node.layer, self._slots, self._positions)

    def convolve(self, node: Node) -> torch.Tensor:
        assert self._decoder.mixers is not None
        return self._decoder.mixers.convolve(self.of(node), node.layer, self._slots, self._positions)

    def norm(self, node: Node) -> torch.Tensor:
        return self.rms(self.of(node), node.norm)

    def experts(self, node: Node) -> torch.Tensor:
        x, read = self.of(node), self.of(node, 1)
        return self._by_rows(x, lambda row: self._mixture(x[row], read[row], self._positions[row], node.layer))

    def _mixture(self, x: torch.Tensor, read: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
        """The experts of some rows, one after the other; the router reads `read`. float32 [M, C] -> the same."""
        assert self.spec.mixture is not None
        name = router_of(layer)
        bias, correction = (self._decoder.vectors.get(f"{name}_{kind}") for kind in ("bias", "correction"))
        chosen, shares = route(gemv(read, self._decoder.routers[name], bias), self.spec.mixture, correction)
        total = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = (
                partial(
                    self._decoder.linears[f"layers.{layer}.experts.{expert}.{kind}"],
                    positions=positions[rows],
                    way=self._way,
                    draft=self._draft,
                )
                for kind in ("gate_up", "down")
            )
            share = shares[rows, places, None]
            out = down(self.activated(gate_up(x[rows]), layer) * share)
            if (own := self._decoder.linears[f"layers.{layer}.experts.{expert}.down"].bias) is not None:
                out = out + (share - 1) * own
            total = total.index_add(0, rows, out)
        return total

    def vector(self, name: str) -> torch.Tensor:
        return self._decoder.vectors[name]

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.spec.activation == "clamped_silu":
            return clamped_gate(gate, up, self.spec.gate_limit)
        return (silu_gate if self.spec.activation == "silu" else gelu_gate)(gate, up)

    def rows(self, node: Node) -> torch.Tensor:
        self._linear_positions, self._decoder.stream = self._positions[self._logit_rows], self.of(node)
        return self.of(node)[self._logit_rows]

    def cap(self, node: Node) -> torch.Tensor:
        assert self.spec.logit_cap is not None
        return soft_cap(self.of(node), self.spec.logit_cap)

    def _by_rows(self, x: torch.Tensor, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Compute the rows of x: one by one, or all together for a prompt."""
        if not self._singly or len(x) < 2:
            return compute(slice(None))
        return torch.cat([compute(slice(i, i + 1)) for i in range(len(x))])
