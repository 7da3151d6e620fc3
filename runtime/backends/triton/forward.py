"""Forward pass: one step of a model as kernel launches. Runs the graph of `models.architecture`.

A kernel may do more than its node: the addition of an output to the residual stream is part of the following norm, and
so is the beginning of the stream. Attention is three launches, of which the first has norms, rotations and the append.
Launches are asynchronous and never wait for the host, so that a whole step can be captured in a CUDA graph.

A linear layer's compensation runs in the base product's launch, or concurrently on a second stream, and writes to a
separate buffer; the kernel that reads the layer's output adds the two. So the result does not depend on which finishes
first. For prompts, whose rows share their compensation, residuals are copied on that stream, and their product follows
the base product.

Source: QDEC §4.1 (Fig. 6), §4.3.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from models.architecture import Interpreter, Node
from runtime.backends.decoder import CompensationMode
from runtime.backends.triton.buffers import Buffers, Value
from runtime.backends.triton.kernels.activations import Projected, Tokens, round_tokens
from runtime.backends.triton.kernels.attention import attend
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.kernels.gate import OwnTokens, gate, token_gate
from runtime.backends.triton.kernels.norm import Beside, RowNorms, add_norm, embed_norm
from runtime.backends.triton.kernels.recurrent import convolve, delta_rule
from runtime.backends.triton.kernels.residual_gemm import multiply
from runtime.backends.triton.kernels.rope import HeadNorms, TurnedNorms, heads
from runtime.backends.triton.model import GpuModel
from runtime.backends.triton.products import Mixture, Watch, compensated_product, product
from runtime.backends.triton.sizes import RUN, SUMMED_ROWS, is_kept


class Pass(Interpreter[Value]):
    """Launches the kernels of one step of M rows, of which R have logits.

    Attention of a draft reads only what drafts read, but everything in `sensitive` layers. The second stream is `side`;
    None runs everything on the current one.
    """

    def __init__(
        self,
        model: GpuModel,
        buffers: Buffers,
        *,
        M: int,
        R: int,
        way: CompensationMode,
        draft: bool,
        sensitive: Collection[int] = (),
        side: torch.cuda.Stream | None,
    ) -> None:
        self._model, self._spec, self._buffers = model, model.spec, buffers
        self._M, self._R, self._way, self._draft, self._sensitive = M, R, way, draft, sensitive
        self._side = side
        self._applied: Node | None = None
        """The node of the stream that is computed: an `add`, and `embed`, wait for who reads the stream."""
        self.watch: Watch | None = None
        """Called with every selecting layer's input, and the positions of its rows."""
        self.limited: torch.Tensor | None = None
        """int64 [2], to count what half precision limits of layers' inputs, and how many there are; None: uncounted."""
        if way == "shared":
            model.staging.begin(few=M <= SUMMED_ROWS)

    @property
    def _stream(self) -> torch.Tensor:
        return self._buffers.stream(self._M, self._spec.hidden_size)

    def embed(self, node: Node) -> Value:  # noqa: ARG002  the first node
        """Deferred to who reads the stream first, unless every block reads embeddings."""
        return Value(self._stream)

    def enter(self, node: Node) -> Value:
        """The step has brought the stream."""
        self._applied = node
        return Value(self._stream)

    def tokens(self, node: Node) -> Value:
        """Where the stream begins with embeddings, it does so here."""
        M, P, buffers = self._M, self._spec.token_width, self._buffers
        if node.layer >= 0:
            return Value(buffers.own_tokens[:M, node.layer * P : (node.layer + 1) * P])
        stream = self._stream if self._spec.embeds else buffers.output(*self._stream.shape)
        x, left = buffers.embedded(*stream.shape)
        embed_norm(buffers.embeddings[:M], stream, RowNorms(None, 0.0), x, left)
        if self._spec.embeds:
            self._applied = next(iter(self.values))
        return Value(x, left=left)

    def read(self, node: Node) -> Value:
        """First adds the outputs that wait to the residual stream.

        Norms of what routers read are left to these. What two layers read one behind the other is there for both.
        """
        (source,), latest = node.inputs, next(reversed(self.values))
        if latest.kind == "linear" and self._same(latest.inputs[0], node):
            return self.of(latest)
        if source.kind == "linear":
            return self._latent(node)
        if source.kind == "tokens":
            return self._input(self.of(node).tensor, self.of(node).left)
        if node.norm.endswith("router_norm"):
            assert source is self._applied
            return self.of(node)
        gathered = source.kind == "rows"
        return self._read(source.inputs[0] if gathered else source, node.norm, gathered=gathered)

    def _same(self, one: Node, other: Node) -> bool:
        """Whether two nodes read the same of the stream."""
        norms = self._model.norms
        return one.inputs == other.inputs and one.kind == "read" and norms.get(one.norm) is norms.get(other.norm)

    def _latent(self, node: Node) -> Value:
        """The latent that queries are made of, the first channels of a projection, through its norm."""
        y, width = self.of(node), self._spec.read_width(node.norm)
        out, left = self._buffers.input(self._M, width), self._buffers.left(self._M, width)
        norms = RowNorms(self._model.norms[node.norm], self._spec.eps_of(node.norm))
        add_norm(y.tensor[:, :width], None if y.dec is None else y.dec[:, :width], None, norms, out, left=left)
        return Value(out, left=left)

    def leave(self, node: Node) -> Value:
        """First adds the outputs that wait to the residual stream."""
        self._read(node.inputs[0], "", gathered=False)
        return Value(self._stream)

    def _read(self, stream: Node, name: str, *, gathered: bool) -> Value:
        h, C, pending = self._stream, self._spec.hidden_size, None if stream is self._applied else stream
        rows, M = (self._buffers.logit_rows[: self._R], self._R) if gathered else (None, self._M)
        out, left = self._buffers.input(M, C), self._buffers.left(M, C)
        adds = pending is not None and pending.kind == "add"
        norms = self._row_norms(name, pending if adds else None)
        if pending is not None and not adds:
            embed_norm(self._buffers.embeddings[: self._M], h, norms, out, left)
        elif out.numel():
            y = self.of(pending, 1) if pending is not None else None
            tensor, dec = (None, None) if y is None else (y.tensor, y.dec)
            add_norm(h, tensor, dec, norms, out, rows, left)
        if not gathered:
            self._applied = stream
        return Value(out, left=left)

    def _row_norms(self, name: str, add: Node | None) -> RowNorms:
        """The norm `name` of the residual stream, if any, and what becomes of an output that is added before."""
        norms, eps = self._model.norms, self._spec.norm_eps
        found = RowNorms(norms[name] if name else None, eps, added_eps=self._spec.eps_of("o_norm"))
        if add is None:
            return found
        x, y = add.inputs
        both, added = None, norms.get(add.norm)
        if y.kind == "add":  # of two outputs, each of which passes a norm
            beside = self.of(y, 1)
            both = Beside(beside.tensor, beside.dec, norms[y.norm], norms[y.inputs[0].norm])
        elif x is not self._applied:  # to which another output is added
            beside = self.of(x, 1)
            both, added = Beside(beside.tensor, beside.dec, norms.get(x.norm), added), None
        scale = norms[add.scale] if add.scale else self._model.one
        return found._replace(added=added, beside=both, scale=scale)

    def linear(self, node: Node) -> Value:
        x, name, linear = self._read_by(node), node.name, self._model.linears[node.name]
        (M, _), (N, _), kept = x.tensor.shape, linear.packed.shape, is_kept(self._spec, name)
        out = self._buffers.output(M, N, kept=kept)
        if not M:
            return Value(out)
        if self._way == "shared" and linear.shared is not None:
            product(linear, x, out, self._buffers)
            shared, staged = linear.shared, self._model.staging.take()
            multiply(x.tensor, shared.channels, staged, shared.residual.scales, shared.residual.bits, out)
            return Value(out)
        by_rows = self._way == "rows" or (self._way == "shared" and linear.by_rows)
        if not by_rows or linear.selection is None:
            product(linear, x, out, self._buffers)
            return Value(out)
        dec = self._buffers.compensation(M, N, kept=kept)
        positions = self._wanted_positions() if name == "head" else self._buffers.positions[:M]
        if self.watch is not None:
            self.watch(linear, x.tensor, positions, None)
        compensated_product(linear, x, positions, out, dec, self._buffers, self._side, copied=self._model.copied)
        return Value(out, dec)

    def _read_by(self, node: Node) -> Value:
        """The input of layers."""
        x, limited = self.of(node), self.limited
        if limited is not None:
            for read in (x.tensor, x.left):
                if isinstance(read, torch.Tensor) and read.dtype == torch.float16:
                    limited[0] += (read.abs() == torch.finfo(read.dtype).max).sum()
                    limited[1] += read.numel()
        return x

    def attend(self, node: Node) -> Value:
        model, spec, buffers, M, layer = self._model, self._spec, self._buffers, self._M, node.layer
        qkv, owner, window, own = self.of(node), spec.cache_of(layer), spec.windows[layer], spec.heads_of(layer)
        dim, pages, queries = spec.attended_dim(layer), model.cache.layers[owner], buffers.queries(M, own.q_width)
        out, left = buffers.input(M, own.heads * dim), buffers.left_by_heads(M, own.heads * dim, dim)
        q_norm, k_norm = (model.norms.get(f"layers.{layer}.{part}_norm") for part in "qk")
        form = TurnedNorms if spec.qk_norm_form == "after_rope" else HeadNorms
        value_eps = spec.eps_of(f"layers.{layer}.v_norm") if spec.v_norm or spec.latent else None
        rank = spec.latent.rank if spec.latent else None
        norms = form(q_norm, k_norm, spec.eps_of(f"layers.{layer}.q_norm"), value_eps, rank)
        y, rope, basis = self.of(node, len(node.inputs) - 1), model.ropes[layer], model.bases[owner]
        heads(y.tensor, y.dec, norms, rope, basis, self._rows, pages, queries)
        if y is not qkv:
            heads(*_last(qkv, 2 * own.kv_width), norms, rope, basis, self._rows, pages, queries[:, :0])
        context, draft = model.options.context, self._draft and layer not in self._sensitive
        attend(
            queries,
            pages,
            self._rows,
            window,
            out,
            buffers.main,
            context=context,
            left=left,
            draft=draft,
            cap=spec.score_cap,
            sinks=model.norms[f"layers.{layer}.sinks"] if spec.sinks else None,
            gates=_last(qkv, spec.attention_widths(layer)[-1]) if spec.gated else None,
            softplus=spec.gate_form == "softplus",
        )
        return self._input(out, left)

    def delta(self, node: Node) -> Value:
        model, buffers, M, x = self._model, self._buffers, self._M, self.of(node)
        own, runs = model.deltas[node.layer], model.cache.runs
        assert runs is not None
        width = own.spec.value_width
        out, left = buffers.input(M, width), buffers.left_by_heads(M, width, own.spec.value_dim)
        delta_rule(x.tensor, x.dec, self._rows, runs.tensor, own, buffers.mixed(M, own.spec), out, left)
        return self._input(out, left)

    def convolve(self, node: Node) -> Value:
        M, C, x = self._M, self._spec.hidden_size, self.of(node)
        out, left = self._buffers.input(M, C), self._buffers.left_by_heads(M, C, RUN)
        convolve(x.tensor, x.dec, self._rows, self._model.recent[node.layer], out, left)
        return self._input(out, left)

    def _input(self, x: torch.Tensor, left: torch.Tensor | Tokens | None) -> Value:
        """Activations float16 [M, K], with what is left of them but tokens, as the input of a linear layer."""
        tokens = self._buffers.left(*x.shape)
        if isinstance(tokens, Tokens):
            round_tokens(x, tokens)
            left = tokens
        return Value(x, left=left)

    def experts(self, node: Node) -> Value:
        positions = self._buffers.positions[: self._M]
        mixture = Mixture(
            self._model, self._buffers, side=self._side, way=self._way, positions=positions, watch=self.watch
        )
        return mixture.run(self._read_by(node), node.layer, self.of(node, 1))

    def gate(self, node: Node) -> Value:
        spec, M, x = self._spec, self._M, self.of(node)
        alone = len(node.inputs) == 1
        width = x.tensor.shape[1] // (spec.mlp_parts if alone else 1)
        out, how = self._buffers.input(M, width), self._model.activation(node.layer)
        if alone:
            left = self._buffers.left(M, width)
            gate(x.tensor, x.dec, out, left, how=how)
            return Value(out, left=left)
        add = node.inputs[1]
        own = self.of(add).tensor
        tokens = OwnTokens(own, own.stride(0), self._model.norms[add.norm], spec.eps_of(add.norm))
        gates, context = (Projected(each.tensor, each.dec) for each in (x, self.of(add, 1)))
        by_rows = self._buffers.left_by_heads(M, width, RUN)
        token_gate(gates, context, tokens, out, by_rows, how=how)
        return self._input(out, by_rows)

    norm = add = rows = cap = Interpreter.left  # the norm that follows, `token_gate` and `finish` do these

    def finish(self, logits: Value) -> torch.Tensor:
        """Logits float32 [R, V], with compensation, and capped, or the stream that a part leaves.

        Their sum shows whether any was not finite.
        """
        if logits.tensor.numel():
            if logits.dec is not None:
                logits.tensor.add_(logits.dec)
            torch.sum(logits.tensor.view(-1), 0, keepdim=True, out=self._buffers.total)
            if self._spec.logit_cap is not None:
                logits.tensor.div_(self._spec.logit_cap).tanh_().mul_(self._spec.logit_cap)
        return logits.tensor

    @property
    def _rows(self) -> Rows:
        """Slots and positions of the step's rows."""
        return Rows(self._buffers.positions[: self._M], self._buffers.slots[: self._M])

    def _wanted_positions(self) -> torch.Tensor:
        """Positions of the rows whose logits are wanted, int32 [R]."""
        positions = self._buffers.positions[: self._M]
        return positions if self._M == 1 else positions[self._buffers.logit_rows[: self._R].long()]


def _last(x: Value, width: int) -> Projected:
    """The last channels of attention's projection."""
    return Projected(x.tensor[:, -width:], None if x.dec is None else x.dec[:, -width:])
