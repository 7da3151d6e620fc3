"""The gated delta rule by chunks against its recurrent form, and against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.recurrent import DeltaInputs, convolve, delta_rule, delta_rule_chunked, normalized
from tests.close import assert_close


def drawn(tokens: int, seed: int = 0) -> tuple[DeltaInputs, torch.Tensor]:
    """Three heads of 5 by 4, decays from none to nearly all, and a state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, tokens, 3, *shape, generator=generator, dtype=torch.float64)

    decay = -normal().square() * 3
    inputs = DeltaInputs(normal(5), normalized(normal(5)), normal(4), decay, normal().sigmoid())
    return inputs, torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("mamba", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 65, 150])
def test_chunks_give_what_the_recurrent_form_gives(tokens: int, mamba: bool) -> None:
    x, state = drawn(tokens)
    x = replace(x, skip=torch.arange(3, dtype=torch.float64)) if mamba else x
    expected, last = delta_rule(x, state)
    for chunk in (64, 3):
        found, left = delta_rule_chunked(x, state, chunk)
        assert_close(found, expected, "model")
        assert_close(left, last, "model")


def test_a_token_replaces_what_its_key_holds() -> None:
    """With beta 1 and no decay a key then gives its new value, and a key at right angles to it what it gave before."""
    key, other = torch.eye(5, dtype=torch.float64)[:2]
    value, state = torch.arange(4, dtype=torch.float64), torch.randn(1, 5, 4, dtype=torch.float64)
    x = DeltaInputs(key.view(1, 1, 5), key.view(1, 1, 5), value.view(1, 1, 4), torch.zeros(1, 1), torch.ones(1, 1))
    y, after = delta_rule(x, state)
    assert_close(y[0, 0], value)
    assert_close(after[0].T @ key, value)
    assert_close(after[0].T @ other, state[0].T @ other)


def test_a_convolution_sees_its_taps_alone() -> None:
    x, weight = torch.randn(9, 3), torch.randn(4, 3)
    y = convolve(x, weight, torch.ones(3))
    assert y.shape == (6, 3)
    assert_close(y[2], (x[2:6] * weight).sum(0) + 1)
    assert torch.equal(convolve(x[3:8], weight, torch.ones(3)), y[3:5])  # bit for bit what it is among others
