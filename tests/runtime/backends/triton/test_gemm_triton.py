"""The matrix-matrix kernel against a float64 product with the dequantized matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open

from models.packed import PackedLinear
from models.packing import pack
from models.quantizers import rtn
from runtime.backends.triton.kernels import gemm as kernels
from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.layout import GpuLinear, dequantize, repack, repack_codebook
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError
from tests.close import Tolerance, assert_close

EXACT = Tolerance(spread=1e-5, why="weights enter exactly, up to 16 rows and with codebooks; sums are rounded")
ROUNDED = 3e-4
"""Root mean square of errors, in the same unit, where each weight is rounded to a half: 2^-11 of it at most, a third of
that on average. Measured: 1.0e-4 to 1.8e-4."""
HALF = 2.0**-11


def _linear(
    N: int, K: int, bits: int, group_size: int, device: str, *, codebooks: bool = False, bias: bool = True
) -> GpuLinear:
    rng = np.random.default_rng(N + K + bits + group_size)
    codes = pack(rng.integers(0, 1 << bits, (N, K), dtype=np.uint8), bits)
    shift = rng.normal(size=N).astype(np.float32) if bias else None
    if codebooks:
        book = rng.normal(0, 0.02, (N, 1 << bits)).astype(np.float16)
        return repack_codebook(
            name="layers.0.o", shape=(N, K), bits=bits, codes=codes, codebook=book, bias=shift, device=device
        )
    G = -(-K // group_size)
    packed = PackedLinear(
        name="layers.0.o",
        shape=(N, K),
        bits=bits,
        group_size=group_size,
        codes=codes,
        scales=rng.normal(0, 0.02, (N, G)).astype(np.float16),
        zeros=rng.integers(0, 1 << bits, (N, G), dtype=np.uint8),
        bias=shift,
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )
    return repack(packed, device)


def _activations(M: int, K: int, device: str) -> torch.Tensor:
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M + K)) + 0.25
    x[:, :: max(1, K // 3)] *= 30
    return x.to(torch.float16).to(device)


def _expected(x: torch.Tensor, weight: GpuLinear) -> torch.Tensor:
    """The product in float64."""
    expected = x.cpu().double() @ dequantize(weight).double().T
    return expected if weight.bias is None else expected + weight.bias.cpu().double()


def _assert_exact(out: torch.Tensor, x: torch.Tensor, weight: GpuLinear) -> None:
    assert_close(out, _expected(x, weight), EXACT)


def _assert_rounded(out: torch.Tensor, x: torch.Tensor, weight: GpuLinear) -> None:
    expected = _expected(x, weight)
    errors, size = (out.cpu().double() - expected).abs(), expected.square().mean().sqrt()
    assert float(errors.square().mean().sqrt()) < ROUNDED * size
    bound = x.cpu().double().abs() @ (HALF * dequantize(weight).double().abs() + 2.0**-25).T
    assert bool((errors < bound + EXACT.spread * size).all())


@pytest.mark.parametrize(
    ("M", "N", "K", "bits", "group_size", "bias"),
    [
        (17, 64, 512, 4, 128, False),
        (33, 70, 1100, 3, 128, True),
        (65, 96, 544, 4, 32, True),
        (20, 48, 640, 3, 64, False),
        (70, 50, 700, 3, 96, True),
        (40, 33, 1024, 4, 256, False),
    ],
)
def test_many_rows(M, N, K, bits, group_size, bias, device):
    weight = _linear(N, K, bits, group_size, device, bias=bias)
    x, out = _activations(M, K, device), torch.full((M, N), float("nan"), device=device)
    gemm(x, weight, out)
    _assert_rounded(out, x, weight)


@pytest.mark.parametrize(
    ("M", "N", "K", "bits", "group_size", "codebooks"),
    [(130, 70, 576, 3, 64, False), (129, 64, 512, 4, 128, False), (200, 33, 600, 4, 0, True)],
)
def test_taller_tiles_of_hopper(M, N, K, bits, group_size, codebooks, device, monkeypatch):
    monkeypatch.setattr(kernels, "capability", lambda _: kernels.HOPPER)
    monkeypatch.setattr(kernels, "TALL_FROM", kernels.TALL)
    weight = _linear(N, K, bits, group_size, device, codebooks=codebooks)
    x, out = _activations(M, K, device), torch.full((M, N), float("nan"), device=device)
    gemm(x, weight, out)
    (_assert_exact if codebooks else _assert_rounded)(out, x, weight)


@pytest.mark.parametrize("bits", [3, 4])
def test_many_rows_with_codebooks(bits, device):
    weight = _linear(70, 600, bits, 0, device, codebooks=True)
    x, out = _activations(36, 600, device), torch.full((36, 70), float("nan"), device=device)
    gemm(x, weight, out)
    _assert_exact(out, x, weight)


@pytest.mark.parametrize("M", [1, 5, 16])
def test_few_rows_need_no_workspace_and_may_use_one(M, device):
    weight = _linear(70, 1100, 3, 128, device)
    x, workspace = _activations(M, 1100, device), Workspace(device)
    outs = [torch.full((M, 70), float("nan"), device=device) for _ in range(2)]
    gemm(x, weight, outs[0])
    assert not workspace.nbytes
    gemm(x, weight, outs[1], workspace)
    assert workspace.nbytes
    for out in outs:
        _assert_exact(out, x, weight)


@pytest.mark.data
@pytest.mark.parametrize(("bits", "rows"), [(3, 1), (4, 24)])
def test_a_real_matrix(bits, rows, shared_data, device):
    with safe_open(shared_data / "models" / "english3m" / "model.safetensors", framework="pt") as file:
        original = file.get_tensor("model.layers.1.mlp.down_proj.weight").float()
        x = file.get_tensor("model.embed_tokens.weight")[:rows].half().repeat(1, 2).to(device)
    groups = rtn.quantize(original[:96].numpy(), bits, 128)
    packed = PackedLinear(
        name="layers.1.down",
        shape=(96, original.shape[1]),
        bits=bits,
        group_size=128,
        codes=pack(groups.codes, bits),
        scales=groups.scales,
        zeros=groups.zeros,
        bias=None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )
    weight, out = repack(packed, device), torch.full((rows, 96), float("nan"), device=device)
    gemm(x, weight, out)
    (_assert_exact if rows == 1 else _assert_rounded)(out, x, weight)


def test_a_nan_stays_in_its_row(device):
    weight = _linear(48, 512, 4, 128, device)
    x, out = _activations(20, 512, device), torch.zeros(20, 48, device=device)
    x[7, 300] = float("nan")
    gemm(x, weight, out)
    assert bool(out[7].isnan().all())
    assert bool(torch.isfinite(out[[m for m in range(20) if m != 7]]).all())


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (torch.zeros(20, 64), torch.zeros(20, 8), r"x must be contiguous torch\.float16 with rows of 64"),
        (torch.zeros(20, 64).half(), torch.zeros(20, 9), r"out must be contiguous torch\.float32 with rows of 8"),
        (torch.zeros(20, 64).half(), torch.zeros(21, 8), "20 rows of activations for 21 rows of results"),
        (torch.zeros(0, 64).half(), torch.zeros(0, 8), "0 rows of activations"),
        (torch.zeros(64).half(), torch.zeros(8), r"x must be contiguous .* of shape \(64,\)"),
    ],
)
def test_other_operands_are_refused(x, out, message):
    with pytest.raises(BackendError, match=message):
        gemm(x, _linear(8, 64, 4, 32, "cpu"), out)
