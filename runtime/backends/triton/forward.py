"""Forward pass: one step of a model as kernel launches. Implements `models.architecture.Operations` on the device.

Related operations share a launch: the addition of a linear layer's output to the residual stream and the following
norm; head norms, rotation and the cache's append. Launches are asynchronous and never wait for the host, so that a
whole step can be captured in a CUDA graph.

A linear layer's compensation runs on a second stream concurrently with the base product and writes to a separate
buffer; the kernel that reads the layer's output adds the two. So the result does not depend on which finishes first.
For prompts, whose rows share their compensation, residuals are copied on that stream, and their product follows the
base product.

Source: QDEC §4.1 (Fig. 6), §4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from models.architecture import Operations
from runtime.backends.decoder import Way
from runtime.backends.triton.kernels.attention.kernel import attend
from runtime.backends.triton.kernels.cache.pages import Rows
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate
from runtime.backends.triton.kernels.gate import gate
from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.kernels.gemv import ROWS, few_rows
from runtime.backends.triton.kernels.norm import RowNorms, add_norm, embed_norm
from runtime.backends.triton.kernels.residual_gemm import multiply
from runtime.backends.triton.kernels.rope import HeadNorms, TurnedNorms, heads
from runtime.backends.triton.kernels.tokens import Tokens, round_tokens
from runtime.backends.triton.kernels.w4a8 import gemm_w4a8
from runtime.backends.triton.launch_check import refused_cooperation
from runtime.backends.triton.model import GpuModel, Linear
from runtime.backends.triton.sizes import NO_EXPERTS, SUMMED_ROWS, buffer_sizes, pieces, token_width
from runtime.backends.triton.w4a8_layout import W4A8Linear
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError

Watch = Callable[[Linear, torch.Tensor, torch.Tensor], None]


class Buffers:
    """Activations of the widest step, the step's inputs on the device, and auxiliary buffers of kernels.

    A linear layer's output is only read by the next kernel, so all layers share one buffer. Compensations, which run
    concurrently with products, have a buffer of their own for a few rows. Logits of more than one row, which only
    evaluation requests, may allocate memory that is released after the step.

    Args:
        model: The model.
        rows: Most rows of a step (M).
    """

    def __init__(self, model: GpuModel, rows: int) -> None:
        spec, device = model.spec, model.device
        sizes = buffer_sizes(spec, rows, model.token_group)
        self._token_group = model.token_group
        self._tokens = torch.zeros(sizes.tokens, dtype=torch.int8, device=device)
        self._token_sums = torch.zeros(sizes.token_sums, dtype=torch.int32, device=device)
        self._token_scales = torch.zeros(sizes.token_scales, device=device)
        self._inputs = torch.zeros(sizes.inputs, dtype=torch.float16, device=device)
        self._sums = torch.zeros(sizes.sums, device=device)
        self._queries = torch.zeros(sizes.queries, dtype=torch.float16, device=device)
        self._stream = torch.zeros(sizes.stream, device=device)
        self._output = torch.zeros(sizes.output, device=device)
        self._compensation = torch.zeros(sizes.compensation, device=device)
        self.inputs = torch.zeros((4, rows), dtype=torch.int32, device=device)
        """int32 [4, rows], a step's inputs, which are the next four."""
        self.tokens: torch.Tensor = self.inputs[0]
        self.slots: torch.Tensor = self.inputs[1]
        self.positions: torch.Tensor = self.inputs[2]
        self.logit_rows: torch.Tensor = self.inputs[3]
        self.status = torch.zeros(2, dtype=torch.int32, device=device)
        """int32 [2], inputs of the next two."""
        self.flag = self.status[:1]
        """int32 [1], 1 once compensation found NaN or infinity."""
        self.total = self.status[1:].view(torch.float32)
        """float32 [1], the sum of a step's logits: NaN or infinity if any of them is."""
        self.main, self.side = Workspace(device, sizes.scratch), Workspace(device)
        """Workspaces of the two streams."""
        self.alone: str | None = refused_cooperation(device) if device.type == "cuda" else "programs run in turn"
        """Why a row's compensation takes two launches; None if one, whose programs wait for each other."""

    def stream(self, M: int, C: int) -> torch.Tensor:
        """float32 [M, C], the residual stream."""
        return self._stream[: M * C].view(M, C)

    def input(self, M: int, K: int) -> torch.Tensor:
        """float16 [M, K], the input of a linear layer."""
        return self._inputs[: M * K].view(M, K)

    def sums(self, M: int, K: int) -> torch.Tensor | None:
        """float32 [M, ceil(K / 32)], the sums of the pieces of that input; None if not needed.

        They are not needed for many rows, nor by products that read INT8 tokens.
        """
        each = pieces(K)
        return None if M > SUMMED_ROWS or self._token_group is not None else self._sums[: M * each].view(M, each)

    def rounded(self, M: int, K: int) -> Tokens | None:
        """That input as INT8 tokens [M, K]; None if products read half precision."""
        group = self._token_group
        if group is None:
            return None
        width = token_width(K, group)
        groups = width // group if group else 1
        codes, sums = self._tokens[: M * width].view(M, width), self._token_sums[: M * groups].view(M, groups)
        return Tokens(codes, self._token_scales[:M], sums, group)

    def queries(self, M: int, width: int) -> torch.Tensor:
        """float16 [M, H * D]."""
        return self._queries[: M * width].view(M, width)

    def output(self, M: int, N: int) -> torch.Tensor:
        """float32 [M, N], the output of a linear layer, valid until the next one is requested."""
        if self._output.numel() < M * N:
            return torch.empty(M, N, device=self._output.device)
        return self._output[: M * N].view(M, N)

    def compensation(self, M: int, N: int) -> torch.Tensor | None:
        """float32 [M, N], the compensation of an output; None if there are so many rows that it is added in place.

        The side stream writes it after all earlier launches, including the last reader of its old contents.
        """
        if self._compensation.numel() < M * N:
            return None
        return self._compensation[: M * N].view(M, N)


@dataclass(frozen=True, slots=True)
class Value:
    """A [rows, width] matrix of activations, with its pending operations."""

    tensor: torch.Tensor
    """The residual stream (float32), the input of a linear layer (float16), or its output (float32)."""
    dec: torch.Tensor | None = None
    """Compensation still to be added."""
    added: Value | None = None
    """An output still to be added to this residual stream."""
    sums: torch.Tensor | None = None
    """Sums of the pieces of an input, if the kernel that wrote it computed them."""
    rounded: Tokens | None = None
    """An input as INT8 tokens, if products read these."""
    norm: str = ""
    """Norm of heads, or of an output to be added, still to be applied."""
    tokens: torch.Tensor | None = None
    """Tokens int32 [M] whose embeddings will become this residual stream."""
    gathered: bool = False
    """Whether these are only the rows whose logits are wanted."""


class Pass(Operations[Value]):
    """Launches the kernels of one step.

    Args:
        model: The model.
        buffers: Provide the step's inputs, and all other memory.
        M: Rows.
        R: Rows whose logits are wanted.
        way: Compensation mode.
        draft: Whether attention reads only what drafts read.
        sensitive: Layers in which drafts read everything.
        side: The second stream; None runs everything on the current one.
    """

    def __init__(
        self,
        model: GpuModel,
        buffers: Buffers,
        *,
        M: int,
        R: int,
        way: Way,
        draft: bool,
        sensitive: Collection[int] = (),
        side: torch.cuda.Stream | None,
    ) -> None:
        self._model, self._spec, self._buffers = model, model.spec, buffers
        self._M, self._R, self._way, self._draft, self._sensitive = M, R, way, draft, sensitive
        self._side = side
        self.watch: Watch | None = None
        """Called with every selecting layer's input, and the positions of its rows."""
        if way == "shared":
            model.staging.begin()

    def embed(self, layer: int | None = None) -> Value:
        """See `models.architecture.Operations`. Deferred to the first norm."""
        assert layer is None  # such models are refused (`backend.py`)
        return Value(self._buffers.stream(self._M, self._spec.hidden_size), tokens=self._buffers.tokens[: self._M])

    def norm(self, x: Value, name: str) -> Value:
        """See `models.architecture.Operations`. First adds pending outputs to the residual stream."""
        h, C = x.tensor, self._spec.hidden_size
        y, dec = (None, None) if x.added is None else (x.added.tensor, x.added.dec)
        rows = self._buffers.logit_rows[: self._R] if x.gathered else None
        M = self._R if x.gathered else self._M
        out, sums, rounded = self._buffers.input(M, C), self._buffers.sums(M, C), self._buffers.rounded(M, C)
        weight = self._model.norms[name] if name else None
        added = self._model.norms[x.added.norm] if x.added is not None and x.added.norm else None
        norms = RowNorms(weight, self._spec.norm_eps, added, self._spec.inner_eps or self._spec.norm_eps)
        if x.tokens is not None:
            embed_norm(x.tokens, self._model.table, h, norms, out, sums if rounded is None else rounded)
        elif out.numel():
            add_norm(h, y, dec, norms, out, rows, sums if rounded is None else rounded)
        return Value(out, sums=sums, rounded=rounded, gathered=x.gathered)

    def plain(self, x: Value) -> Value:
        """See `models.architecture.Operations`. First adds pending outputs to the residual stream."""
        return self.norm(x, "")

    def linear(self, x: Value, name: str) -> Value:
        """See `models.architecture.Operations`."""
        linear = self._model.linears[name]
        M, N = x.tensor.shape[0], linear.packed.shape[0]
        out = self._buffers.output(M, N)
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
        dec, positions = self._buffers.compensation(M, N), self._positions(x)
        if self.watch is not None:
            self.watch(linear, x.tensor, positions)
        compensated_product(linear, x, positions, out, dec, self._buffers, self._side, copied=self._model.copied)
        return Value(out, dec)

    def split(self, x: Value, widths: tuple[int, ...]) -> tuple[Value, ...]:
        """See `models.architecture.Operations`. The parts stay in one buffer: their readers read all of them."""
        return tuple(x for _ in widths)

    def head_norm(self, x: Value, name: str) -> Value:
        """See `models.architecture.Operations`. Applied by `attend`'s first kernel."""
        return replace(x, norm=name)

    def rotate(self, x: Value, _layer: int, /) -> Value:
        """See `models.architecture.Operations`. Applied by `attend`'s first kernel."""
        return x

    def attend(self, q: Value, k: Value | None, v: Value | None, layer: int) -> Value:
        """See `models.architecture.Operations`."""
        model, spec, buffers, M = self._model, self._spec, self._buffers, self._M
        assert k is not None
        assert v is not None
        assert q.tensor is v.tensor
        pages, window = model.cache.layers[layer], spec.windows[layer]
        rows = Rows(buffers.positions[:M], buffers.slots[:M])
        queries, out = buffers.queries(M, spec.q_width), buffers.input(M, spec.q_width)
        q_norm, k_norm = (model.norms[x.norm] if x.norm else None for x in (q, k))
        form = TurnedNorms if spec.qk_norm_form == "turned" else HeadNorms
        norms = form(q_norm, k_norm, spec.eps_of(f"layers.{layer}.q_norm"))
        rope, basis = model.ropes[layer], model.bases[layer]
        heads(v.tensor, v.dec, norms, rope, basis, rows, pages, queries)
        context, draft = model.options.context, self._draft and layer not in self._sensitive
        sums = attend(
            queries,
            pages,
            rows,
            window,
            out,
            buffers.main,
            context=context,
            draft=draft,
            cap=spec.score_cap,
            sinks=model.norms[f"layers.{layer}.sinks"] if spec.sinks else None,
        )
        rounded = buffers.rounded(M, spec.q_width)
        if rounded is not None:
            round_tokens(out, rounded)
        return Value(out, sums=sums, rounded=rounded)

    def settle(self, y: Value, norm: str) -> Value:  # noqa: ARG002  no kernels for it
        """See `models.architecture.Operations`."""
        raise BackendError(NO_EXPERTS)

    def experts(self, x: Value, layer: int, routed: Value | None = None) -> Value:  # noqa: ARG002  no kernels for it
        """See `models.architecture.Operations`."""
        raise BackendError(NO_EXPERTS)

    def gate(self, gate_value: Value, up: Value) -> Value:
        """See `models.architecture.Operations`."""
        assert gate_value.tensor is up.tensor
        width = self._spec.intermediate_size
        out, sums = self._buffers.input(self._M, width), self._buffers.sums(self._M, width)
        rounded = self._buffers.rounded(self._M, width)
        gate(up.tensor, up.dec, out, sums, rounded, gelu=self._spec.activation == "gelu_tanh")
        return Value(out, sums=sums, rounded=rounded)

    def add(self, x: Value, y: Value, norm: str = "", scale: str = "") -> Value:
        """See `models.architecture.Operations`. Deferred to the norm that reads the sum."""
        assert not scale
        return Value(x.tensor, added=replace(y, norm=norm))

    def logit_rows(self, x: Value) -> Value:
        """See `models.architecture.Operations`. Deferred to the norm that reads the rows."""
        return replace(x, gathered=True)

    def cap(self, logits: Value) -> Value:
        """See `models.architecture.Operations`. Applied by `finish`."""
        return logits

    def finish(self, logits: Value) -> torch.Tensor:
        """Logits float32 [R, V], with compensation, and capped. Their sum shows whether any was not finite."""
        if logits.tensor.numel():
            if logits.dec is not None:
                logits.tensor.add_(logits.dec)
            torch.sum(logits.tensor.view(-1), 0, keepdim=True, out=self._buffers.total)
            if self._spec.logit_cap is not None:
                logits.tensor.div_(self._spec.logit_cap).tanh_().mul_(self._spec.logit_cap)
        return logits.tensor

    def _positions(self, x: Value) -> torch.Tensor:
        """Positions of the rows of x, int32."""
        positions = self._buffers.positions[: self._M]
        if not x.gathered or self._M == 1:
            return positions
        return positions[self._buffers.logit_rows[: self._R].long()]


def product(linear: Linear, x: Value, out: torch.Tensor, buffers: Buffers) -> None:
    """The base product.

    Args:
        linear: The layer.
        x: float16 [M, K], with the sums of its pieces if known; or its INT8 tokens.
        out: float32 [M, N]; overwritten.
        buffers: For the workspace.
    """
    if isinstance(linear.weight, W4A8Linear):
        assert x.rounded is not None
        gemm_w4a8(x.rounded, linear.weight, out, buffers.main)
    elif x.tensor.shape[0] <= ROWS:
        few_rows(x.tensor, linear.weight, out, buffers.main, sums=x.sums)
    else:
        gemm(x.tensor, linear.weight, out, buffers.main)


def compensated_product(
    linear: Linear,
    x: Value,
    positions: torch.Tensor,
    out: torch.Tensor,
    dec: torch.Tensor | None,
    buffers: Buffers,
    side: torch.cuda.Stream | None,
    *,
    copied: torch.Tensor | None = None,
) -> None:
    """The base product, and concurrently its compensation on another stream; the current stream waits for both.

    The bits do not depend on where the two are added: each output is one sum of the two.

    Args:
        linear: The layer, with residual and selection.
        x: As in `product`.
        positions: int32 [M].
        out: float32 [M, N], receives the base product.
        dec: float32 [M, N], receives the compensation; None adds it to `out`, after the product.
        buffers: Workspaces and the flag.
        side: Stream of the compensation; None runs it before the product.
        copied: As in `LaunchConfig`.
    """
    assert linear.selection is not None
    assert linear.residual is not None
    selection, residual, rest = linear.selection, linear.residual, {"flag": buffers.flag, "positions": positions}
    if dec is None:
        product(linear, x, out, buffers)
        config, output = LaunchConfig(n_tb=linear.n_tb, fused=False, copied=copied), Output(out, out)
        compensate(x.tensor, selection, residual, output, config, buffers.main, **rest)
        return
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # first, so that its blocks find room before the product occupies the device
        compensate(
            x.tensor,
            selection,
            residual,
            Output(dec),
            LaunchConfig(n_tb=linear.n_tb, fused=buffers.alone is None and x.tensor.shape[0] == 1, copied=copied),
            buffers.side,
            **rest,
        )
    product(linear, x, out, buffers)
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
