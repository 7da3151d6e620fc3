"""Products of one matrix: this program's with its compensation on a second stream, and others' beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import torch

from runtime.backends.triton import workspace
from runtime.backends.triton.kernels.activations import piece_sums
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate
from runtime.backends.triton.kernels.gemv import Product, few_rows, prepare
from runtime.backends.triton.kernels.select import Selection, make_selection
from runtime.backends.triton.layout import GpuLinear, repack
from runtime.backends.triton.residual import residuals_to_device
from runtime.backends.triton.sizes import pieces
from runtime.backends.triton.workspace import Workspace
from tests.lab.gpu.clock import Launch, copies_past_cache
from tests.lab.gpu.record import Row
from tests.lab.gpu.sizes import Sizes
from tests.lab.models import GROUP_SIZE, random_linear
from tests.runtime.backends.triton.operands import dequantize

TOLERANCE = 5e-3
"""Largest error of a product, relative to its largest output: dequantized weights are rounded to half precision."""
Order = Literal["one launch", "compensation first", "product first"]
ORDERS: tuple[Order, ...] = ("one launch", "compensation first", "product first")
"""One launch of both, or the order of two on two streams."""
PRIORITIES = {"high": -1, "normal": 0}
"""Of the second stream, as CUDA counts them."""
RESERVED = ("product", "compensation")
"""Kernels that ask for shared memory beside them."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to multiply."""

    launches: Sequence[Launch]
    """One launch for each copy of the weights."""
    nbytes: int
    """Bytes of one copy of the weights."""


@cache
def random_weight(shape: tuple[int, int], bits: int, device: torch.device) -> GpuLinear:
    """A random matrix on the device, without residuals; repacking takes long, so each is made once."""
    return repack(random_linear("random", shape, bits, residual=False), device)


def copied(weight: GpuLinear) -> GpuLinear:
    """The same numbers in other places, in all parts: a scale in the cache costs nothing."""
    parts = {name: getattr(weight, name) for name in ("codes", "groups", "codebook", "bias")}
    return replace(weight, **{name: None if part is None else part.clone() for name, part in parts.items()})


def copies(weight: GpuLinear, count: int) -> list[GpuLinear]:
    """`weight` and count - 1 more of it elsewhere in memory."""
    return [weight, *(copied(weight) for _ in range(count - 1))]


def activations(rows: int, K: int, device: torch.device) -> torch.Tensor:
    """float16 [rows, K], normally distributed."""
    return torch.randn(rows, K, device=device).to(torch.float16)


def check_row(weight: GpuLinear, x: torch.Tensor, out: torch.Tensor) -> Row:
    """Whether `out` is the product of the weights and x [M, K]: the speed of wrong numbers means nothing."""
    expected = x.float() @ dequantize(weight).to(x.device).T
    error = float((out - expected).abs().max() / expected.abs().max())
    row: Row = {"what": "check", "bits": weight.bits, "M": x.shape[0], "N": weight.shape[0], "K": weight.shape[1]}
    return row | {"largest_error": float(f"{error:.2g}"), "correct": error < TOLERANCE}


def half_precision(shape: tuple[int, int], rows: int, sizes: Sizes, device: torch.device) -> Peer:
    """torch's product in float16."""
    (N, K), dtype = shape, torch.float16
    count = copies_past_cache(2 * N * K, sizes.rotated_bytes)
    weights = [torch.randn(N, K, device=device, dtype=dtype) / K**0.5 for _ in range(count)]
    x, out = torch.randn(rows, K, device=device, dtype=dtype), torch.empty(rows, N, device=device, dtype=dtype)
    return Peer([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights], 2 * N * K)


def torch_int4(shape: tuple[int, int], rows: int, sizes: Sizes, device: torch.device) -> Peer:
    """torch's `_weight_int4pack_mm`: tensor cores, activations in bfloat16, groups of 128."""
    N, K = shape
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.full((K // GROUP_SIZE, N, 2), 0.01, dtype=torch.bfloat16, device=device)
    nbytes = packed.nbytes + scales.nbytes
    x = torch.randn(rows, K, device=device, dtype=torch.bfloat16)
    weights = [packed.clone() for _ in range(copies_past_cache(nbytes, sizes.rotated_bytes))]
    multiply = torch.ops.aten._weight_int4pack_mm
    return Peer([lambda w=w: multiply(x, w, GROUP_SIZE, scales) for w in weights], nbytes)


def request(kernel: workspace.Kernel, *, asked: bool) -> None:
    """Let every such kernel launched so far ask for shared memory, or leave the division to the driver (-1)."""
    for (function, device), own in workspace._asked.items():
        if own == kernel:
            workspace._ask(function, workspace._percent(device, own) if asked else -1)


class CompensatedLayer:
    """The operands of one layer and of its compensation.

    Args:
        kind: What the layer is called.
        shape: (N, K).
        bits: Bits of a weight.
        k_chunk: Channels per 1024.
        device: Where.
        inputs: Rows of activations that can be put in.
        weights: Copies of the matrix, so that caches do not hold the one that is read next.
    """

    def __init__(
        self, kind: str, shape: tuple[int, int], bits: int, k_chunk: int, device: torch.device,
        *, inputs: int = 1, weights: int = 1,
    ) -> None:  # fmt: skip
        N, K = shape
        self.packed = packed = random_linear(kind, shape, bits)
        assert packed.residual is not None
        self.device, self.on_gpu = device, device.type == "cuda"
        self.weights = copies(repack(packed, device), weights)
        self.residual = residuals_to_device([packed.residual], shape, device)
        self.selection = make_selection(packed, k_chunk=k_chunk, device=device)
        self.rows = activations(inputs, K, device)
        self.x = self.rows[:1].clone()
        self.sums = torch.empty(1, pieces(K), device=device)
        self.row_sums = torch.empty(inputs, pieces(K), device=device)
        piece_sums(self.rows, self.row_sums)  # in a model, the kernel that makes x leaves them
        self.put(0)
        self.out, self.dec = torch.empty(1, N, device=device), torch.empty(1, N, device=device)
        self.main, self.side_space = Workspace(device), Workspace(device)
        self.side: torch.cuda.Stream | None = None
        self.set_priority("high")

    def set_priority(self, name: str) -> None:
        """Let compensation run on a stream of this priority."""
        if self.on_gpu:
            self.side = torch.cuda.Stream(self.device, priority=PRIORITIES[name])

    def reserve(self, kernels: tuple[str, ...]) -> None:
        """Let only these kernels ask for shared memory, as the program's own do."""
        self.product()
        self.compensation(1)
        for name in RESERVED:
            request(name, asked=name in kernels)

    def put(self, row: int) -> None:
        """Put in a row of activations, with the sums that the kernel before would leave."""
        self.x.copy_(self.rows[row])
        self.sums.copy_(self.row_sums[row])

    def product(self, copy: int = 0, row: int | None = None) -> None:
        """The base product, of what was put in or of another row of activations."""
        x, sums = self._input(row)
        few_rows(x, self.weights[copy], self.out, self.main, sums=sums)

    def _input(self, row: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        if row is None:
            return self.x, self.sums
        return self.rows[row : row + 1], self.row_sums[row : row + 1]

    def compensation(
        self, n_tb: int, *, fused: bool = True, row: int = 0, selection: Selection | None = None,
        product: Product | None = None,
    ) -> None:  # fmt: skip
        """Selection, fetch and product of the residuals; another selection takes rows of activations as they are."""
        config = LaunchConfig(n_tb=n_tb, fused=fused, product=product)
        x = self.x if selection is None else self.rows[row : row + 1]
        compensate(x, selection or self.selection, self.residual, Output(self.dec), config, self.side_space)

    def both(
        self,
        n_tb: int,
        order: Order = "one launch",
        copy: int = 0,
        row: int | None = None,
        selection: Selection | None = None,
    ) -> None:
        """Both, in one launch or on two streams where there are some; done when the current stream is."""
        compensation = partial(self.compensation, n_tb, row=row or 0, selection=selection)
        if order == "one launch":
            x, sums = self._input(row)
            compensation(product=prepare(x, self.weights[copy], self.out, self.main, sums=sums))
            return
        if self.side is None:
            compensation()
            self.product(copy, row)
            return
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        if order == "product first":
            self.product(copy, row)
        with torch.cuda.stream(self.side):
            compensation()
        if order == "compensation first":
            self.product(copy, row)
        current.wait_stream(self.side)
