"""Sums of 32 adjacent activations, by a separate kernel and as written by others."""

from __future__ import annotations

import pytest
import torch

from runtime.backends.triton.kernels.activations import BLOCK_K, piece_sums
from tests.close import assert_close
from tests.runtime.backends.triton.operands import SUMS, sums_of


@pytest.mark.parametrize("K", [1, 32, 100, 576, BLOCK_K, BLOCK_K + 33])
@pytest.mark.parametrize("M", [1, 3])
def test_sums_are_those_of_pieces(M: int, K: int, device: str) -> None:
    x = (torch.randn(M, K, generator=torch.Generator().manual_seed(K)) + 0.5).half().to(device)
    sums = torch.full((M, -(-K // 32)), torch.nan, device=device)
    piece_sums(x, sums)
    assert_close(sums, sums_of(x), SUMS)


def test_a_nan_stays_in_its_piece(device: str) -> None:
    x = torch.ones(1, 96, dtype=torch.float16, device=device)
    x[0, 40] = torch.nan
    sums = torch.zeros(1, 3, device=device)
    piece_sums(x, sums)
    assert sums[0].isnan().tolist() == [False, True, False]
