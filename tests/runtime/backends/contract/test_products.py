"""Products with low-bit matrices, on every backend: weights of 3 and 4 bits, and W4A8. Tests quantize the operands.

How kernels round activations to INT8 is tested in test_activations.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models import per_token
from models.recipe import FLOATS, FLOATS_8, OWN_GROUPS, SUPER_GROUP, TWO_LEVELS
from runtime.backends.operations.linear import (
    dequantize,
    dequantize_groups,
    gemm_w4a8,
    gemv,
    integer_weights,
    quantize_groups,
)
from tests.close import assert_close
from tests.runtime.backends.contract.kernels import Kernels
from tests.runtime.backends.contract.operands import exact_activations, kept_matrix, uneven_activations, whole_matrix
from tests.runtime.conftest import pack_codebook_linear, pack_linear


@pytest.mark.parametrize("codebooks", [False, True], ids=["uniform", "codebooks"])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(
    ("M", "N", "K", "group", "bias"),
    [
        (1, 16, 32, 32, False),
        (1, 96, 1100, 128, True),
        (2, 40, 96, 32, True),
        (4, 33, 172, 64, True),
        (5, 70, 1100, 128, True),
        (8, 16, 100, 128, False),
        (9, 50, 700, 96, True),
        (16, 33, 1024, 256, True),
        (17, 64, 512, 128, False),
        (33, 70, 1088, 128, True),
    ],
    ids=str,
)
def test_product(kernels: Kernels, M: int, N: int, K: int, group: int, bias: bool, bits: int, codebooks: bool) -> None:
    """Blocks of rows of every size, ragged outputs, and inputs that end within a block and a group."""
    rng = np.random.default_rng(M * N)
    weight, shift = rng.standard_normal((N, K)).astype(np.float32), rng.standard_normal(N).astype(np.float32)
    make = pack_codebook_linear if codebooks else pack_linear
    linear = make(weight, bits=bits, group_size=group, bias=shift if bias else None)
    if codebooks:  # entries that are halves to the last bit
        powers = 2.0 ** -rng.integers(6, 9, linear.scales.shape)
        linear = replace(linear, scales=powers.astype(np.float16))
    x = exact_activations(M, K, group)
    expected = gemv(x.double(), dequantize(linear).double(), torch.from_numpy(shift).double() if bias else None)
    assert_close(kernels.product(linear, x), expected, kernels.product_tolerance(M))


@pytest.mark.parametrize("kind", OWN_GROUPS)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 33, 576), (3, 40, 64), (8, 16, 1056), (17, 70, 544)], ids=str)
def test_product_with_weights_as_a_source_has_them(kernels: Kernels, kind: str, M: int, N: int, K: int) -> None:
    if kind in (*TWO_LEVELS, FLOATS, FLOATS_8, "Q5_0", "Q5_1") and not kernels.all_kept:
        pytest.skip("the GPU backend refuses such models (`runtime.backends.triton.backend`)")
    K += -K % (SUPER_GROUP if kind in TWO_LEVELS else OWN_GROUPS[kind])
    linear = kept_matrix(kind, N, K)
    x = exact_activations(M, K, linear.group_size)
    assert linear.bias is not None
    expected = gemv(x.double(), dequantize(linear).double(), torch.from_numpy(linear.bias).double())
    assert_close(kernels.product(linear, x), expected, kernels.product_tolerance(M))


@pytest.mark.parametrize("two_levels", [True, False], ids=["groups", "channel"])
@pytest.mark.parametrize(
    ("M", "N", "K", "group"),
    [
        (1, 70, 256, 128),
        (2, 65, 130, 64),
        (4, 33, 172, 64),
        (5, 40, 320, 64),
        (8, 16, 100, 128),
        (9, 96, 1088, 128),
        (16, 64, 576, 128),
        (17, 33, 200, 128),
        (33, 48, 600, 256),
        (49, 48, 1024, 128),
        (70, 96, 192, 64),
        (81, 16, 64, 64),
    ],
    ids=str,
)
def test_products_have_the_bits_of_the_integers(
    kernels: Kernels, M: int, N: int, K: int, group: int, two_levels: bool
) -> None:
    linear = whole_matrix(N, K, group if two_levels else 0)
    x = uneven_activations(M, K)
    codes, scales = per_token.quantize(x)
    assert torch.equal(
        kernels.whole_product(linear, codes, scales), gemm_w4a8(codes, scales, integer_weights(linear), linear)
    )


@pytest.mark.parametrize("group", [128, 0])
@pytest.mark.parametrize("M", [2, 17])
def test_the_largest_sums_are_exact(kernels: Kernels, M: int, group: int) -> None:
    linear = whole_matrix(16, 1024, group, largest=True)
    codes = torch.full((M, 1024), 127, dtype=torch.int8)
    codes[1::2] = -127
    scales = torch.linspace(0.5, 1, M)[:, None]
    assert torch.equal(
        kernels.whole_product(linear, codes, scales), gemm_w4a8(codes, scales, integer_weights(linear), linear)
    )


def test_the_activations_are_the_same_numbers_in_half_precision_and_in_int8() -> None:
    x = exact_activations(3, 300, 64)
    codes, scales = quantize_groups(x, 64)
    assert torch.equal(x.half().float(), x)
    assert torch.equal(dequantize_groups(codes, scales, 64), x)
    assert len(scales.unique()) > 1
