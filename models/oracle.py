"""The plain full-precision decoder: the graph of `models.architecture` in torch operations.

It is the oracle that backends are measured against, and it runs block by block for calibration and quantization. All
rows of a batch have the same length. `B` batch, `S` query length, `T` cached length, `H`/`H_kv` heads, `D` head_dim,
`C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from models import recurrent, rope
from models.architecture import Eager, Node, block_graph, head_graph, step_graph
from models.carried import Carried, begin, carry
from models.routing import route
from models.spec import CLAMPED_GAIN, ModelSpec, RopeSpec, expert_of, router_of

_HEAD_ROWS = 8192
"""Output channels of the head converted at a time, if it isn't kept in memory."""

Observer = Callable[[str, Tensor], None]
"""Called with a linear layer's name and its input [B, S, K] before the layer runs; and with the name of a norm behind
such a layer and its input."""

Trace = Callable[[str, Tensor, Tensor], None]
"""Called with a linear layer's name, its input [B, S, K] and its output [B, S, N] after the layer ran."""


KeyObserver = Callable[[int, Tensor, Tensor], None]
"""Called with a block's number, its queries [B, H, S, D] and its keys [B, H_kv, S, D], both rotated; not where keys are
another block's."""


AttentionObserver = Callable[[int, Tensor], None]
"""Called with a block's number and the attention that each token receives, summed over the tokens that look at it and
averaged over heads: float32 [B, T]."""


class Weights(Protocol):
    """The source of the oracle's weights, such as `models.checkpoint.Checkpoint`."""

    @property
    def spec(self) -> ModelSpec: ...

    def vector(self, name: str) -> Tensor:
        """A norm's weight or another of a block's vectors, float32 [width], or a router's, float32 [E, C]."""
        ...

    def linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A linear layer's weight [N, K] and bias [N] or None."""
        ...

    def embedding(self) -> Tensor:
        """The embedding table [V, C]."""
        ...

    def token_rows(self, tokens: Tensor, layer: int) -> Tensor:
        """Rows of a block's own embedding table. int64 [B, S] -> [B, S, P]."""
        ...


class Rows(NamedTuple):
    """Some rows of a batch [B, S, ...]."""

    places: Tensor
    """int64 [n], counted over the whole batch."""
    batch: int
    """B."""
    length: int
    """S."""


@dataclass(slots=True)
class KVCache:
    """Keys (rotated) and values of all blocks for B sequences of the same length.

    Blocks with a state keep all their inputs, from which the state is computed again at every step: slow, and exact
    however far the sequences are cut back.
    """

    keys: Mapping[int, Tensor]
    """[B, H_kv, context, D] by block, of those with a cache."""
    values: Mapping[int, Tensor]
    """[B, H_kv, context, D] by block."""
    inputs: Mapping[int, Tensor]
    """[B, context, width] by block, of those with a state."""
    context: int
    """Positions there is room for."""
    length: int = 0
    """T, positions filled. Setting it lower cuts all sequences back."""


class Oracle:
    """A model in full precision on the CPU.

    Args:
        weights: A checkpoint, or anything else that provides `Weights`.
        dtype: Of weights and activations: float64, float32 or bfloat16. Norms and softmax are at least float32 inside.
        observe: Sees the input of every linear layer; None for no observer.
        observe_keys: Sees the queries and keys of every block.
        observe_attention: Sees the attention that tokens receive in every block; takes [B, H, S, T] to compute.
        trace: Sees input and output of every linear layer; with it, what `block` does is recorded for autograd.
        products: Of the operands of blocks' linear layers and of their outputs, where not `dtype`; of attention's too,
            where nobody observes.
        resident: Whether weights stay in memory once used. If not, only those of the block (or table, or head) that
            ran last do.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype = torch.float32,
        *,
        observe: Observer | None = None,
        observe_keys: KeyObserver | None = None,
        observe_attention: AttentionObserver | None = None,
        trace: Trace | None = None,
        products: torch.dtype | None = None,
        resident: bool = True,
    ) -> None:
        self.spec = weights.spec
        self.dtype = dtype
        self.observe = observe
        self.observe_keys = observe_keys
        self.observe_attention = observe_attention
        self.trace = trace
        self.products = products or dtype
        self.replace: Mapping[str, Callable[[Tensor], Tensor]] = {}
        """Replacements of linear layers, by name: functions from the input [B, S, K] to the output [B, S, N]; of an
        expert's, from [n, K] to [n, N]."""
        self.rows: Rows | None = None
        """The rows of the batch that an expert reads, while its layers run."""
        self._weights = weights
        self._resident = resident
        self._table: Tensor | None = None
        self._loaded: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._tables: dict[RopeSpec, tuple[int, bool, Tensor, Tensor]] = {}

    def cache(self, batch: int, context: int) -> KVCache:
        """An empty KV cache for `batch` sequences of up to `context` tokens."""
        spec = self.spec
        widths = {layer: spec.linear_shape(spec.state_linear(layer))[0] for layer in spec.state_layers}
        heads = {layer: spec.heads_of(layer) for layer in spec.attention_layers}
        keys, values = (
            {
                layer: torch.zeros(batch, own.kv_heads, context, own.dim, dtype=self.dtype)
                for layer, own in heads.items()
            }
            for _ in range(2)
        )
        inputs = {layer: torch.zeros(batch, context, width, dtype=self.dtype) for layer, width in widths.items()}
        return KVCache(keys, values, inputs, context)

    @torch.inference_mode()
    def logits(self, tokens: Tensor, cache: KVCache | None = None, *, rows: Sequence[int] | None = None) -> Tensor:
        """Run the whole model.

        Args:
            tokens: int64 [B, S] token ids.
            cache: Holds the tokens before these, and keeps these too; None if these are all.
            rows: Which of the S positions' logits are wanted, for example [-1]; None = all.

        Returns:
            Logits [B, S or len(rows), V] in the oracle's dtype.

        Raises:
            ValueError: The cache has no room for the tokens.
        """
        start = cache.length if cache else 0
        positions = torch.arange(start, start + tokens.shape[1])
        operations = self._operations(positions, cache)
        operations.token_ids, operations.wanted = tokens, rows
        logits = operations.run(step_graph(self.spec))
        if cache is not None:
            cache.length += tokens.shape[1]
        return logits

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """The input of the first block, see `models.carried`. int64 [B, S] -> [B, S, C] in most models."""
        return begin(self.spec, tokens, self.table()[tokens], self.dtype)

    def table(self) -> Tensor:
        """The embedding table [V, C]; it stays in memory if the oracle is resident."""
        table = self._table if self._table is not None else self._weights.embedding()
        if self._resident:
            self._table = table
        return table

    def token_rows(self, tokens: Tensor, layer: int) -> Tensor:
        """Rows of a block's own embedding table. int64 [B, S] -> [B, S, P]."""
        return self._weights.token_rows(tokens, layer).to(self.dtype)

    def block(
        self,
        layer: int,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        branches: Tensor | None = None,
    ) -> Tensor:
        """Run one block; observer and trace see its linear layers.

        Args:
            layer: Which block.
            x: [B, S, C] its input; in a model whose blocks need more than that, what `embed` or the block before gave.
            positions: int64 [S] consecutive positions of the tokens; None = from the cache's length, or 0.
            cache: Holds the tokens before these. Its length is the caller's to advance, after the last block.
            branches: int64 [S]: which continuation of a common beginning (0) a token belongs to. It sees its own and
                the beginning; positions then need not be consecutive. Without a cache.

        Returns:
            [B, S, C], the input of the next block.
        """
        if positions is None:
            start = cache.length if cache else 0
            positions = torch.arange(start, start + x.shape[1])
        with torch.inference_mode(self.trace is None):
            operations = self._operations(positions, cache)
            operations.branches = branches
            operations.stream = operations.take(x)
            return operations.give(operations.run(block_graph(self.spec, layer)), x)

    @torch.inference_mode()
    def head(self, x: Tensor) -> Tensor:
        """Final norm and output head. [B, S, C] -> logits [B, S, V]."""
        operations = self._operations(torch.arange(x.shape[1]), None)
        operations.stream = x[..., : self.spec.hidden_size]
        return operations.run(head_graph(self.spec))

    def parameters(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a linear layer; or a norm's weight, another vector, or a router's weight.

        They stay in memory if the oracle is resident, otherwise until those of another block are needed, or of another
        expert. They have the oracle's dtype, except that the head of a non-resident oracle has the checkpoint's (see
        `linear`).
        """
        if name in self._loaded:
            return self._loaded[name]
        if not self._resident:
            self._loaded = {key: held for key, held in self._loaded.items() if _stay_together(key, name)}
        bias: Tensor | None = None
        in_full = name.endswith("router") or name in self.spec.vector_names()
        if in_full:
            weight = self._weights.vector(name)
        else:
            weight, bias = self._weights.linear(name)
        dtype = self.dtype if in_full else self.products
        if name == "head" and not self._resident:
            dtype = weight.dtype
        self._loaded[name] = (weight.to(dtype), None if bias is None else bias.to(dtype))
        return self._loaded[name]

    def _operations(self, positions: Tensor, cache: KVCache | None) -> _Operations:
        end = int(positions.max()) + 1 if len(positions) else 0
        if cache is not None and end > cache.context:
            raise ValueError(f"position {end - 1} does not fit a cache of {cache.context} positions")
        context = cache.context if cache is not None else end
        turns = {of: tuple(table[positions] for table in self._rotation(of, context)) for of in self.spec.ropes}
        return _Operations(self, positions, turns, cache)

    def _rotation(self, of: RopeSpec, context: int) -> tuple[Tensor, Tensor]:
        """Tables of at least `context` positions; longrope's depend on which side of its limit the context is."""
        extended = of.kind == "longrope" and context > of.original_context
        found = self._tables.get(of)
        if found is None or found[0] < context or found[1] != extended:
            cos, sin = rope.tables(of, context)
            found = self._tables[of] = (context, extended, torch.from_numpy(cos), torch.from_numpy(sin))
        return found[2:]


class _Operations(Eager):
    """One pass. Activations are [B, S, width] rather than [M, width]."""

    token_ids: Tensor
    stream: Tensor
    wanted: Sequence[int] | None = None
    branches: Tensor | None = None

    def __init__(
        self, oracle: Oracle, positions: Tensor, turns: Mapping[RopeSpec, tuple[Tensor, ...]], cache: KVCache | None
    ) -> None:
        self.oracle = oracle
        self.spec = oracle.spec
        self.positions = positions
        self.turns = {of: (cos.to(oracle.dtype), sin.to(oracle.dtype)) for of, (cos, sin) in turns.items()}
        self.cache = cache
        self.masks: dict[int | None, Tensor] = {}
        self.lent: dict[int, tuple[Tensor, Tensor]] = {}  # [B, H_kv, S, D], of blocks whose cache others read

    def take(self, x: Tensor) -> Tensor:
        """The residual stream of a block's input, from which the rest is taken."""
        carried = Carried.of(self.spec, x)
        if carried.tokens is not None:
            self.token_ids = carried.tokens
        self.lent = dict(carried.lent)
        return carried.stream

    def give(self, y: Tensor, x: Tensor) -> Tensor:
        """A block's output, with what it took of its input x, or has made."""
        return carry(self.spec, y, x, self.lent)

    def embed(self, node: Node) -> Tensor:  # noqa: ARG002  the first node
        return functional.embedding(self.token_ids, self.oracle.table()).to(self.oracle.dtype)

    def tokens(self, node: Node) -> Tensor:
        return self.embed(node) if node.layer < 0 else self.oracle.token_rows(self.token_ids, node.layer)

    def enter(self, node: Node) -> Tensor:  # noqa: ARG002  the first node
        return self.stream

    def rms(self, x: Tensor, name: str) -> Tensor:
        weight, _ = self.oracle.parameters(name)
        y = _wide(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.spec.eps_of(name))
        return weight * y.to(self.oracle.dtype)

    def linear(self, node: Node) -> Tensor:
        return self._linear(self.of(node), node.name)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        if self.oracle.observe is not None:
            self.oracle.observe(name, x)
        if name in self.oracle.replace:
            return self.oracle.replace[name](x)
        weight, bias = self.oracle.parameters(name)
        if name != "head" or weight.dtype == x.dtype:
            y = functional.linear(x.to(weight.dtype), weight, bias)
            if self.oracle.trace is not None:
                self.oracle.trace(name, x, y)
            return y
        # A head of 128,256 × 4096 in 32 bits would be the largest thing in memory: convert it in parts.
        parts = (weight[n : n + _HEAD_ROWS].to(x.dtype) for n in range(0, len(weight), _HEAD_ROWS))
        return torch.cat([functional.linear(x, part) for part in parts], dim=-1)

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        of = self.spec.rope_of(layer)
        assert of is not None
        half, heads = of.rotary_dim // 2, self.heads(x, layer)
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        cos, sin = (table[:, None] for table in self.turns[of])  # [S, 1, rotary_dim / 2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).flatten(-2)

    def attention(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int) -> Tensor:
        queries, owner = self.heads(q, layer).transpose(1, 2), self.spec.cache_of(layer)  # [B, H, S, D]
        if k is not None and v is not None:
            keys, values = (self.heads(x, layer).transpose(1, 2) for x in (k, v.to(self.oracle.dtype)))
            if self.spec.v_norm:
                values = values * torch.rsqrt(
                    _wide(values).square().mean(-1, keepdim=True) + self.spec.eps_of("v_norm")
                )
            if owner in self.spec.lent_layers:
                self.lent[owner] = keys, values
        else:
            keys, values = self.lent[owner]
        growth = rope.query_growth(self.spec, self.positions.numpy())
        if growth is not None:
            queries = queries * torch.from_numpy(growth).to(queries.dtype)[:, None]
        if self.oracle.observe_keys is not None and owner == layer:
            self.oracle.observe_keys(layer, queries, keys)
        first = int(self.positions[0]) if self.cache is None else 0  # position of the first key
        if self.cache is not None:
            end = int(self.positions[-1]) + 1
            self.cache.keys[owner][:, :, self.positions] = keys
            self.cache.values[owner][:, :, self.positions] = values
            keys, values = self.cache.keys[owner][:, :, :end], self.cache.values[owner][:, :, :end]
        mask = self._mask(first, keys.shape[2], self.spec.windows[layer])
        sinks = self.oracle.parameters(f"layers.{layer}.sinks")[0] if self.spec.sinks else None
        if self.oracle.observe_attention is not None:
            received = _shares(queries, keys, mask, self.spec.score_cap, sinks).sum(2).mean(1)
            self.oracle.observe_attention(layer, received)
        if self.spec.score_cap is None and sinks is None:
            dtype = self.oracle.products if self.oracle.observe is None else self.oracle.dtype  # observed: precisely
            queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
            attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        else:
            shares = _shares(queries, keys, mask, self.spec.score_cap, sinks).to(values.dtype)
            attended = shares @ values.repeat_interleave(queries.shape[1] // values.shape[1], dim=1)
        return attended.to(self.oracle.dtype).transpose(1, 2).flatten(-2)

    def convolve(self, node: Node) -> Tensor:
        prefix, spec = f"layers.{node.layer}", self.spec
        weight, _ = self.oracle.parameters(f"{prefix}.conv")
        bias = self.oracle.parameters(f"{prefix}.conv_bias")[0] if spec.conv_bias else None

        def mixed(inputs: Tensor) -> Tensor:
            before, after, u = inputs.chunk(3, dim=-1)
            history = functional.pad(before * u, (0, 0, spec.conv_kernel_size - 1, 0))
            return after * recurrent.convolve(history, weight.view(spec.conv_kernel_size, -1), bias)

        return self._from_the_beginning(self.of(node).to(self.oracle.dtype), node.layer, mixed)

    def delta(self, node: Node) -> Tensor:
        spec, delta = self.spec, self.spec.delta
        assert delta is not None
        prefix = f"layers.{node.layer}."
        own = (name for name in spec.block_vectors(node.layer) if not name.endswith("norm"))
        vectors = {name.removeprefix(prefix): self.oracle.parameters(name)[0] for name in own}

        def mixed(inputs: Tensor) -> Tensor:
            history = functional.pad(inputs[..., : delta.inputs], (0, 0, spec.conv_kernel_size - 1, 0))
            read = recurrent.delta_inputs(delta, history, spec.conv_kernel_size, vectors)
            y, _ = recurrent.delta_rule_chunked(read, read.v.new_zeros(len(inputs), *spec.state_shape[2]))
            return recurrent.finish(delta, y, inputs[..., delta.inputs :], vectors.get("gain"), spec.gain_eps)

        return self._from_the_beginning(self.of(node).to(self.oracle.dtype), node.layer, mixed)

    def _from_the_beginning(self, x: Tensor, layer: int, mixed: Callable[[Tensor], Tensor]) -> Tensor:
        """What a block with a state makes of x [B, S, width], given its function of a whole sequence [B, T, width]."""
        if self.branches is not None:
            y = mixed(x[:, self.branches == 0])
            parts = [y]
            for branch in range(1, int(self.branches.max()) + 1):
                seen = (self.branches == 0) | (self.branches == branch)
                parts.append(mixed(x[:, seen])[:, y.shape[1] :])
            return torch.cat(parts, dim=1)
        if self.cache is None:
            return mixed(x)
        self.cache.inputs[layer][:, self.positions] = x
        return mixed(self.cache.inputs[layer][:, : int(self.positions[-1]) + 1])[:, -x.shape[1] :]

    def norm(self, node: Node) -> Tensor:
        y = self.of(node)
        if self.oracle.observe is not None:
            self.oracle.observe(node.norm, y)
        return self.rms(y, node.norm)

    def experts(self, node: Node) -> Tensor:
        x, layer, mixture = self.of(node), node.layer, self.spec.mixture
        name = router_of(layer)
        assert mixture is not None
        if self.oracle.observe is not None:
            self.oracle.observe(name, x)
        flat, (weight, _) = x.flatten(0, -2), self.oracle.parameters(name)
        bias = self.oracle.parameters(f"{name}_bias")[0] if mixture.bias else None
        correction = self.oracle.parameters(f"{name}_correction")[0] if mixture.corrected else None
        read = self.of(node, 1).flatten(0, -2)
        chosen, shares = route(_wide(functional.linear(read, weight, bias)), mixture, correction)
        total = torch.zeros_like(flat)
        for expert in torch.unique(chosen).tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            self.oracle.rows = Rows(rows, x.shape[0], x.shape[1])
            gate_up = self._linear(flat[rows], f"layers.{layer}.experts.{expert}.gate_up")
            # A share counts before `down`, whose input then shows how much the expert matters.
            inside = self.activated(gate_up, layer)
            inside = inside * shares[rows, places, None].to(inside.dtype)
            out = self._linear(inside, down := f"layers.{layer}.experts.{expert}.down")
            if mixture.bias and (own := self.oracle.parameters(down)[1]) is not None:
                out = out + (shares[rows, places, None] - 1).to(out.dtype) * own
            total = total.index_add(0, rows, out.to(x.dtype))
        self.oracle.rows = None
        return total.view_as(x)

    def activated(self, x: Tensor, layer: int) -> Tensor:
        return super().activated(x.to(self.oracle.dtype), layer)

    def vector(self, name: str) -> Tensor:
        return self.oracle.parameters(name)[0]

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        x, spec = gate.to(self.oracle.dtype), self.spec
        if spec.activation == "clamped_silu":
            x, up = x.clamp(max=spec.gate_limit), up.clamp(-spec.gate_limit, spec.gate_limit) + 1
            return x * (CLAMPED_GAIN * x).sigmoid() * up
        return (functional.silu(x) if spec.activation == "silu" else functional.gelu(x, approximate="tanh")) * up

    def add(self, node: Node) -> Tensor:
        if node.norm and self.oracle.observe is not None:
            self.oracle.observe(node.norm, self.of(node, 1))
        return super().add(node)

    def rows(self, node: Node) -> Tensor:
        return self.of(node) if self.wanted is None else self.of(node)[:, list(self.wanted)]

    def cap(self, node: Node) -> Tensor:
        assert self.spec.logit_cap is not None
        return capped(self.of(node), self.spec.logit_cap)

    def _mask(self, first: int, count: int, window: int | None) -> Tensor:
        """Which of `count` keys from position `first` on each query sees. Returns bool [S, count]."""
        if window not in self.masks:
            places = torch.arange(first, first + count) if self.branches is None else self.positions
            distance = self.positions[:, None] - places
            seen = distance >= 0
            if self.branches is not None:
                seen &= (self.branches == 0) | (self.branches[:, None] == self.branches)
            self.masks[window] = seen if window is None else seen & (distance < window)
        return self.masks[window]


def _stay_together(held: str, wanted: str) -> bool:
    """Whether a layer's weights stay in memory when those of another are needed: in its block, but of one expert."""
    same_block = held.split(".")[:2] == wanted.split(".")[:2]
    return same_block and (expert_of(held) is None or expert_of(held) == expert_of(wanted))


def _wide(x: Tensor) -> Tensor:
    """In float32, or as it is in float64."""
    return x if x.dtype == torch.float64 else x.float()


def capped(x: Tensor, cap: float) -> Tensor:
    """Soft cap c * tanh(x / c), whose magnitude stays below c."""
    return cap * torch.tanh(x / cap)


def _shares(queries: Tensor, keys: Tensor, mask: Tensor, cap: float | None, sinks: Tensor | None = None) -> Tensor:
    """Share of each query's attention that each key gets, float32 [B, H, S, T].

    Args:
        queries: [B, H, S, D].
        keys: [B, H_kv, T, D].
        mask: bool [S, T], which keys each query sees.
        cap: `ModelSpec.score_cap`.
        sinks: [H], scores that take a share themselves; None = none.
    """
    shared = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = _wide(queries @ shared.transpose(-1, -2)) / queries.shape[-1] ** 0.5
    if cap is not None:
        scores = capped(scores, cap)
    scores = scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, _wide(sinks[:, None, None]).expand(*scores.shape[:3], 1)), dim=-1)
    shares: Tensor = scores.softmax(-1)[..., : keys.shape[2]]
    return shares
