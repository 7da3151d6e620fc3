"""The Triton kernels, on a GPU or interpreted; what they leave beside their result is checked here."""

from __future__ import annotations

import torch

from models.packed import PackedLinear
from runtime.backends.operations import channels as budget
from runtime.backends.triton.kernels.activations import Tokens
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate
from runtime.backends.triton.kernels.gate import How, gate
from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.kernels.norm import RowNorms, add_norm
from runtime.backends.triton.kernels.rope import Basis, HeadNorms, Rope, TurnedNorms, heads
from runtime.backends.triton.kernels.select import Selection, make_selection, select
from runtime.backends.triton.kernels.w4a8 import gemm_w4a8, repack_w4a8
from runtime.backends.triton.layout import repack
from runtime.backends.triton.residual import residuals_to_device
from runtime.backends.triton.sizes import token_width
from runtime.backends.triton.workspace import Workspace
from tests.close import Tolerance
from tests.runtime.backends.contract.kernels import HeadOptions, Selector
from tests.runtime.backends.triton.operands import HalfPages, assert_left, left_of

FEW = 16
"""Rows up to which weights enter products as they are."""
ROUNDED = Tolerance(spread=1.5e-3, why="each weight is rounded to a half: 2^-11 of it at most, and they add up")


class TritonKernels:
    """See `tests.runtime.backends.contract.kernels.Kernels`."""

    written = "half"
    all_kept = False

    def __init__(self, device: str) -> None:
        self.device = device

    def norm(self, h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, left = self._activations(*h.shape)
        add_norm(h.to(self.device), None, None, RowNorms(weight.to(self.device), eps), x, None, left)
        assert_left(left, x)
        return x.cpu().float()

    def gate(self, y: torch.Tensor, *, gelu: bool = False, limit: float = 0.0) -> torch.Tensor:
        x, left = self._activations(len(y), y.shape[1] // 2)
        how = How("clamped_silu" if limit else "gelu_tanh" if gelu else "silu", limit)
        gate(y.to(self.device), None, x, left, how=how)
        assert_left(left, x)
        return x.cpu().float()

    def heads(self, y: torch.Tensor, how: HeadOptions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def there(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
            return [tensor.to(self.device) for tensor in tensors] or [None, None]

        M, H, K, D = len(y), how.heads, how.kv_heads, how.dim
        pages = HalfPages(torch.zeros(2, max(how.slots) + 1, K, len(how.cos), D).half(), self.device)
        q = torch.full((M, H * D), torch.nan, dtype=torch.float16, device=self.device)
        slots, positions = torch.tensor(how.slots, dtype=torch.int32), torch.tensor(how.positions, dtype=torch.int32)
        growth = None if how.growth is None else how.growth.to(self.device)
        form = TurnedNorms if how.norm_last else HeadNorms
        norms, rope = form(*there(*how.norms or ()), how.eps), Rope(*there(how.cos, how.sin), growth)
        rows, basis = Rows(*there(positions, slots)), Basis(*there(*how.basis or ()))
        heads(y.to(self.device), None, norms, rope, basis, rows, pages.pages, q)
        keys, values = pages.read().float()[:, slots.long(), :, positions.long()].transpose(0, 1)
        return q.cpu().float().view(M, H, D), keys, values

    def select(self, x: torch.Tensor, how: Selector) -> tuple[torch.Tensor, bool]:
        K = x.shape[1]
        edges, static = how.buckets, how.static
        selection = Selection(
            width=K,
            k_chunk=how.k_chunk,
            k=budget.total_budget(K, how.k_chunk),
            mode=how.mode,
            b15=edges.b15,
            upper_scale=edges.upper_scale,
            lower_scale=edges.lower_scale,
            channels=None if static is None else torch.from_numpy(static).to(self.device),
            seed=how.seed,
            layer=how.layer,
        )
        shape = (len(x), selection.k)
        indices = torch.full(shape, -(2**31), dtype=torch.int32, device=self.device)
        values = torch.full(shape, torch.nan, device=self.device)
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        positions = torch.tensor(how.positions or range(len(x)), dtype=torch.int32, device=self.device)
        select(x.half().to(self.device), selection, indices, values, flag, positions=positions)
        channels = indices.cpu().long()
        if not int(flag):
            assert torch.equal(values.cpu(), x.gather(1, channels))
        return channels, bool(flag)

    def compensate(self, linear: PackedLinear, x: torch.Tensor, k_chunk: int) -> torch.Tensor:
        assert linear.residual is not None
        residual = residuals_to_device([linear.residual], linear.shape, self.device)
        selection = make_selection(linear, k_chunk=k_chunk, device=self.device)
        found = []
        for fused in (True, False) if len(x) == 1 else (False,):
            out, workspace = (
                torch.full((len(x), linear.shape[0]), torch.nan, device=self.device),
                Workspace(self.device),
            )
            config = LaunchConfig(n_tb=1 if fused else 3, fused=fused)
            compensate(x.half().to(self.device), selection, residual, Output(out, None), config, workspace)
            assert workspace.counters(2).tolist() == [0, 0]
            found.append(out.cpu())
        assert all(torch.equal(each, found[0]) for each in found)
        return found[0]

    def product(self, linear: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        weight, halves = repack(linear, self.device), x.half().to(self.device)
        out, workspace = torch.full((len(x), linear.shape[0]), torch.nan, device=self.device), Workspace(self.device)
        gemm(halves, weight, out, workspace)
        return out.cpu()

    def product_tolerance(self, rows: int) -> str | Tolerance:
        return "sums" if rows <= FEW else ROUNDED

    def whole_product(self, linear: PackedLinear, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        group_size = 0 if linear.group_scales is None else linear.group_size
        out = torch.full((len(codes), linear.shape[0]), torch.nan, device=self.device)
        gemm_w4a8(placed(codes, scales, group_size, self.device), repack_w4a8(linear, self.device), out)
        return out.cpu()

    def _activations(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Poisoned buffers of activations and of their sums."""
        x = torch.full((rows, width), torch.nan, dtype=torch.float16, device=self.device)
        return x, left_of(rows, width, self.device)


def placed(codes: torch.Tensor, scales: torch.Tensor, group_size: int, device: str) -> Tokens:
    """INT8 tokens [M, K], scales [M, 1], as kernels take them."""
    M, K = codes.shape
    width = token_width(K, group_size)
    filled = torch.nn.functional.pad(codes, (0, width - K))
    sums = filled.to(torch.int32).view(M, -1, group_size or width).sum(2, dtype=torch.int32)
    return Tokens(filled.to(device), scales[:, 0].to(device), sums.to(device), group_size)
