"""The end of a step on the GPU: one float32 addition, equal to the last bit, and the flag."""

from __future__ import annotations

import pytest
import torch

from runtime.backends.triton.kernels.head import BLOCK, finish
from runtime.operations import head as reference


@pytest.mark.parametrize("with_dec", [False, True], ids=["plain", "dec"])
@pytest.mark.parametrize(("R", "V"), [(1, 1), (1, BLOCK), (3, 1000), (2, BLOCK + 7)])
def test_logits_take_their_compensation(device: str, R: int, V: int, with_dec: bool) -> None:
    generator = torch.Generator().manual_seed(V)
    logits = torch.randn(R, V, generator=generator)
    dec = torch.randn(R, V, generator=generator) if with_dec else None
    expected, broken = reference.finish(logits, dec)
    actual, flag = logits.to(device, copy=True), torch.zeros(1, dtype=torch.int32, device=device)
    finish(actual, None if dec is None else dec.to(device), flag)
    assert torch.equal(actual.cpu(), expected)
    assert not broken
    assert flag.item() == 0


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["logits", "dec"])
def test_a_broken_number_raises_the_flag(device: str, where: str, number: float, place: int) -> None:
    logits, dec = torch.zeros(1, 2 * BLOCK + 6), torch.zeros(1, 2 * BLOCK + 6)
    (logits if where == "logits" else dec)[0, place] = number
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    finish(logits.to(device), dec.to(device), flag)
    assert flag.item() == 1
    assert reference.finish(logits, dec)[1]


def test_a_raised_flag_stays_raised(device: str) -> None:
    flag = torch.ones(1, dtype=torch.int32, device=device)
    finish(torch.zeros(1, 5, device=device), None, flag)
    assert flag.item() == 1
