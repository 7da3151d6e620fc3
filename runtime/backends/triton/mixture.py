"""A mixture of experts as kernel launches: the router, `gate_up`, the gate with each expert's share, and `down`.

A row and one of its experts are a pair. A few rows (a decoded token, drafts, a batch) run pair by pair, a prompt's
pairs in groups of one expert (`runtime.backends.triton.kernels.experts`).

As in `runtime.backends.triton.forward`, compensation of a few rows runs on the second stream beside the product, and
what reads the output adds the two. A few rows of a prompt fetch the residuals of their own experts, for the channels
that prompts share; more rows than that use copies of all experts' residuals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.backends.decoder import Way
from runtime.backends.triton.buffers import Buffers, RoutingBuffers, Value
from runtime.backends.triton.expert_layout import GpuExperts
from runtime.backends.triton.kernels.compensate import Output
from runtime.backends.triton.kernels.expert_residuals import compensate_experts, multiply_experts
from runtime.backends.triton.kernels.experts import block_of, few, many, sum_up
from runtime.backends.triton.kernels.gate import gate
from runtime.backends.triton.kernels.grouping import Groups, group
from runtime.backends.triton.kernels.routing import Routed, route
from runtime.backends.triton.kernels.select import Selection
from runtime.backends.triton.model import GpuModel, Linear
from runtime.backends.triton.sizes import SUMMED_ROWS
from runtime.backends.triton.workspace import Workspace

Watch = Callable[[Linear, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""Called with a selecting layer, its input, the positions of its rows, and their experts if each belongs to one."""


class Mixture:
    """Launches the kernels of mixtures in one step.

    Args:
        model: The model.
        buffers: Activations.
        side: The second stream; None runs everything on the current one.
        way: Compensation mode.
        positions: int32 [M], of the step's rows.
        watch: Called for every selection of a row's own channels; None: not called.
    """

    def __init__(
        self,
        model: GpuModel,
        buffers: Buffers,
        *,
        side: torch.cuda.Stream | None,
        way: Way,
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
            return self._many(x, gate_up, down, chosen, buffers.routing)
        pairs = chosen.chosen.numel()
        inner = self.product(gate_up, x, chosen.chosen, buffers.output(pairs, gate_up.weight.shape[0]))
        out = buffers.output(M, self._spec.hidden_size)
        return self.product(down, self._gate(inner, chosen), chosen.chosen, out, shares=chosen.shares)

    def product(
        self, linear: Linear, x: Value, chosen: torch.Tensor, out: torch.Tensor, *, shares: torch.Tensor | None = None
    ) -> Value:
        """The product of a few rows with their experts' matrices, and concurrently its compensation.

        Args:
            linear: The experts' layer.
            x: As in `runtime.backends.triton.kernels.experts.few`, with sums.
            chosen: int32 [M, each], the experts of the rows.
            out: float32, receives the product.
            shares: As in `few`.
        """
        weight, buffers, side = linear.weight, self._buffers, self._side
        assert isinstance(weight, GpuExperts)
        assert x.sums is not None
        selection = self._selection(linear)
        dec = None if selection is None else buffers.compensation(*out.shape)
        if selection is not None and dec is not None:
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._compensate(linear, selection, x.tensor, chosen, Output(dec), buffers.side)
        few(x.tensor, x.sums, weight, chosen, out, buffers.main, shares=shares)
        if selection is not None and dec is None:
            self._compensate(linear, selection, x.tensor, chosen, Output(out, out), buffers.main)
        elif selection is not None and side is not None:
            torch.cuda.current_stream().wait_stream(side)
        return Value(out, dec)

    def _many(self, x: Value, gate_up: Linear, down: Linear, routed: Routed, routing: RoutingBuffers) -> Value:
        """The experts of a prompt's rows, in groups of one expert."""
        M, each = routed.chosen.shape
        buffers, pairs, width = self._buffers, M * each, self._spec.hidden_size
        assert self._spec.mixture is not None
        block_m = block_of(pairs, self._spec.mixture.held)
        groups = routing.groups(M, block_m)
        group(routed.chosen, self._spec.mixture.held, groups, block_m)
        out = buffers.output(pairs, gate_up.weight.shape[0])
        self._grouped(gate_up, x.tensor, groups, out, each=each, block_m=block_m)
        selection = self._selection(gate_up)
        if self._way == "rows" and selection is not None:
            self._compensate(gate_up, selection, x.tensor, routed.chosen, Output(out, out), buffers.main)
        inner = self._gate(Value(out), routed).tensor
        parts, mixed = buffers.output(pairs, width), routing.mixed(M)
        self._grouped(down, inner, groups, parts, each=1, block_m=block_m, shares=routed.shares)
        sum_up(parts, mixed)
        selection = self._selection(down)
        if self._way == "rows" and selection is not None:
            self._compensate(down, selection, inner, routed.chosen, Output(mixed, mixed), buffers.main)
        return Value(mixed)

    def _grouped(
        self,
        linear: Linear,
        x: torch.Tensor,
        groups: Groups,
        out: torch.Tensor,
        *,
        each: int,
        block_m: int,
        shares: torch.Tensor | None = None,
    ) -> None:
        """Products of pairs, and those with the residuals that prompts share."""
        assert isinstance(linear.weight, GpuExperts)
        many(x, linear.weight, groups, out, each=each, block_m=block_m, shares=shares)
        if self._way == "shared" and linear.shared is not None:
            staged = self._model.staging.take()
            multiply_experts(x, linear.shared, staged, groups, out, each=each, block_m=block_m)

    def _gate(self, inner: Value, routed: Routed) -> Value:
        """The gate of each pair, times its share."""
        (M, each), width, spec = routed.chosen.shape, inner.tensor.shape[1] // 2, self._spec
        out, sums = self._buffers.input(M * each, width), self._buffers.sums(M, width, each=each)
        gelu, factors = spec.activation == "gelu_tanh", routed.shares.view(-1)
        gate(inner.tensor, inner.dec, out, sums, factors=factors, gelu=gelu, limit=spec.gate_limit)
        return Value(out, sums=sums)

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
