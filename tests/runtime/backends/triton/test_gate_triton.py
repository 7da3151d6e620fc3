"""The gate of the MLP on the GPU.

Tolerance: the result is rounded to half precision, half a unit in the last place is 2^-11 of the number (4.9e-4), and
the exponential may be off by a few units of float32; numbers under 6e-5 lie on the half-precision grid of 6e-8.
"""

from __future__ import annotations

import pytest
import torch

from runtime.backends.operations.layers import clamped_gate, gelu_gate, rms_norm, silu_gate
from runtime.backends.triton.kernels.activations import Projected
from runtime.backends.triton.kernels.gate import BLOCK_I, OwnTokens, gate, token_gate
from tests.close import Tolerance, assert_close
from tests.runtime.backends.triton.operands import assert_left, left_of, poisoned


@pytest.mark.parametrize(("M", "width"), [(1, 172), (3, BLOCK_I + 8)])
def test_what_compensates_the_product_is_added(device: str, M: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    y = 3 * torch.randn(M, 2 * width, generator=generator)
    dec = torch.randn(M, 2 * width, generator=generator)
    x = poisoned(M, width, dtype=torch.float16, device=device)
    left = left_of(M, width, device, rotated=M > 1)
    gate(y.to(device), dec.to(device), x, left)
    assert_left(left, x)
    total = y + dec
    assert_close(x.cpu().float(), silu_gate(total[:, :width], total[:, width:]), "half")


def test_an_expert_s_share_counts_before_rounding(device: str) -> None:
    """One of 1e-4 would leave three bits of a small half."""
    y, shares = torch.randn(3, 80, generator=torch.Generator().manual_seed(4)), torch.tensor([0.5, 1e4, 1e-4])
    y[1] *= 1e-3
    x = torch.full((3, 40), torch.nan, dtype=torch.float16, device=device)
    gate(y.to(device), None, x, factors=shares.to(device))
    assert_close(x.cpu().float(), silu_gate(y[:, :40], y[:, 40:]) * shares[:, None], "half")


def test_the_clamped_gate_limits_the_compensated_product(device: str) -> None:
    """Within the limits before it is compensated, beyond them after, and the other way round; then with shares."""
    generator, limit = torch.Generator().manual_seed(8), 1.5
    y, dec, shares = (torch.randn(2, *of, generator=generator) for of in ((1200,), (1200,), ()))
    x = torch.full((2, 600), torch.nan, dtype=torch.float16, device=device)
    gate(y.to(device), dec.to(device), x, factors=shares.to(device), limit=limit)
    wanted = clamped_gate(y[:, :600] + dec[:, :600], y[:, 600:] + dec[:, 600:], limit) * shares[:, None]
    assert_close(x.cpu().float(), wanted, "half")


def test_large_magnitudes_saturate_and_broken_ones_stay_visible(device: str) -> None:
    """With limits, NaN is no number to be limited; infinity is."""
    gates, ups = [-200.0, 200.0, torch.nan, torch.inf, 0.0], [2.0, 2.0, 1.0, 1.0, torch.nan]
    y, x = torch.tensor([gates + ups], device=device), torch.zeros(1, 5, dtype=torch.float16, device=device)
    gate(y, None, x)
    assert x[0, :2].tolist() == [0.0, 400.0]
    assert not torch.isfinite(x[0, 2:]).any()
    gate(y, None, x, limit=2.0)
    assert torch.isfinite(x[0]).tolist() == [True, True, False, True, False]
    assert_close(x[0, 1].cpu().float(), clamped_gate(torch.tensor(2.0), torch.tensor(2.0), 2.0), "half")


@pytest.mark.parametrize(
    ("M", "P", "dec", "gelu"),
    [(1, 24, (False, False), True), (3, 256, (True, False), True), (3, 256, (False, True), False)],
)
def test_a_block_s_own_embeddings_pass_its_gate(
    device: str, M: int, P: int, dec: tuple[bool, bool], gelu: bool
) -> None:
    """Those of the second block of three, with the norm of their context; either output may have a compensation."""
    generator, eps = torch.Generator().manual_seed(P + M), 0.1
    outputs = torch.randn(2, 2, M, P, generator=generator)
    rows, weight = torch.randn(M, 3 * P, generator=generator).half(), torch.rand(P, generator=generator) + 0.5
    x = poisoned(M, P, dtype=torch.float16, device=device)
    left = left_of(M, P, device, rotated=gelu)
    both = [
        Projected(y.to(device), other.to(device) if own else None) for (y, other), own in zip(outputs, dec, strict=True)
    ]
    tokens = OwnTokens(rows.to(device)[:, P : 2 * P], 3 * P, weight.to(device), eps)
    token_gate(*both, tokens, x, left, gelu=gelu)
    assert_left(left, x)
    g, context = (y + other if own else y for (y, other), own in zip(outputs, dec, strict=True))
    up = rows[:, P : 2 * P].float() + rms_norm(context, weight, eps)
    # A sum that cancels has the float32 error of its terms.
    near = Tolerance(rtol=5e-4, atol=1e-6, why="rounded to half precision, after a sum of two float32 terms")
    assert_close(x.cpu().float(), (gelu_gate if gelu else silu_gate)(g, up), near)
