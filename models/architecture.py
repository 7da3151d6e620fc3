"""The step graph: what a step of tokens passes in every supported family, as nodes of some kinds.

The graph is made once from a specification (`step_graph`), so a family's quirks (biases, norms, window, rope or none)
stand here alone. Who runs it has a method for each kind of node (`Interpreter`): the full-precision decoder and the
reference backend compute with plain torch operations (`Eager`), the CPU backend writes instructions, the GPU backend
launches kernels. Nodes are about what kernels are: attention is one, with the norms and rotations of its heads and its
cache. What a kernel does beyond its node (a product that adds to the stream, an addition together with the norm that
follows) is decided where the kernel is chosen, by the nodes around it.

Weights are named `embed`, `layers.{i}.input_norm`, `layers.{i}.qkv`, `layers.{i}.q_norm`, `layers.{i}.k_norm`,
`layers.{i}.sinks`, `layers.{i}.o`, `layers.{i}.o_norm`, `layers.{i}.post_norm`, `layers.{i}.gate_up`,
`layers.{i}.down`, `layers.{i}.down_norm`, `norm`, `head`; a bias belongs to its linear layer. q, k, v and the gate of
attention are fused along the output in that order, and so are gate and up, and what a convolution or a delta rule
reads; these have more vectors (`ModelSpec.block_vectors`). A block that shares an earlier one's cache has q alone.
One with a state beside attention has `layers.{i}.state.qkv` and `layers.{i}.state.o` for it.
One whose queries have a latent has their norm, `layers.{i}.queries_norm`, and `layers.{i}.queries.qkv`.
One with embeddings of its own also has the layers of `models.spec.TOKEN_LINEARS`, and norms behind two. Where the
stream is several, blocks have those of `models.spec.LAUREL_LINEARS`, and the first and last those of `AltUpSpec.ends`.
Experts have `layers.{i}.experts.{e}.gate_up` and `layers.{i}.experts.{e}.down`, and their router is
`layers.{i}.router`, with its `router_bias` and `router_correction`; beside an MLP, also norms: `router_norm`,
`mlp_norm`, `experts_norm` and `experts_down_norm`. A block that predicts a further token has `layers.0.join.down` in
front, `embed_norm` and `hidden_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from models.spec import (
    JOIN,
    LAUREL_LINEARS,
    QUERIES,
    STATE_O,
    STATE_QKV,
    XIELU_LINEAR,
    XIELU_MOST,
    XIELU_SLOPES,
    AltUpSpec,
    ModelSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SQUARE = 1e-5
"""Of the mean of a row's squares, where it is divided by its root (`spread`, `merge`)."""
T = TypeVar("T")
Kind = Literal[
    "embed", "tokens", "enter", "join", "read", "linear", "attend", "convolve", "delta", "gate", "experts", "norm",
    "add", "rows", "cap", "leave", "spread", "predict", "correct", "merge",
]  # fmt: skip
"""What is computed of M rows, R of which have logits:

- `embed`: the residual stream [M, C] begins with rows of the embedding table for the step's tokens.
- `tokens`: those rows beside the stream, or [M, P] of the own table of a block.
- `enter`: the stream that the blocks before a part's first one left (`models.part`), or another model's.
- `join`: the tokens' embeddings and a stream that entered, each through an RMSNorm, side by side (`models.mtp`). Twice
  [M, C] -> [M, 2 C].
- `read`: the stream, or one of several, as linear layers and experts read it, through an RMSNorm or as it is; or the
  latent of queries, the first channels of `qkv`'s output, through one.
- `linear`: a linear layer, bias included. [M, K] -> [M, N].
- `attend`: attention, from its projections [M, qkv], and queries of their own [M, H * D], to its heads' outputs
  [M, H * `attended_dim`]. Queries and keys pass norms and are rotated, keys and values enter the cache, queries see it
  causally, within spec.windows[layer]. A block without keys reads an earlier one's cache (`ModelSpec.cache_of`), which
  has the step's tokens. Queries grow with their positions, latents pass a norm, values pass a norm, scores are capped,
  sinks take a share and outputs are multiplied by gates as the specification says.
- `convolve`: a gated short convolution over the step's rows and the tokens before; the rows enter its state. Of
  [M, 3 C], B, G and u side by side, it gives G * conv(B * u), [M, C].
- `delta`: a gated delta rule, likewise. Of [M, inputs + Hv * Dv], what enters the state (`DeltaSpec.inputs`), then
  gates. Outputs [M, Hv * Dv] of each value head pass an RMSNorm, if there is one, and are multiplied by silu(gate).
- `gate`: f(gate) * up, or what else spec.activation says. Of both side by side [M, 2 * width], or of one each; f(up)
  of an MLP without a gate, of [M, width]. In front of f, gates may be cut at a share of them (`ModelSpec.cut`).
- `experts`: what the experts that a block's router chooses for each row make of it, weighed and summed up. The router
  reads the second input. [M, C] -> [M, C]. See `models.routing`.
- `norm`: RMSNorm of the output of a linear layer.
- `add`: the sum of a first input and a second, which passes the norm before, if there is one. To all streams but the
  first, where the first input is several.
- `rows`: the rows whose logits the step asks for. [M, C] -> [R, C].
- `cap`: soft cap of every logit x: c * tanh(x / c), with c = spec.logit_cap.
- `leave`: the stream behind a part's last block.
- `spread`: several streams of one: it, times √C, and what linear layers make of it, as large as it is in each row.
  S times [M, C] -> [M, S * C].
- `predict`: streams [M, S * C] and what each takes from all, by numbers that the first one chooses.
- `correct`: those, and what each takes of how the block changed the first; of both [M, S * C] and [M, C].
- `merge`: the mean of the first stream and what linear layers make of the others, as large as it is in each row.
  S times [M, C] -> [M, C].
"""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Node:
    """Something that is computed of a step's M rows."""

    kind: Kind
    inputs: tuple[Node, ...] = ()
    layer: int = -1
    """The block that it belongs to; -1: none."""
    name: str = ""
    """Of a linear layer."""
    norm: str = ""
    """The weight of an RMSNorm that is part of it; empty: there is none."""
    scale: str = ""
    """A vector of one number by which an `add`, which then has a norm, multiplies the sum."""
    stream: int = 0
    """Of several streams the one that a `read` is of."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order in which they run; the last gives the result."""

    nodes: tuple[Node, ...]
    readers: dict[Node, tuple[Node, ...]]
    """Of each node those that read it."""
    ends: dict[Node, tuple[Node, ...]]
    """Of each node the inputs that no later one reads."""

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Graph:
        readers: dict[Node, tuple[Node, ...]] = dict.fromkeys(nodes, ())
        ends = dict(readers)
        for node in nodes:
            for own in dict.fromkeys(node.inputs):
                readers[own] += (node,)
        for node, by in readers.items():
            if by:
                ends[by[-1]] += (node,)
        return cls(tuple(nodes), readers, ends)

    def reader(self, node: Node) -> Node | None:
        """The node that alone reads a node's result; None: there is none, or several."""
        found = self.readers[node]
        return found[0] if len(found) == 1 else None

    def __str__(self) -> str:
        """A line for each node: its number, kind and weights, and the numbers of its inputs."""
        numbers = {node: number for number, node in enumerate(self.nodes)}
        lines = []
        for node, number in numbers.items():
            block = f"block {node.layer}" if node.layer >= 0 and not (node.name or node.norm) else ""
            words = " ".join(filter(None, (node.kind, node.name, block, node.norm, node.scale)))
            of = ", ".join(str(numbers[own]) for own in node.inputs)
            lines.append(f"{number:>5}  {words}{f'  of {of}' if of else ''}")
        return "\n".join(lines)


class Interpreter(Generic[T]):
    """Who runs a graph: has a method for each kind of node. `T` stands for a [M, width] matrix of activations."""

    values: dict[Node, T]
    """What the nodes so far gave."""

    def run(self, graph: Graph) -> T:
        """Run the nodes one after the other. Returns what the last gives."""
        self.values = {}
        for node in graph.nodes:
            self.values[node] = getattr(self, node.kind)(node)
        return self.values[graph.nodes[-1]]

    def of(self, node: Node, place: int = 0) -> T:
        """What an input of a node gave."""
        return self.values[node.inputs[place]]

    def left(self, node: Node) -> T:
        """A node whose work is left to the node that reads it."""
        return self.of(node)


class Eager(Interpreter["Tensor"]):
    """Attention and gates by the operations that they consist of, for who fuses none.

    What nothing reads again is dropped.
    """

    spec: ModelSpec

    def run(self, graph: Graph) -> Tensor:
        self.values = {}
        for node in graph.nodes:
            self.values[node] = getattr(self, node.kind)(node)
            for own in graph.ends[node]:
                del self.values[own]
        return self.values.popitem()[1]

    def rms(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last channels with the weight `name`."""
        raise NotImplementedError

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Rotary position embedding of each head. [M, heads * D] -> the same."""
        raise NotImplementedError

    def attention(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: int) -> Tensor:
        """Append k and v to the cache, then attention of q. q is [M, H * D], k and v [M, H_kv * D]."""
        raise NotImplementedError

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """F(gate) * up. Both [M, width]."""
        raise NotImplementedError

    def vector(self, name: str) -> Tensor:
        """One of a block's vectors."""
        raise NotImplementedError

    def activated(self, x: Tensor, layer: int) -> Tensor:
        """What an MLP or an expert gives `down`, of the output [M, parts * width] of its `gate_up`."""
        if self.spec.activation == "relu2":
            return x.clamp(min=0).square()
        if self.spec.activation == "xielu":
            rising, falling = (self.vector(f"layers.{layer}.{own}") for own in XIELU_SLOPES)
            below = falling * (x.clamp(max=XIELU_MOST).expm1() - x)
            return (rising * x.square()).where(x > 0, below) + XIELU_LINEAR * x
        gate, up = x.chunk(2, dim=-1)
        cut = self.spec.cut(layer)
        if cut is not None:
            end = gate.mean(-1, keepdim=True) + cut * gate.std(-1, keepdim=True, correction=0)
            gate = (gate - end).clamp(min=0)
        return self.activate(gate, up)

    def attend(self, node: Node) -> Tensor:
        q, *others = self.split(self.of(node), self.spec.attention_widths(node.layer))
        if len(node.inputs) > 1:
            q = self.of(node, 1)
        gate = [others.pop()] if self.spec.gated else []
        if self.spec.latent is not None:
            R = self.spec.latent.rank
            others = [self.latent_norm(others[0], slice(-R, None)), self.latent_norm(others[1], slice(R))]
        q = self._turned(q, node.layer, "q_norm")
        k, v = (self._turned(others[0], node.layer, "k_norm"), others[1]) if others else (None, None)
        attended = self.attention(q, k, v, node.layer)
        if self.spec.latent is not None:
            attended = self.heads(attended, node.layer)[..., : self.spec.latent.rank].flatten(-2)
        return attended * self.opened(gate[0].to(attended.dtype), node.layer) if gate else attended

    def opened(self, gate: Tensor, layer: int) -> Tensor:
        """What gates of attention let through of each channel. [M, H * D] or [M, H] -> [M, H * D]."""
        from torch.nn import functional

        shares = gate.sigmoid() if self.spec.gate_form == "sigmoid" else functional.softplus(gate)
        return shares.repeat_interleave(self.spec.heads_of(layer).dim, -1) if self.spec.head_gates else shares

    def latent_norm(self, x: Tensor, place: slice) -> Tensor:
        """RMSNorm, without a weight, of a latent among the channels of keys or values [M, D]."""
        y = x.float().clone()
        y[..., place] *= y[..., place].square().mean(-1, keepdim=True).add(self.spec.eps_of("k_norm")).rsqrt()
        return y

    def _turned(self, x: Tensor, layer: int, norm: str) -> Tensor:
        """Queries or keys after their norm and rotation, where the block has them."""
        spec, norm = self.spec, f"layers.{layer}.{norm}"
        if spec.qk_norm and spec.qk_norm_form != "after_rope":
            x = self.head_norm(x, layer, norm)
        if spec.rope_of(layer) is not None:
            x = self.rotate(x, layer)
        return self.head_norm(x, layer, norm) if spec.qk_norm and spec.qk_norm_form == "after_rope" else x

    def split(self, x: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Consecutive ranges of channels."""
        ends = accumulate(widths)
        return tuple(x[..., end - width : end] for end, width in zip(ends, widths, strict=True))

    def heads(self, x: Tensor, layer: int) -> Tensor:
        """[..., heads * D] -> [..., heads, D]."""
        return x.reshape(*x.shape[:-1], -1, self.spec.heads_of(layer).dim)

    def head_norm(self, x: Tensor, layer: int, name: str) -> Tensor:
        """RMSNorm over the channels of each head, or of all."""
        return (
            self.rms(x, name) if self.spec.qk_norm_form == "all" else self.rms(self.heads(x, layer), name).flatten(-2)
        )

    leave = Interpreter.left

    def read(self, node: Node) -> Tensor:
        width = self.spec.read_width(node.norm)
        x = self.of(node)[..., node.stream * width : (node.stream + 1) * width]
        return self.rms(x, node.norm) if node.norm else x

    def join(self, node: Node) -> Tensor:
        norms = (f"layers.{node.layer}.{part}_norm" for part in ("embed", "hidden"))
        return self.side_by_side(*(self.rms(self.of(node, at), norm) for at, norm in enumerate(norms)))

    def gate(self, node: Node) -> Tensor:
        if len(node.inputs) > 1:
            return self.activate(self.of(node), self.of(node, 1))
        return self.activated(self.of(node), node.layer)

    def add(self, node: Node) -> Tensor:
        x, y = self.of(node), self.of(node, 1)
        y = self.rms(y, node.norm) if node.norm else y
        if x.shape[-1] > y.shape[-1]:
            first, others = x.tensor_split([y.shape[-1]], dim=-1)
            return self.side_by_side(first, *(own + y for own in others.chunk(x.shape[-1] // y.shape[-1] - 1, dim=-1)))
        return (x + y) * self.vector(node.scale) if node.scale else x + y

    def spread(self, node: Node) -> Tensor:
        gain = self.spec.hidden_size**0.5
        first, *others = (self.values[own] * gain for own in node.inputs)
        return self.side_by_side(first, *(_as_large(y, first) for y in others))

    def merge(self, node: Node) -> Tensor:
        first, *others = (self.values[own] for own in node.inputs)
        return sum((_as_large(y, first) for y in others), first) / len(node.inputs)

    def predict(self, node: Node) -> Tensor:
        streams = self.of(node).chunk(self.of(node).shape[-1] // self.spec.hidden_size, dim=-1)
        taken = self._chosen(streams[0], node.layer, "predict").chunk(len(streams), dim=-1)
        return self.side_by_side(
            *(
                sum((own[..., at, None] * x for at, x in enumerate(streams)), stream)
                for stream, own in zip(streams, taken, strict=True)
            )
        )

    def correct(self, node: Node) -> Tensor:
        made = self.of(node, 1)
        streams = self.of(node).chunk(self.of(node).shape[-1] // made.shape[-1], dim=-1)
        taken = 1 + self._chosen(made, node.layer, "correct")
        change = made - streams[0]
        return self.side_by_side(*(x + taken[..., at, None] * change for at, x in enumerate(streams)))

    def _chosen(self, x: Tensor, layer: int, kind: str) -> Tensor:
        """What streams take from each other, [..., S * S], or from a block, [..., S], as one of them says.

        Sums are over the last channels, so that they do not depend on how many rows there are.
        """
        prefix = f"layers.{layer}.altup_"
        normed = self.rms(x, f"{prefix}norm")
        router = self.vector(f"{prefix}router").view(-1, x.shape[-1])
        said = self.side_by_side(*((normed * row).sum(-1, keepdim=True) for row in router)).tanh()
        return (said[..., None, :] * self.vector(prefix + kind).view(-1, len(router))).sum(-1)

    def side_by_side(self, *parts: Tensor) -> Tensor:
        import torch

        return torch.cat(parts, dim=-1)


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """Rows of x times what makes them as large as another's, whose root of the mean square they get."""
    squares = x.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE)
    return x * other.square().mean(-1, keepdim=True).sqrt() / squares.sqrt()


class Builder:
    """Makes the nodes of a model, one behind the other."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.nodes: list[Node] = []

    def node(self, kind: Kind, *inputs: Node, layer: int = -1, stream: int = 0, **weights: str) -> Node:
        self.nodes.append(Node(kind, inputs, layer, stream=stream, **weights))
        return self.nodes[-1]

    def linear(self, x: Node, layer: int, kind: str) -> Node:
        return self.node("linear", x, layer=layer, name=f"layers.{layer}.{kind}")

    def read(self, x: Node, layer: int, norm: str) -> Node:
        """What a linear layer reads of the residual stream."""
        return self.node("read", x, layer=layer, norm=f"layers.{layer}.{norm}" if self.spec.norms(layer)[0] else "")

    def block(self, layer: int, x: Node) -> Node:
        """One decoder block. [M, C] -> [M, C], or of several streams."""
        if self.spec.altup is not None:
            return self.of_streams(layer, x, self.spec.altup)
        if self.spec.parallel:  # who adds in place has then read the stream for both
            inside = self.linear(self.read(x, layer, "post_norm"), layer, "gate_up")
            x = self.mix(layer, x)
            return self.node("add", x, self.linear(self.node("gate", inside, layer=layer), layer, "down"))
        x = self.mix(layer, x)
        if layer in self.spec.bare:
            return x
        x = self.mlp(layer, x)
        return self.own_tokens(layer, x) if self.spec.token_width else x

    def of_streams(self, layer: int, x: Node, altup: AltUpSpec) -> Node:
        """A block of several streams, which are one in front of the first and behind the last."""
        if self.spec.spreads(layer):
            x = self.node("read", x)
            x = self.node("spread", x, *(self.linear(x, layer, end) for end in altup.ends("spread")), layer=layer)
        predicted = self.node("predict", x, layer=layer)
        made = self.mlp(layer, self.mix(layer, self.node("read", predicted, layer=layer)))
        x = self.own_tokens(layer, self.node("correct", predicted, made, layer=layer))
        if not self.spec.merges(layer):
            return x
        first, *others = (self.node("read", x, layer=layer, stream=stream) for stream in range(altup.streams))
        ends = zip(others, altup.ends("merge"), strict=True)
        return self.node("merge", first, *(self.linear(own, layer, end) for own, end in ends), layer=layer)

    def mix(self, layer: int, x: Node) -> Node:
        """The residual stream after attention, a gated short convolution, or a gated delta rule, or two of them."""
        both = self.spec.mixer(layer) == "both"
        # Who adds in place has then read the stream for both.
        states = self.linear(self.read(x, layer, "input_norm"), layer, STATE_QKV) if both else None
        kinds: dict[str, Kind] = {"convolution": "convolve", "delta": "delta"}
        inputs = [self.linear(self.read(x, layer, "input_norm"), layer, "qkv")]
        if self.spec.latent is not None and self.spec.latent.query_rank:
            own = self.node("read", *inputs, layer=layer, norm=f"layers.{layer}.queries_norm")
            inputs.append(self.linear(own, layer, QUERIES))
        if states is not None:
            x = self.node("add", x, self.linear(self.node("delta", states, layer=layer), layer, STATE_O))
        scale = ""
        if self.spec.altup is not None:
            read, (down, up) = self.read(x, layer, "input_norm"), LAUREL_LINEARS
            back = self.linear(self.linear(read, layer, down), layer, up)
            x = self.node("add", x, x, norm=read.norm)
            x = self.node("add", x, back, norm=f"{back.name}_norm")
            scale = f"layers.{layer}.laurel_scale"
        mixed = self.node(kinds.get(self.spec.mixer(layer), "attend"), *inputs, layer=layer)
        norm = f"layers.{layer}.o_norm" if self.spec.norms(layer)[1] else ""
        return self.node("add", x, self.linear(mixed, layer, "o"), norm=norm, scale=scale)

    def mlp(self, layer: int, x: Node) -> Node:
        """The residual stream after the gated MLP, experts, or both."""
        spec, prefix, mixture = self.spec, f"layers.{layer}", self.spec.has_experts(layer)
        behind = f"{prefix}.down_norm" if spec.norms(layer)[1] else ""
        inside = self.read(x, layer, "post_norm")
        beside = mixture and spec.mixture is not None and spec.mixture.parallel_mlp
        if mixture and not beside:
            return self.node("add", x, self.node("experts", inside, inside, layer=layer), norm=behind)
        down = self.linear(self.node("gate", self.linear(inside, layer, "gate_up"), layer=layer), layer, "down")
        if beside:
            down = self.node("norm", down, norm=f"{prefix}.mlp_norm")
            routed, own = (
                self.node("read", x, layer=layer, norm=f"{prefix}.{of}_norm") for of in ("router", "experts")
            )
            chosen = self.node("experts", own, routed, layer=layer)
            down = self.node("add", down, chosen, norm=f"{prefix}.experts_down_norm")
        return self.node(
            "add", x, down, norm=behind, scale=f"{prefix}.scale" if spec.scaled and not spec.token_width else ""
        )

    def own_tokens(self, layer: int, x: Node) -> Node:
        """The residual stream after a block's own embeddings of the tokens."""
        prefix = f"layers.{layer}"
        gate = self.linear(self.node("read", x, layer=layer), layer, "inner.gate_up")
        context = self.linear(self.node("read", self._embedded(), layer=layer), layer, "tokens.gate_up")
        own = self.node("tokens", layer=layer)
        tokens = self.node("add", own, context, norm=f"{prefix}.tokens.gate_up_norm")
        down = self.linear(self.node("gate", gate, tokens, layer=layer), layer, "inner.down")
        scale = f"{prefix}.scale" if self.spec.scaled else ""
        return self.node("add", x, down, norm=f"{prefix}.inner.down_norm", scale=scale)

    def _embedded(self) -> Node:
        """The tokens' embeddings, which every block reads."""
        return next((node for node in self.nodes if node.kind == "tokens" and node.layer < 0), None) or self.node(
            "tokens"
        )

    def output(self, x: Node) -> Node:
        """Final norm and output head for the rows that the step asks for. [M, C] -> [R, V]."""
        logits = self.node("linear", self.node("read", self.node("rows", x), norm="norm"), name="head")
        return logits if self.spec.logit_cap is None else self.node("cap", logits)


@lru_cache(maxsize=64)
def step_graph(spec: ModelSpec, *, hidden: bool = False) -> Graph:
    """The whole decoder, from the step's tokens to logits [R, V]; of a part without a head, to the stream [M, C].

    Args:
        spec: The model.
        hidden: To all rows after the final norm instead, [M, C].
    """
    made = Builder(spec)
    x = made.node("embed" if spec.embeds else "enter")
    if spec.joins:
        x = made.linear(made.node("join", x, made.node("enter"), layer=0), 0, JOIN)
    if spec.token_width:
        made.node("tokens")
    for layer in range(spec.num_layers):
        x = made.block(layer, x)
    if hidden:
        made.node("read", x, norm="norm")
    elif spec.has_head:
        made.output(x)
    else:
        made.node("leave", x)
    return Graph.of(made.nodes)


@lru_cache(maxsize=256)
def block_graph(spec: ModelSpec, layer: int) -> Graph:
    """One block, from a stream that enters to its output [M, C]."""
    made = Builder(spec)
    made.block(layer, made.node("enter"))
    return Graph.of(made.nodes)


@lru_cache(maxsize=16)
def head_graph(spec: ModelSpec) -> Graph:
    """Final norm and head, from a stream that enters to logits."""
    made = Builder(spec)
    made.output(made.node("enter"))
    return Graph.of(made.nodes)
