"""The beginning of a step on the GPU: embeddings, equal to the last bit, and their norm, `add_norm`'s own."""

from __future__ import annotations

import pytest
import torch

from runtime.backends.operations import embed as reference
from runtime.backends.triton.kernels.norm import RowNorms, add_norm, embed_norm

EPS = 1e-5


def _run(M: int, V: int, C: int, device: str, *, pinned: bool = False) -> None:
    """Tokens with a repeated one, the first and the last."""
    generator = torch.Generator().manual_seed(C)
    table = torch.randn(V, C, generator=generator).half()
    tokens = torch.randint(0, V, (M,), generator=generator, dtype=torch.int32)
    tokens[0], tokens[-1] = 0, V - 1
    weight = (torch.rand(C, generator=generator) + 0.5).to(device)
    h = torch.full((M, C), torch.nan, device=device)
    x, sums = torch.full_like(h, torch.nan, dtype=torch.float16), torch.full((M, -(-C // 32)), torch.nan, device=device)
    norms = RowNorms(weight, EPS)
    embed_norm(tokens.to(device), table.pin_memory() if pinned else table.to(device), h, norms, x, sums)
    assert torch.equal(h.cpu(), reference.embed(tokens, table))
    wanted, wanted_sums = torch.empty_like(x), torch.empty_like(sums)
    add_norm(h, None, None, norms, wanted, None, wanted_sums)
    assert torch.equal(x, wanted)
    assert torch.equal(sums, wanted_sums)


@pytest.mark.parametrize("C", [8, 100, 1024, 1048])
@pytest.mark.parametrize("M", [1, 2, 9])
def test_every_row_is_the_one_of_its_token(device: str, M: int, C: int) -> None:
    _run(M, 13, C, device)


@pytest.mark.gpu
def test_the_table_may_stay_in_page_locked_memory(cuda: str) -> None:
    _run(5, 1000, 4096, cuda, pinned=True)
