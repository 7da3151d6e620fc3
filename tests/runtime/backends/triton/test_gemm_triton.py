"""The matrix-matrix kernel against a float64 product with the dequantized matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from models.packing import pack
from models.quantizers.groups import rtn
from runtime.backends.triton.kernels import gemm as kernels
from runtime.backends.triton.kernels.gemm import gemm
from runtime.backends.triton.layout import GpuLinear, repack
from runtime.errors import BackendError
from tests.close import assert_close
from tests.runtime.backends.triton.operands import (
    EXACT,
    activations,
    codebook,
    dequantize,
    packed_matrix,
    poisoned,
    product,
    uniform,
)

ROUNDED = 3e-4
"""Root mean square of errors, in the same unit, where each weight is rounded to a half: 2^-11 of it at most, a third of
that on average. Measured: 1.0e-4 to 1.8e-4."""


def _check(x: torch.Tensor, weight: GpuLinear, *, exact: bool = False) -> None:
    """The product by the kernel; weights enter exactly up to 16 rows and with codebooks, and are rounded otherwise."""
    out = poisoned(len(x), weight.shape[0], device=str(x.device))
    gemm(x, weight, out)
    expected = product(x, weight)
    if exact:
        assert_close(out, expected, EXACT)
        return
    errors, size = (out.cpu().double() - expected).abs(), expected.square().mean().sqrt()
    assert float(errors.square().mean().sqrt()) < ROUNDED * size
    bound = x.cpu().double().abs() @ (2.0**-11 * dequantize(weight).double().abs() + 2.0**-25).T
    assert bool((errors < bound + EXACT.spread * size).all())


@pytest.mark.parametrize(
    ("M", "N", "K", "bits", "group_size", "bias"),
    [
        (33, 70, 1100, 3, 128, True),
        (65, 96, 544, 4, 32, True),
        (70, 50, 700, 3, 96, True),
        (40, 33, 1024, 4, 256, False),
    ],
)
def test_many_rows(M, N, K, bits, group_size, bias, device):
    _check(activations(M, K, device, M + K), uniform(N, K, bits, group_size, device, N + K, bias=bias))


@pytest.mark.parametrize(
    ("M", "N", "K", "bits", "group_size"), [(130, 70, 576, 3, 64), (129, 64, 512, 4, 128), (200, 33, 600, 4, 0)]
)
def test_taller_tiles_of_hopper(M, N, K, bits, group_size, device, monkeypatch):
    monkeypatch.setattr(kernels, "capability", lambda _: kernels.HOPPER)
    monkeypatch.setattr(kernels, "TALL_FROM", kernels.TALL)
    weight = uniform(N, K, bits, group_size, device) if group_size else codebook(N, K, bits, device)
    _check(activations(M, K, device), weight, exact=not group_size)


@pytest.mark.data
@pytest.mark.parametrize(("bits", "rows"), [(3, 1), (4, 24)])
def test_a_real_matrix(bits, rows, shared_data, device):
    with safe_open(shared_data / "models" / "english3m" / "model.safetensors", framework="pt") as file:
        original = file.get_tensor("model.layers.1.mlp.down_proj.weight").float()[:96]
        x = file.get_tensor("model.embed_tokens.weight")[:rows].half().repeat(1, 2).to(device)
    groups = rtn(original.numpy(), bits, 128)
    stored = replace(
        packed_matrix(*original.shape, bits, 128),
        codes=pack(groups.codes, bits),
        scales=groups.scales,
        zeros=groups.zeros,
    )
    _check(x, repack(stored, device), exact=rows == 1)


def test_a_nan_stays_in_its_row(device):
    weight = uniform(48, 512, 4, 128, device)
    x, out = activations(20, 512, device), torch.zeros(20, 48, device=device)
    x[7, 300] = float("nan")
    gemm(x, weight, out)
    assert out.isnan().all(1).tolist() == [m == 7 for m in range(20)]
    assert bool(torch.isfinite(out[[m for m in range(20) if m != 7]]).all())


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (torch.zeros(20, 64).half(), torch.zeros(21, 8), "20 rows of activations for 21 rows of results"),
        (torch.zeros(0, 64).half(), torch.zeros(0, 8), "0 rows of activations"),
        (torch.zeros(64).half(), torch.zeros(8), r"x must be contiguous .* of shape \(64,\)"),
    ],
)
def test_other_operands_are_refused(x, out, message):
    with pytest.raises(BackendError, match=message):
        gemm(x, uniform(8, 64, 4, 32, "cpu"), out)
