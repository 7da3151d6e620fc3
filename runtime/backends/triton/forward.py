"""Forward pass: one step of a model as kernel launches. Implements `models.architecture.StateOperations` there.

Related operations share a launch: the addition of a linear layer's output to the residual stream and the following
norm; head norms, rotation and the cache's append; attention and its gates. Launches are asynchronous and never wait for
the host, so that a whole step can be captured in a CUDA graph.

A linear layer's compensation runs on a second stream concurrently with the base product and writes to a separate
buffer; the kernel that reads the layer's output adds the two. So the result does not depend on which finishes first.
For prompts, whose rows share their compensation, residuals are copied on that stream, and their product follows the
base product.

Source: QDEC §4.1 (Fig. 6), §4.3.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from models.architecture import PartOperations, StateOperations
from runtime.backends.decoder import CompensationMode
from runtime.backends.triton.buffers import Buffers, Value
from runtime.backends.triton.kernels.activations import Projected, round_tokens
from runtime.backends.triton.kernels.attention import attend
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.kernels.gate import OwnTokens, gate, token_gate
from runtime.backends.triton.kernels.norm import Beside, RowNorms, add_norm, embed_norm
from runtime.backends.triton.kernels.recurrent import convolve, delta_rule
from runtime.backends.triton.kernels.residual_gemm import multiply
from runtime.backends.triton.kernels.rope import HeadNorms, TurnedNorms, heads
from runtime.backends.triton.model import GpuModel
from runtime.backends.triton.products import Mixture, Watch, compensated_product, product
from runtime.backends.triton.sizes import PIECE, SUMMED_ROWS, is_kept


class Pass(StateOperations[Value], PartOperations[Value]):
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
        self._embedded: Value | None = None
        """The tokens' embeddings, where every block reads them."""
        self._applied: Value | None = None
        """The residual stream whose pending operations have been applied."""
        self.watch: Watch | None = None
        """Called with every selecting layer's input, and the positions of its rows."""
        if way == "shared":
            model.staging.begin(few=M <= SUMMED_ROWS)

    def embed(self, layer: int | None = None) -> Value:
        """Deferred to the first norm, unless every block reads embeddings."""
        M, C, P, buffers = self._M, self._spec.hidden_size, self._spec.token_width, self._buffers
        if layer is not None:
            return Value(buffers.own_tokens[:M, layer * P : (layer + 1) * P])
        if self._embedded is not None:
            return self._embedded
        stream = Value(buffers.stream(M, C), embeddings=buffers.embeddings[:M])
        if P:
            self._embed_beside(stream.tensor)
            self._applied = stream
        return stream

    def _embed_beside(self, stream: torch.Tensor) -> None:
        """Keep the tokens' embeddings for every block, and write them to `stream`, float32 [M, C], as well."""
        x, sums = self._buffers.embedded(*stream.shape)
        embed_norm(self._buffers.embeddings[: self._M], stream, RowNorms(None, 0.0), x, sums)
        self._embedded = Value(x, sums=sums)

    def enter(self) -> Value:
        """See `models.architecture.PartOperations`. The step has brought the stream."""
        M, C = self._M, self._spec.hidden_size
        if self._spec.token_width:
            self._embed_beside(self._buffers.output(M, C))
        return Value(self._buffers.stream(M, C))

    def leave(self, x: Value) -> Value:
        """See `models.architecture.PartOperations`. First adds pending outputs to the residual stream."""
        self.norm(x, "")
        return Value(x.tensor)

    def norm(self, x: Value, name: str) -> Value:
        """See `models.architecture.Operations`. First adds pending outputs to the residual stream.

        Norms of what routers read are left to these.
        """
        if name.endswith("router_norm"):
            assert x is self._applied
            return Value(x.tensor, norm=name)
        h, C, y = x.tensor, self._spec.hidden_size, None if x is self._applied else x.added
        rows = self._buffers.logit_rows[: self._R] if x.gathered else None
        M = self._R if x.gathered else self._M
        out, sums, rounded = self._buffers.input(M, C), self._buffers.sums(M, C), self._buffers.rounded(M, C)
        norms, left = self._row_norms(name, y, x.scale), sums if rounded is None else rounded
        if x.embeddings is not None and x is not self._applied:
            embed_norm(x.embeddings, h, norms, out, left)
        elif out.numel():
            tensor, dec = (None, None) if y is None else (y.tensor, y.dec)
            add_norm(h, tensor, dec, norms, out, rows, left)
        if not x.gathered:
            self._applied = x
        return Value(out, sums=sums, rounded=rounded, gathered=x.gathered)

    def _row_norms(self, name: str, added: Value | None, scale: str) -> RowNorms:
        """The norm `name` of the residual stream, if any, and what becomes of an output that is added before."""
        norms, eps = self._model.norms, self._spec.norm_eps
        found = RowNorms(norms[name] if name else None, eps, added_eps=self._spec.inner_eps or eps)
        if added is None:
            return found
        both = added.beside
        return found._replace(
            added=norms[added.norm] if added.norm else None,
            beside=None if both is None else Beside(both.tensor, both.dec, norms[both.norm], norms[added.own_norm]),
            scale=norms[scale] if scale else self._model.one,
        )

    def plain(self, x: Value) -> Value:
        """First adds pending outputs to the residual stream."""
        return self._input(x.tensor, x.sums) if x is self._embedded else self.norm(x, "")

    def linear(self, x: Value, name: str) -> Value:
        linear = self._model.linears[name]
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
        dec, positions = self._buffers.compensation(M, N, kept=kept), self._positions(x)
        if self.watch is not None:
            self.watch(linear, x.tensor, positions, None)
        compensated_product(linear, x, positions, out, dec, self._buffers, self._side, copied=self._model.copied)
        return Value(out, dec)

    def split(self, x: Value, widths: tuple[int, ...]) -> tuple[Value, ...]:
        """The parts stay in one buffer: their readers read all of them."""
        return tuple(x for _ in widths)

    def head_norm(self, x: Value, name: str) -> Value:
        """Applied by `attend`'s first kernel."""
        return replace(x, norm=name)

    def rotate(self, x: Value, _layer: int, /) -> Value:
        """Applied by `attend`'s first kernel."""
        return x

    def attend(self, q: Value, k: Value | None, v: Value | None, layer: int) -> Value:
        model, spec, buffers, M = self._model, self._spec, self._buffers, self._M
        assert v is None or q.tensor is v.tensor
        owner, window, width = spec.cache_of(layer), spec.windows[layer], spec.heads_of(layer).q_width
        pages, queries, out = model.cache.layers[owner], buffers.queries(M, width), buffers.input(M, width)
        q_norm, k_norm = (model.norms[x.norm] if x is not None and x.norm else None for x in (q, k))
        form = TurnedNorms if spec.qk_norm_form == "after_rope" else HeadNorms
        value_eps = spec.eps_of(f"layers.{layer}.v_norm") if spec.v_norm else None
        norms = form(q_norm, k_norm, spec.eps_of(f"layers.{layer}.q_norm"), value_eps)
        heads(q.tensor, q.dec, norms, model.ropes[layer], model.bases[owner], self._rows, pages, queries)
        context, draft = model.options.context, self._draft and layer not in self._sensitive
        sums = attend(
            queries,
            pages,
            self._rows,
            window,
            out,
            buffers.main,
            context=context,
            draft=draft,
            cap=spec.score_cap,
            sinks=model.norms[f"layers.{layer}.sinks"] if spec.sinks else None,
            gates=_gates(q, width) if spec.gated else None,
        )
        return self._input(out, sums)

    def output_gate(self, x: Value, gate: Value) -> Value:  # noqa: ARG002  a part of what `attend` reads
        """Applied by `attend`'s last kernel."""
        return x

    def delta_rule(self, x: Value, layer: int) -> Value:
        model, buffers, M = self._model, self._buffers, self._M
        own, runs = model.deltas[layer], model.cache.runs
        assert runs is not None
        width = own.spec.value_width
        out, sums = buffers.input(M, width), None
        if own.spec.value_dim % PIECE == 0:
            sums = buffers.sums(M, width)
        delta_rule(x.tensor, x.dec, self._rows, runs.tensor, own, buffers.mixed(M, own.spec), out, sums)
        return self._input(out, sums)

    def convolve(self, x: Value, layer: int) -> Value:
        M, C = self._M, self._spec.hidden_size
        out, sums = self._buffers.input(M, C), self._buffers.sums(M, C)
        convolve(x.tensor, x.dec, self._rows, self._model.recent[layer], out, sums)
        return self._input(out, sums)

    def _input(self, x: torch.Tensor, sums: torch.Tensor | None) -> Value:
        """Activations float16 [M, K], with the sums of their pieces if known, as the input of a linear layer."""
        rounded = self._buffers.rounded(*x.shape)
        if rounded is not None:
            round_tokens(x, rounded)
        return Value(x, sums=sums, rounded=rounded)

    def norm_inplace(self, y: Value, norm: str) -> Value:
        """Deferred to the norm that reads the sum with another output."""
        return replace(y, own_norm=norm)

    def experts(self, x: Value, layer: int, routed: Value | None = None) -> Value:
        positions = self._buffers.positions[: self._M]
        mixture = Mixture(
            self._model, self._buffers, side=self._side, way=self._way, positions=positions, watch=self.watch
        )
        return mixture.run(x, layer, x if routed is None else routed)

    def gate(self, gate_value: Value, up: Value) -> Value:
        spec, context, width = self._spec, up.added, up.tensor.shape[1]
        width = width if context is not None else width // 2
        out, sums = self._buffers.input(self._M, width), self._buffers.sums(self._M, width)
        gelu, limit = spec.activation == "gelu_tanh", spec.gate_limit
        if context is not None:
            weight, eps = self._model.norms[context.norm], spec.eps_of(context.norm)
            tokens = OwnTokens(up.tensor, up.tensor.stride(0), weight, eps)
            own, other = (Projected(each.tensor, each.dec) for each in (gate_value, context))
            token_gate(own, other, tokens, out, sums, gelu=gelu, limit=limit)
            return self._input(out, sums)
        assert gate_value.tensor is up.tensor
        rounded = self._buffers.rounded(self._M, width)
        gate(up.tensor, up.dec, out, sums, rounded, gelu=gelu, limit=limit)
        return Value(out, sums=sums, rounded=rounded)

    def add(self, x: Value, y: Value, norm: str = "", scale: str = "") -> Value:
        """Deferred to the norm, or the gate, that reads the sum."""
        y = replace(y, norm=norm)
        return replace(x, beside=y) if x.own_norm else Value(x.tensor, added=y, scale=scale)

    def logit_rows(self, x: Value) -> Value:
        """Deferred to the norm that reads the rows."""
        return replace(x, gathered=True)

    def cap(self, logits: Value) -> Value:
        """Applied by `finish`."""
        return logits

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

    def _positions(self, x: Value) -> torch.Tensor:
        """Positions of the rows of x, int32."""
        positions = self._buffers.positions[: self._M]
        if not x.gathered or self._M == 1:
            return positions
        return positions[self._buffers.logit_rows[: self._R].long()]


def _gates(x: Value, width: int) -> Projected:
    """The gates of attention's outputs, the last `width` channels of its projection."""
    return Projected(x.tensor[:, -width:], None if x.dec is None else x.dec[:, -width:])
