"""Rows of the embedding table on the GPU, held against the plain torch operation. A copy: equal to the last bit."""

from __future__ import annotations

import pytest
import torch

from runtime.backends.triton.kernels.embed import BLOCK_C, embed
from runtime.operations import embed as reference


def _case(M: int, V: int, C: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with a repeated one, the first and the last, and a table."""
    generator = torch.Generator().manual_seed(C)
    table = torch.randn(V, C, generator=generator).half()
    tokens = torch.randint(0, V, (M,), generator=generator, dtype=torch.int32)
    tokens[0], tokens[-1] = 0, V - 1
    return tokens.to(device), table


@pytest.mark.parametrize("C", [8, 100, BLOCK_C, BLOCK_C + 24])
@pytest.mark.parametrize("M", [1, 2, 9])
def test_every_row_is_the_one_of_its_token(device: str, M: int, C: int) -> None:
    tokens, table = _case(M, 13, C, device)
    h = torch.full((M, C), torch.nan, device=device)
    embed(tokens, table.to(device), h)
    assert torch.equal(h.cpu(), reference.embed(tokens.cpu(), table))


@pytest.mark.gpu
def test_the_table_may_stay_in_page_locked_memory(cuda: str) -> None:
    tokens, table = _case(5, 1000, 4096, cuda)
    h = torch.full((5, 4096), torch.nan, device=cuda)
    embed(tokens, table.pin_memory(), h)
    assert torch.equal(h.cpu(), reference.embed(tokens.cpu(), table))
