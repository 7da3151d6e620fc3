"""Products of linear layers and of the experts of a mixture, with their compensation beside them.

The compensation of a row is part of the product's launch, or it runs on the second stream concurrently, as that of a
few rows does. What reads the output adds the two: the bits do not depend on where that is done.

In a mixture, a row and one of its experts are a pair. A few rows (a decoded token, drafts, a batch) run pair by pair, a
prompt's pairs in groups of one expert (`runtime.backends.triton.kernels.experts`). A few rows of a prompt fetch the
residuals of their own experts, for the channels that prompts share; more rows use copies of all experts' residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from runtime.backends.decoder import CompensationMode
from runtime.backends.triton.buffers import Buffers, Value
from runtime.backends.triton.experts import GpuExperts
from runtime.backends.triton.kernels.activations import Tokens, rotate
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate, compensate_experts, in_one
from runtime.backends.triton.kernels.experts import Groups, block_of, few, group, many, sum_up
from runtime.backends.triton.kernels.gate import gate
from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.kernels.gemv import prepare
from runtime.backends.triton.kernels.residual_gemm import multiply_experts
from runtime.backends.triton.kernels.routing import Routed, route
from runtime.backends.triton.kernels.select import Selection
from runtime.backends.triton.kernels.w4a8 import W4A8Linear, gemm_w4a8
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.model import GpuModel, Linear
from runtime.backends.triton.sizes import SUMMED_ROWS
from runtime.backends.triton.workspace import Workspace

Watch = Callable[[Linear, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""Called with a selecting layer, its input, the positions of its rows, and their experts if each belongs to one."""


def product(linear: Linear, x: Value, out: torch.Tensor, buffers: Buffers) -> None:
    """The base product: of x float16 [M, K], rotated or as INT8 tokens if the weights are, into out float32 [M, N]."""
    weight, left = linear.weight, x.left
    if isinstance(weight, W4A8Linear):
        assert isinstance(left, Tokens)
        gemm_w4a8(left, weight, out, buffers.main)
        return
    assert isinstance(weight, GpuLinear)
    assert not isinstance(left, Tokens)
    gemm(_read(weight, x, buffers), weight, out, buffers.main, sums=None if weight.trellis else left)


def _read(weight: GpuLinear, x: Value, buffers: Buffers) -> torch.Tensor:
    """What products read of an input: of a trellis the rows rotated, here unless the kernel before did it."""
    if not weight.trellis:
        return x.tensor
    left = x.left
    if left is None:
        left = buffers.left(*x.tensor.shape)
        assert isinstance(left, torch.Tensor)
        rotate(x.tensor, left)
    assert isinstance(left, torch.Tensor)
    return left


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
    """The base product of a layer with residual and selection, and its compensation.

    Of one row both are one launch where `in_one` says so, else one runs beside the other (`_beside`).
    """
    weight, selection, residual = linear.weight, linear.selection, linear.residual
    assert selection is not None
    assert residual is not None
    fused = dec is not None and buffers.alone is None and x.tensor.shape[0] == 1
    config = LaunchConfig(n_tb=linear.n_tb, fused=fused, copied=copied)
    rest = {"flag": buffers.flag, "positions": positions}
    if dec is not None and fused and isinstance(weight, GpuLinear) and in_one(weight, residual):
        assert not isinstance(x.left, Tokens)
        ready = prepare(_read(weight, x, buffers), weight, out, buffers.main, sums=x.left)
        config = replace(config, product=ready)
        compensate(x.tensor, selection, residual, Output(dec), config, buffers.side, **rest)
        return

    def compensation(output: Output, workspace: Workspace) -> None:
        compensate(x.tensor, selection, residual, output, config, workspace, **rest)

    _beside(partial(product, linear, x, out, buffers), compensation, out, dec, buffers, side)


def _beside(
    base: Callable[[], None],
    compensation: Callable[[Output, Workspace], None],
    out: torch.Tensor,
    dec: torch.Tensor | None,
    buffers: Buffers,
    side: torch.cuda.Stream | None,
) -> None:
    """A product into `out`, and its compensation beside it; the current stream waits for both.

    Args:
        base: Launches the product.
        compensation: Launches the compensation, with its destination and the workspace of its stream.
        out: float32 [M, N].
        dec: float32 [M, N], receives the compensation; None adds it to `out`, after the product.
        buffers: Workspaces.
        side: Stream of the compensation; None runs it before the product.
    """
    if dec is None:
        base()
        compensation(Output(out, out), buffers.main)
        return
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # first, so that its blocks find room before the product occupies the device
        compensation(Output(dec), buffers.side)
    base()
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)


class Mixture:
    """Launches the kernels of mixtures in one step, whose rows have the positions int32 [M].

    The second stream is `side`; None runs everything on the current one. `watch` is called for every selection of a
    row's own channels.
    """

    def __init__(
        self,
        model: GpuModel,
        buffers: Buffers,
        *,
        side: torch.cuda.Stream | None,
        way: CompensationMode,
        positions: torch.Tensor,
        watch: Watch | None,
    ) -> None:
        self._model, self._spec, self._buffers, self._side = model, model.spec, buffers, side
        self._way, self._positions, self._watch = way, positions, watch

    def run(self, x: Value, layer: int, routed: Value) -> Value:
        """The experts of a block.

        Args:
            x: float16 [M, C], with the sums of its pieces if there are few rows.
            layer: The block.
            routed: [M, C], what the router reads: the same, or the residual stream.

        Returns:
            float32 [M, C], with compensation still to be added if it has a buffer of its own.
        """
        M, buffers = x.tensor.shape[0], self._buffers
        assert buffers.routing is not None
        chosen = buffers.routing.routed(M)
        route(routed.tensor, self._model.routers[layer], chosen, buffers.main)
        gate_up, down = (self._model.linears[f"layers.{layer}.experts.0.{kind}"] for kind in ("gate_up", "down"))
        if M > SUMMED_ROWS:
            return self._many(x, gate_up, down, chosen, layer)
        if self._model.placement is not None:
            self._model.placement.admit(layer, chosen.chosen)
        pairs = chosen.chosen.numel()
        inner = self.product(gate_up, x, chosen.chosen, buffers.output(pairs, gate_up.weight.shape[0]))
        out = buffers.output(M, self._spec.hidden_size)
        return self.product(down, self._gate(inner, chosen, layer), chosen.chosen, out, shares=chosen.shares)

    def product(
        self, linear: Linear, x: Value, chosen: torch.Tensor, out: torch.Tensor, *, shares: torch.Tensor | None = None
    ) -> Value:
        """The product of a few rows with their experts' matrices, and its compensation; arguments as in `few`."""
        assert isinstance(linear.weight, GpuExperts)
        assert isinstance(x.left, torch.Tensor)
        buffers, selection = self._buffers, self._selection(linear)
        read = _read(linear.weight.first, x, buffers)
        base = partial(few, read, x.left, linear.weight, chosen, out, buffers.main, shares=shares)
        if selection is None:
            base()
            return Value(out)
        dec = buffers.compensation(*out.shape)
        compensation = partial(self._compensate, linear, selection, x.tensor, chosen)
        _beside(base, compensation, out, dec, buffers, self._side)
        return Value(out, dec)

    def _many(self, x: Value, gate_up: Linear, down: Linear, routed: Routed, layer: int) -> Value:
        """The experts of a prompt's rows, in groups of one expert."""
        M, each = routed.chosen.shape
        buffers, pairs, width = self._buffers, M * each, self._spec.hidden_size
        routing = buffers.routing
        assert routing is not None
        assert self._spec.mixture is not None
        block_m = block_of(pairs, self._spec.mixture.num_experts)
        groups = routing.groups(M, block_m)
        group(routed.chosen, self._spec.mixture.num_experts, groups, block_m)
        out = buffers.output(pairs, gate_up.weight.shape[0])
        self._grouped(gate_up, x, groups, out, each=each, block_m=block_m)
        selection = self._selection(gate_up)
        if self._way == "rows" and selection is not None:
            self._compensate(gate_up, selection, x.tensor, routed.chosen, Output(out, out), buffers.main)
        inner = self._gate(Value(out), routed, layer)
        parts, mixed = buffers.output(pairs, width), routing.mixed(M)
        self._grouped(down, inner, groups, parts, each=1, block_m=block_m, shares=routed.shares)
        sum_up(parts, mixed)
        selection = self._selection(down)
        if self._way == "rows" and selection is not None:
            self._compensate(down, selection, inner.tensor, routed.chosen, Output(mixed, mixed), buffers.main)
        return Value(mixed)

    def _grouped(
        self,
        linear: Linear,
        x: Value,
        groups: Groups,
        out: torch.Tensor,
        *,
        each: int,
        block_m: int,
        shares: torch.Tensor | None = None,
    ) -> None:
        """Products of pairs, and those with the residuals that prompts share."""
        assert isinstance(linear.weight, GpuExperts)
        read = _read(linear.weight.first, x, self._buffers)
        many(read, linear.weight, groups, out, each=each, block_m=block_m, shares=shares)
        if self._way == "shared" and linear.shared is not None:
            staged = self._model.staging.take()
            multiply_experts(x.tensor, linear.shared, staged, groups, out, each=each, block_m=block_m)

    def _gate(self, inner: Value, routed: Routed, layer: int) -> Value:
        """The gate of each pair, times its share."""
        (M, each), spec = routed.chosen.shape, self._spec
        width, how = inner.tensor.shape[1] // spec.mlp_parts, self._model.activation(layer)
        out, left = self._buffers.input(M * each, width), self._buffers.left(M, width, each=each)
        gate(inner.tensor, inner.dec, out, left, how=how, factors=routed.shares.view(-1))
        return Value(out, left=left)

    def _selection(self, linear: Linear) -> Selection | None:
        """What chooses the channels of rows that fetch residuals by themselves; None: they are not compensated."""
        if self._way == "rows":
            return linear.selection
        return linear.shared.selection if self._way == "shared" and linear.shared is not None else None

    def _compensate(
        self,
        linear: Linear,
        selection: Selection,
        x: torch.Tensor,
        chosen: torch.Tensor,
        output: Output,
        workspace: Workspace,
    ) -> None:
        """Fetch what rows choose of their experts' residuals."""
        assert linear.residual is not None
        positions, each = self._positions, chosen.shape[1]
        own = x.shape[0] == chosen.numel()
        if self._watch is not None and self._way == "rows":
            of_rows = positions.repeat_interleave(each) if own else positions
            self._watch(linear, x, of_rows, chosen.view(-1) if own else None)
        compensate_experts(
            x, selection, linear.residual, chosen, output, workspace, n_tb=linear.n_tb,
            rest=(self._buffers.flag, positions),
        )  # fmt: skip
