"""A low-bit product and its fused compensation on a second stream, in either order, as a step captures them."""

from __future__ import annotations

from typing import Literal

import torch

from runtime.backends.triton.carveout import request
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate
from runtime.backends.triton.kernels.gemv import gemv
from runtime.backends.triton.kernels.select import make_selection
from runtime.backends.triton.kernels.sums import piece_sums
from runtime.backends.triton.layout import repack
from runtime.backends.triton.residual import residual_to_device
from runtime.backends.triton.sizes import pieces
from runtime.backends.triton.workspace import Workspace
from tests.bench.gpu.matrices import activations, copies, random_linear

Order = Literal["compensation first", "product first"]
ORDERS: tuple[Order, ...] = ("compensation first", "product first")
PRIORITIES = {"high": -1, "normal": 0}
"""Of the second stream, as CUDA counts them."""
RESERVED = ("product", "compensation")
"""Kernels that ask for shared memory beside them."""


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
        packed = random_linear(kind, shape, bits)
        assert packed.residual is not None
        self.device, self.on_gpu = device, device.type == "cuda"
        self.weights = copies(repack(packed, device), weights)
        self.residual = residual_to_device(packed.residual, shape, device)
        self.selection = make_selection(packed, k_chunk=k_chunk, device=device)
        self.rows = activations(inputs, K, device)
        self.x = self.rows[:1].clone()
        self.sums = torch.empty(1, pieces(K), device=device)
        self.put(0)
        self.out, self.dec = torch.empty(N, device=device), torch.empty(1, N, device=device)
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
        piece_sums(self.x, self.sums)

    def product(self, copy: int = 0) -> None:
        """The base product."""
        gemv(self.x[0], self.weights[copy], self.out, self.main, sums=self.sums[0])

    def compensation(self, n_tb: int, *, fused: bool = True) -> None:
        """Selection, fetch and product of the residuals."""
        config = LaunchConfig(n_tb=n_tb, fused=fused)
        compensate(self.x, self.selection, self.residual, Output(self.dec), config, self.side_space)

    def both(self, n_tb: int, order: Order = "compensation first", copy: int = 0) -> None:
        """Both, on two streams where there are some; done when the current stream is."""
        if self.side is None:
            self.compensation(n_tb)
            self.product(copy)
            return
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        if order == "product first":
            self.product(copy)
        with torch.cuda.stream(self.side):
            self.compensation(n_tb)
        if order == "compensation first":
            self.product(copy)
        current.wait_stream(self.side)
