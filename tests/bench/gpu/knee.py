"""Cost of dynamic compensation on top of the base product: time over k_chunk for several n_tb, normalized.

The base product runs on one stream, the fused compensation on another, as in a decoded token's graph. Weights and
activations are rotated, so that the channels that are fetched differ from launch to launch.

Source: QDEC §5.3, Fig. 17.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.packed import PackedLinear
from runtime.backends.operations.channels import total_budget
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate
from runtime.backends.triton.kernels.gemv import gemv
from runtime.backends.triton.kernels.select import Selection, make_selection
from runtime.backends.triton.kernels.sums import piece_sums
from runtime.backends.triton.layout import GpuLinear, repack
from runtime.backends.triton.residual import residual_to_device
from runtime.backends.triton.sizes import pieces
from runtime.backends.triton.workspace import Workspace
from tests.bench.gpu.clock import Launch, copies_past_cache, race
from tests.bench.gpu.matrices import RESIDUAL_BITS, activations, copies, random_linear
from tests.bench.gpu.report import Part
from tests.bench.gpu.sizes import Sizes

REPEATS = 200
"""Launches whose results are compared bit by bit."""


class Layer:
    """One layer's operands on the device.

    Args:
        packed: The layer with its residuals.
        sizes: How many copies its weights need.
        device: Where.
    """

    def __init__(self, packed: PackedLinear, sizes: Sizes, device: torch.device) -> None:
        N, K = packed.shape
        weight = repack(packed, device)
        self.weights: Sequence[GpuLinear] = copies(weight, copies_past_cache(weight.nbytes, sizes.rotated_bytes))
        assert packed.residual is not None
        self.residual = residual_to_device(packed.residual, packed.shape, device)
        self.xs = activations(len(self.weights), K, device)
        self.sums = torch.empty(len(self.weights), pieces(K), device=device)
        piece_sums(self.xs, self.sums)  # in a model, the kernel that makes x leaves them
        self.out, self.dec = torch.empty(N, device=device), torch.empty(1, N, device=device)
        self.base_space, self.side_space = Workspace(device), Workspace(device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def alone(self) -> list[Launch]:
        """The base product, for each copy of the weights."""
        return [
            lambda x=x, s=s, w=w: gemv(x, w, self.out, self.base_space, sums=s)
            for x, s, w in zip(self.xs, self.sums, self.weights, strict=True)
        ]

    def beside(self, selection: Selection, n_tb: int) -> list[Launch]:
        """The base product with compensation beside it."""
        operands = zip(self.xs, self.sums, self.weights, strict=True)
        return [lambda x=x, s=s, w=w: self._both(x, s, w, selection, n_tb) for x, s, w in operands]

    def same_in_two_launches(self, selection: Selection, n_tb: int) -> bool:
        """Whether the fused launch gives the bits of two launches, some hundred times in a row."""
        x, expected = self.xs[0], torch.empty_like(self.dec)
        config = LaunchConfig(n_tb=n_tb, fused=False)
        compensate(x[None], selection, self.residual, Output(expected), config, self.side_space)
        for _ in range(REPEATS if self.dec.device.type == "cuda" else 1):
            self.dec.fill_(float("nan"))
            self._compensate(x, selection, n_tb)
            if not torch.equal(self.dec, expected):
                return False
        return True

    def _both(self, x: torch.Tensor, sums: torch.Tensor, weight: GpuLinear, selection: Selection, n_tb: int) -> None:
        if self._side is None:
            self._compensate(x, selection, n_tb)
            gemv(x, weight, self.out, self.base_space, sums=sums)
            return
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self._compensate(x, selection, n_tb)
        gemv(x, weight, self.out, self.base_space, sums=sums)
        main.wait_stream(self._side)

    def _compensate(self, x: torch.Tensor, selection: Selection, n_tb: int) -> None:
        compensate(
            x[None], selection, self.residual, Output(self.dec), LaunchConfig(n_tb=n_tb, fused=True), self.side_space
        )


def measure(part: Part, sizes: Sizes, device: torch.device) -> None:
    """A row for each layer type, bit width, n_tb and k_chunk; `normalized` is by the base product alone."""
    for bits in sizes.bits:
        for kind, shape in sizes.shapes.items():
            if part.late():
                part.add({"what": "left out for want of time", "kind": kind, "bits": bits})
                continue
            packed = random_linear(kind, shape, bits)
            layer = Layer(packed, sizes, device)
            for n_tb in sizes.knee_n_tbs:
                _curve(part, packed, layer, n_tb, sizes, device)


def _curve(part: Part, packed: PackedLinear, layer: Layer, n_tb: int, sizes: Sizes, device: torch.device) -> None:
    """The points of one curve, timed in turns with the base product."""
    launches: dict[str, list[Launch]] = {"0": layer.alone()}
    for k_chunk in sizes.knee_k_chunks:
        selection = make_selection(packed, k_chunk=k_chunk, device=device)
        launches[str(k_chunk)] = layer.beside(selection, n_tb)
        if k_chunk == sizes.knee_k_chunks[-1]:
            point = {"kind": packed.name, "bits": packed.bits, "n_tb": n_tb, "k_chunk": k_chunk}
            part.add({"what": "check"} | point | {"correct": layer.same_in_two_launches(selection, n_tb)})
    times = race(launches, device, rounds=max(1, sizes.rounds // 3))
    base = times["0"].p50
    N, K = packed.shape
    for k_chunk in (0, *sizes.knee_k_chunks):
        measured = times[str(k_chunk)]
        fetched = total_budget(K, k_chunk) * N * RESIDUAL_BITS / 8
        part.add(
            {"kind": packed.name, "bits": packed.bits, "n_tb": n_tb, "k_chunk": k_chunk}
            | measured.microseconds()
            | {"normalized": round(measured.p50 / base, 4), "fetched_gb_s": round(fetched / measured.p50 / 1e9, 2)}
        )
