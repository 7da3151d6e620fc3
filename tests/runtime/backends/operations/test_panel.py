"""The CPU's arithmetic for prompts: a matrix with its residuals in 8 bits, against their exact sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.operations.compensation import compensate_shared, dequantize_residual
from runtime.backends.operations.linear import dequantize, gemv, quantize_groups
from runtime.backends.operations.panel import panel, product, residual_codes, residual_scales
from tests.close import Tolerance, assert_close
from tests.runtime.conftest import pack_codebook_linear, pack_linear


@pytest.mark.parametrize("residual_bits", [2, 4, 8, 16])
@pytest.mark.parametrize(("pack", "bits"), [(pack_linear, 3), (pack_linear, 4), (pack_codebook_linear, 3)])
def test_a_weight_is_off_by_its_step(pack: Any, bits: int, residual_bits: int) -> None:
    rng = np.random.default_rng(bits)
    weight = rng.standard_normal((24, 100)).astype(np.float32)
    linear = pack(weight, bits=bits, group_size=64, residual_bits=residual_bits)
    channels = np.sort(rng.permutation(100)[:61])
    exact = dequantize(linear).numpy().copy()
    exact[:, channels] += dequantize_residual(linear.residual, 24).numpy().T[:, channels]
    found = panel(linear, channels)
    assert np.abs(found.codes).max() <= 127
    steps = np.repeat(found.steps, 64, axis=1)[:, :100]
    usual = pack is pack_linear and residual_bits <= 4
    assert (np.abs(found.weights() - exact) / steps).max() < (0.6 if usual else 1.3)


def test_residuals_in_half_precision_become_codes_of_their_channel() -> None:
    linear = pack_linear(np.random.default_rng(1).standard_normal((20, 64)).astype(np.float32), residual_bits=16)
    stored = linear.residual.codes.astype(np.float32)
    scales = residual_scales(linear.residual).astype(np.float32)
    assert (127 * scales >= np.abs(stored).max(axis=0)).all()
    restored = (residual_codes(linear.residual, 20).astype(np.float32) - 128) * scales
    assert (np.abs(restored - stored) <= 0.501 * scales).all()


def test_a_matrix_of_zeros_stays_one() -> None:
    linear = pack_linear(np.zeros((16, 32), np.float32), residual_bits=16)
    linear.scales[:] = 0
    assert np.abs(panel(linear, np.arange(32)).weights()).max() < 1e-20


def test_the_product_is_that_of_base_and_residuals() -> None:
    """Within what 8 bits of weights and of activations lose: each 0.3 % of the product's spread."""
    rng = np.random.default_rng(2)
    linear = pack_linear(rng.standard_normal((40, 256)).astype(np.float32), bits=3, group_size=64, residual_bits=4)
    x = torch.from_numpy(rng.standard_normal((6, 256)).astype(np.float32))
    channels = np.arange(0, 256, 2)
    found = product(*(part.numpy() for part in quantize_groups(x, 64)), panel(linear, channels))
    base = gemv(x, dequantize(linear))
    residual = dequantize_residual(linear.residual, 40)
    exact = compensate_shared(base, x, torch.from_numpy(channels), residual)
    assert_close(found, exact.double(), Tolerance(spread=0.03, why="rounding of weights and activations to 8 bits"))
    assert np.abs(found - exact.numpy()).mean() < 0.1 * (base - exact).abs().mean()
