"""Compensation of a prompt's rows together, against the oracle: the fetch, the product, and two buffers in turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.operations.compensate import compensate_shared, dequantize_residual
from runtime.backends.triton.kernels.residual_gemm import multiply, stage
from runtime.backends.triton.residual import residual_to_device
from runtime.backends.triton.staging import Shared, Staging
from runtime.errors import BackendError
from tests.close import Tolerance, assert_close

SUMS = Tolerance(spread=1e-4, why="products of halves are exact; sums of some hundred of them in another order")


@pytest.mark.parametrize(
    ("M", "N", "K", "bits", "k"),
    [(3, 40, 70, 4, 9), (70, 96, 64, 4, 64), (2, 33, 40, 2, 33), (5, 64, 33, 8, 1), (2, 50, 40, 16, 40)],
)
def test_some_channels_of_all_rows(packed_linear: Any, device: str, M: int, N: int, K: int, bits: int, k: int) -> None:
    rng = np.random.default_rng(M + N)
    linear = packed_linear(rng.standard_normal((N, K)).astype(np.float32), bits=3, residual_bits=bits)
    residual = residual_to_device(linear.residual, (N, K), device)
    x = torch.from_numpy(rng.standard_normal((M, K))).half().to(device)
    chosen = torch.from_numpy(np.sort(rng.permutation(K)[:k]).astype(np.int32)).to(device)
    staged = torch.full((k, residual.codes.shape[1]), -1, dtype=torch.int32, device=device)
    stage(residual.codes, chosen, staged)
    assert bool((staged.cpu() == residual.codes[chosen.cpu().long()]).all())
    base = torch.from_numpy(rng.standard_normal((M, N))).float()
    out = base.to(device, copy=True)
    multiply(x, None if k == K else chosen, staged, residual.scales, bits, out)
    expected = compensate_shared(base, x.cpu().float(), chosen.cpu().long(), dequantize_residual(linear.residual, N))
    assert_close(out.cpu(), expected, SUMS)


def test_operands_that_do_not_belong_together_are_refused(packed_linear: Any, device: str) -> None:
    linear = packed_linear(np.ones((32, 64), np.float32), residual_bits=4)
    residual = residual_to_device(linear.residual, (32, 64), device)
    x, out = torch.zeros((2, 64), dtype=torch.float16, device=device), torch.zeros((2, 32), device=device)
    with pytest.raises(BackendError, match="63 rows"):
        multiply(x, None, residual.codes[:63].to(device), residual.scales, 4, out)
    with pytest.raises(BackendError, match="residuals of a product"):
        multiply(x, None, residual.codes.to(device), None, 4, out)


def test_layers_arrive_one_ahead_in_two_buffers(packed_linear: Any, device: str) -> None:
    rng = np.random.default_rng(0)
    layers = []
    for K, channels in ((64, None), (96, [3, 50]), (32, [0, 31, 7]), (64, None)):
        linear = packed_linear(rng.standard_normal((32, K)).astype(np.float32), residual_bits=4)
        chosen = None if channels is None else torch.tensor(channels, dtype=torch.int32, device=device)
        layers.append(Shared(residual=residual_to_device(linear.residual, (32, K), device), channels=chosen))
    stream = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]
    staging = Staging(layers, torch.device(device), stream)
    assert staging.nbytes == 2 * layers[0].residual.nbytes
    for _ in range(2):
        staging.begin()
        for layer in layers:
            taken = staging.take().cpu()
            wanted = (
                layer.residual.codes if layer.channels is None else layer.residual.codes[layer.channels.cpu().long()]
            )
            assert bool((taken == wanted).all())
