"""The basis of low-bit keys: preserves products and softmax, and lowers the rounding error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.packed import KeyStatistics
from runtime.backends.operations.layers import to_basis
from runtime.backends.operations.pages import dequantize_page, quantize_page
from runtime.kv.basis import KeyBasis, hadamard, hadamard_block, key_bases, key_basis
from runtime.kv.kinds import KINDS
from tests.close import Tolerance, assert_close
from tests.runtime.conftest import make_model

DIMS = [2, 8, 40, 64, 96, 128]


def statistics(D: int, heads: int = 3, seed: int = 0) -> KeyStatistics:
    rng = np.random.default_rng(seed)
    axis = rng.standard_normal((heads, D))
    axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
    return KeyStatistics((4 * rng.standard_normal((heads, D))).astype(np.float32), axis.astype(np.float32))


@pytest.mark.parametrize("D", DIMS)
def test_hadamards_matrix_is_its_own_inverse(D: int) -> None:
    block = hadamard_block(D)
    matrix = hadamard(np.eye(D, dtype=np.float32))
    assert_close(matrix @ matrix, np.eye(D), "float32")
    assert set(np.unique(np.round(np.abs(matrix) * np.sqrt(block), 5)).tolist()) <= {0.0, 1.0}
    assert (matrix != 0).sum() == D * block


@pytest.mark.parametrize("D", DIMS)
def test_products_stay_and_the_common_direction_becomes_that_of_equal_channels(D: int) -> None:
    found = statistics(D)
    basis = key_basis(found, 3, D)
    reflection = torch.from_numpy(basis.reflection)
    generator = torch.Generator().manual_seed(D)
    q, k = torch.randn(2, 5, 3, D, generator=generator)
    turned_q, turned_k = to_basis(q, reflection), to_basis(k, reflection)
    assert_close((turned_q * turned_k).sum(-1), (q * k).sum(-1), Tolerance(atol=1e-5 * D, why="sums in float32"))
    common = to_basis(torch.from_numpy(found.axis)[None], reflection)[0].abs()
    assert_close(common, torch.full((3, D), D**-0.5), "float32")
    assert_close(to_basis(torch.from_numpy(found.mean)[None], reflection)[0], basis.mean, "float32")


def test_without_statistics_keys_are_spread_and_nothing_is_taken_off() -> None:
    basis = key_basis(None, 2, 64)
    assert not basis.reflection.any()
    assert not basis.mean.any()
    x = torch.eye(64)[:2].unsqueeze(1).expand(2, 2, 64)
    assert_close(to_basis(x, torch.from_numpy(basis.reflection)).abs(), torch.full((2, 2, 64), 1 / 8), "float32")


def test_kinds_that_are_not_turned_have_no_bases() -> None:
    model = make_model()
    assert key_bases(KINDS["fp16"], model) == ()
    assert [type(basis) for basis in key_bases(KINDS["int4"], model)] == [KeyBasis] * model.spec.num_layers


def test_keys_far_off_zero_with_large_channels_lose_less() -> None:
    """As real keys are: far from zero, two channels of ten times the others, queries with a direction."""
    generator, D = torch.Generator().manual_seed(1), 64
    size, mean = torch.ones(D), torch.randn(D, generator=generator)
    size[[17, 49]] = 10
    k = (torch.randn(64, D, generator=generator) + 2 * mean) * size
    axis = torch.randn(D, generator=generator)
    q = torch.randn(200, D, generator=generator) + 3 * axis
    direction = axis / axis.norm()
    basis = key_basis(KeyStatistics(k.mean(0, keepdim=True).numpy(), direction[None].numpy()), 1, D)
    reflection, m = torch.from_numpy(basis.reflection), torch.from_numpy(basis.mean)
    costs = []
    turned = to_basis(q[:, None], reflection)[:, 0], (to_basis(k[:, None], reflection) - m)[:, 0]
    for queries, keys in ((q, k), turned):
        kind = KINDS["int4"]
        back = dequantize_page(kind, "keys", quantize_page(kind, "keys", keys[None]), D)[0]
        lost = queries @ (back - keys).T
        costs.append(float((lost - lost.mean(1, keepdim=True)).norm()))  # what all scores have alike changes nothing
    assert costs[1] < 0.25 * costs[0]
