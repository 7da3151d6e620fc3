"""The block of every supported family, written once against a small set of operations.

The full-precision decoder runs it with plain torch operations, the reference backend with dequantized weights, the CPU
backend records it into a program once. So a family's quirks (biases, norms, window, rope or none) stand here alone.

Weights are named `embed`, `layers.{i}.input_norm`, `layers.{i}.qkv`, `layers.{i}.q_norm`, `layers.{i}.k_norm`,
`layers.{i}.sinks`, `layers.{i}.o`, `layers.{i}.o_norm`, `layers.{i}.post_norm`, `layers.{i}.gate_up`,
`layers.{i}.down`, `layers.{i}.down_norm`, `norm`, `head`; a bias belongs to its linear layer. q, k, v and the gate of
attention are fused along the output in that order, and so are gate and up, and what a convolution or a delta rule
reads; these have more vectors (`ModelSpec.block_vectors`). A block that shares an earlier one's cache has q alone.
One with embeddings of its own also has the layers of `models.spec.TOKEN_LINEARS`, and norms behind two. Experts have
`layers.{i}.experts.{e}.gate_up` and `layers.{i}.experts.{e}.down`, and their router is `layers.{i}.router`, with its
`router_bias` and `router_correction`; beside an MLP, also norms: `router_norm`, `mlp_norm`, `experts_norm` and
`experts_down_norm`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

from models.spec import ModelSpec

T = TypeVar("T")


class Operations(Protocol[T]):
    """The operations of a backend, on which `forward` runs. `T` stands for a [M, width] matrix of activations."""

    def embed(self, layer: int | None = None) -> T:
        """Rows of the embedding table for the step's tokens, or of the own table of `layer`. Returns [M, C or P]."""
        ...

    def norm(self, x: T, name: str) -> T:
        """RMSNorm over the channels with the weight `name`. Returns [M, C]."""
        ...

    def plain(self, x: T) -> T:
        """The residual stream as the input of a linear layer, without a norm. Returns [M, C]."""
        ...

    def linear(self, x: T, name: str) -> T:
        """The linear layer `name`, bias included. [M, K] -> [M, N]."""
        ...

    def split(self, x: T, widths: tuple[int, ...]) -> tuple[T, ...]:
        """Views of consecutive channel ranges of x."""
        ...

    def head_norm(self, x: T, name: str) -> T:
        """RMSNorm over the channels of each head, or of all, with the weight `name`. [M, heads * D] -> the same."""
        ...

    def rotate(self, x: T, layer: int, /) -> T:
        """Rotary position embedding of each head, that of `layer`. [M, heads * D] -> the same."""
        ...

    def attend(self, q: T, k: T | None, v: T | None, layer: int) -> T:
        """Append k and v to the cache of `layer`, then causal attention of q over it, within spec.windows[layer].

        Without k and v, the cache is an earlier block's (`ModelSpec.cache_of`), which has the step's tokens. Queries
        grow with their positions, values pass a norm, scores are capped and sinks take a share as the specification
        says. q is [M, H * D], k and v [M, H_kv * D]. Returns [M, H * D].
        """
        ...

    def experts(self, x: T, layer: int, routed: T | None = None) -> T:
        """What the experts that the router of `layer` chooses for each row make of it, weighed and summed up.

        The router reads `routed`, or x as well. [M, C] -> [M, C]. See `models.routing`.
        """
        ...

    def norm_inplace(self, y: T, norm: str) -> T:
        """RMSNorm of y, the output of a linear layer that nothing else reads, in its place. [M, C] -> the same."""
        ...

    def gate(self, gate: T, up: T) -> T:
        """f(gate) * up, or what else spec.activation says. Both [M, width]."""
        ...

    def add(self, x: T, y: T, norm: str = "", scale: str = "") -> T:
        """Sum of x and y, where y is the output of a linear layer or of experts that nothing else reads.

        With a `norm`, y first passes the RMSNorm with that weight. With a `scale`, a vector of one number, which only
        comes with a norm, the sum is multiplied by it.
        """
        ...

    def logit_rows(self, x: T) -> T:
        """The rows of x whose logits the step asks for. [M, C] -> [R, C]."""
        ...

    def cap(self, logits: T) -> T:
        """Soft cap of every logit x: c * tanh(x / c), with c = spec.logit_cap. [R, V] -> the same."""
        ...


class StateOperations(Operations[T], Protocol[T]):
    """The operations of models with states. A backend without them refuses such models when it opens them."""

    def output_gate(self, x: T, gate: T) -> T:
        """X * sigmoid(gate), where x is the output of `attend`. Both [M, H * D]."""
        ...

    def delta_rule(self, x: T, layer: int) -> T:
        """The gated delta rule of `layer` over the step's rows and the tokens before; the rows enter its state.

        x is [M, inputs + Hv * Dv]: what enters the state (`DeltaSpec.inputs`), then gates. The outputs of each value
        head pass an RMSNorm and are multiplied by silu(gate). Returns [M, Hv * Dv].
        """
        ...

    def convolve(self, x: T, layer: int) -> T:
        """The gated short convolution of `layer` over the step's rows and the tokens before; the rows enter its state.

        x is [M, 3 C]: B, G and u side by side. Returns G * conv(B * u), [M, C].
        """
        ...


class PartOperations(Operations[T], Protocol[T]):
    """The operations at the seams of a model whose blocks are shared by backends (`models.part`)."""

    def enter(self) -> T:
        """The residual stream that the blocks before a part's first one left . Returns [M, C]."""
        ...

    def leave(self, x: T) -> T:
        """The residual stream behind a part's last block, for the next part. Returns [M, C]."""
        ...


def block(ops: Operations[T], spec: ModelSpec, layer: int, x: T) -> T:
    """One decoder block. [M, C] -> [M, C]."""
    mix = attention if spec.mixer(layer) in ("attention", "shared") else recurrence
    x = mlp(ops, spec, layer, mix(ops, spec, layer, x))
    return per_layer_embedding(ops, spec, layer, x) if spec.token_width else x


def attention(ops: Operations[T], spec: ModelSpec, layer: int, x: T) -> T:
    """The residual stream after attention. [M, C] -> [M, C]."""
    prefix, heads = f"layers.{layer}", spec.heads_of(layer)
    qkv = ops.linear(read(ops, spec, x, f"{prefix}.input_norm"), f"{prefix}.qkv")
    own = (heads.kv_width, heads.kv_width) if spec.mixer(layer) == "attention" else ()
    q, *others = ops.split(qkv, (heads.q_width, *own, *((heads.q_width,) if spec.gated else ())))
    q, k, v = norm_and_rope(ops, spec, layer, q, "q_norm"), None, None
    if own:
        k, v, *others = others
        k = norm_and_rope(ops, spec, layer, k, "k_norm")
    attended = ops.attend(q, k, v, layer)
    if spec.gated:
        attended = cast("StateOperations[T]", ops).output_gate(attended, others[0])
    return ops.add(x, ops.linear(attended, f"{prefix}.o"), f"{prefix}.o_norm" if spec.norm_after else "")


def norm_and_rope(ops: Operations[T], spec: ModelSpec, layer: int, x: T, norm: str) -> T:
    """Queries or keys after their norm and rotation, where the block has them. [M, heads * D] -> the same."""
    norm = f"layers.{layer}.{norm}"
    if spec.qk_norm and spec.qk_norm_form != "after_rope":
        x = ops.head_norm(x, norm)
    if spec.rope_of(layer) is not None:
        x = ops.rotate(x, layer)
    return ops.head_norm(x, norm) if spec.qk_norm and spec.qk_norm_form == "after_rope" else x


def recurrence(ops: Operations[T], spec: ModelSpec, layer: int, x: T) -> T:
    """The residual stream after a gated short convolution, or a gated delta rule. [M, C] -> [M, C]."""
    prefix = f"layers.{layer}"
    inputs = ops.linear(read(ops, spec, x, f"{prefix}.input_norm"), f"{prefix}.qkv")
    own = cast("StateOperations[T]", ops)
    mixed = own.convolve(inputs, layer) if spec.mixer(layer) == "convolution" else own.delta_rule(inputs, layer)
    return ops.add(x, ops.linear(mixed, f"{prefix}.o"), f"{prefix}.o_norm" if spec.norm_after else "")


def mlp(ops: Operations[T], spec: ModelSpec, layer: int, x: T) -> T:
    """The residual stream after the gated MLP. [M, C] -> [M, C]."""
    prefix, width, mixture = f"layers.{layer}", spec.mlp_width(layer), spec.has_experts(layer)
    inside, behind = read(ops, spec, x, f"{prefix}.post_norm"), f"{prefix}.down_norm" if spec.norm_after else ""
    beside = mixture and spec.mixture is not None and spec.mixture.parallel_mlp
    if mixture and not beside:
        return ops.add(x, ops.experts(inside, layer), behind)
    gate, up = ops.split(ops.linear(inside, f"{prefix}.gate_up"), (width, width))
    down = ops.linear(ops.gate(gate, up), f"{prefix}.down")
    if beside:
        down, routed = ops.norm_inplace(down, f"{prefix}.mlp_norm"), ops.norm(x, f"{prefix}.router_norm")
        chosen = ops.experts(ops.norm(x, f"{prefix}.experts_norm"), layer, routed)
        down = ops.add(down, chosen, f"{prefix}.experts_down_norm")
    return ops.add(x, down, behind, f"{prefix}.scale" if spec.scaled and not spec.token_width else "")


def per_layer_embedding(ops: Operations[T], spec: ModelSpec, layer: int, x: T) -> T:
    """The residual stream after a block's own embeddings of the tokens. [M, C] -> [M, C]."""
    prefix = f"layers.{layer}"
    gate = ops.linear(ops.plain(x), f"{prefix}.inner.gate_up")
    context = ops.linear(ops.plain(ops.embed()), f"{prefix}.tokens.gate_up")
    tokens = ops.add(ops.embed(layer), context, f"{prefix}.tokens.gate_up_norm")
    down = ops.linear(ops.gate(gate, tokens), f"{prefix}.inner.down")
    return ops.add(x, down, f"{prefix}.inner.down_norm", f"{prefix}.scale" if spec.scaled else "")


def read(ops: Operations[T], spec: ModelSpec, x: T, norm: str) -> T:
    """What a linear layer reads of the residual stream: through the norm, or as it is. [M, C] -> [M, C]."""
    return ops.norm(x, norm) if spec.norm_before else ops.plain(x)


def forward(ops: Operations[T], spec: ModelSpec) -> T:
    """The whole decoder, from the step's tokens to logits [R, V]; of a part without a head, to the stream [M, C]."""
    x = body(ops, spec)
    return output(ops, spec, x) if spec.has_head else cast("PartOperations[T]", ops).leave(x)


def body(ops: Operations[T], spec: ModelSpec) -> T:
    """All blocks, from the step's tokens to the last block's output [M, C]."""
    x = ops.embed() if spec.embeds else cast("PartOperations[T]", ops).enter()
    for layer in range(spec.num_layers):
        x = block(ops, spec, layer, x)
    return x


def output(ops: Operations[T], spec: ModelSpec, x: T) -> T:
    """Final norm and output head for the rows that the step asks for. [M, C] -> [R, V]."""
    logits = ops.linear(ops.norm(ops.logit_rows(x), "norm"), "head")
    return logits if spec.logit_cap is None else ops.cap(logits)
