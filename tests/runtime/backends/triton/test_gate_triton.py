"""The gate of the MLP on the GPU.

Tolerance: the result is rounded to half precision, half a unit in the last place is 2^-11 of the number (4.9e-4), and
the exponential may be off by a few units of float32; numbers under 6e-5 lie on the half-precision grid of 6e-8.
"""

from __future__ import annotations

import pytest
import torch

from models.architecture import Eager
from models.spec import UNGATED, Activation
from runtime.backends.operations.layers import clamped_gate, gelu_gate, rms_norm, silu_gate
from runtime.backends.triton.kernels.activations import Projected
from runtime.backends.triton.kernels.gate import BLOCK_I, How, OwnTokens, Slopes, gate, token_gate
from tests.close import Tolerance, assert_close
from tests.runtime.backends.triton.operands import assert_left, left_of, poisoned
from tests.runtime.conftest import make_spec

SUM = Tolerance(rtol=5e-4, atol=1e-6, why="rounded to half precision, after a sum of two float32 terms")
"""A sum that cancels has the float32 error of its terms."""


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
    gate(y.to(device), dec.to(device), x, how=How("clamped_silu", limit), factors=shares.to(device))
    wanted = clamped_gate(y[:, :600] + dec[:, :600], y[:, 600:] + dec[:, 600:], limit) * shares[:, None]
    assert_close(x.cpu().float(), wanted, "half")


def test_large_magnitudes_saturate_and_broken_ones_stay_visible(device: str) -> None:
    """With limits, NaN is no number to be limited; infinity is."""
    gates, ups = [-200.0, 200.0, torch.nan, torch.inf, 0.0], [2.0, 2.0, 1.0, 1.0, torch.nan]
    y, x = torch.tensor([gates + ups], device=device), torch.zeros(1, 5, dtype=torch.float16, device=device)
    gate(y, None, x)
    assert x[0, :2].tolist() == [0.0, 400.0]
    assert not torch.isfinite(x[0, 2:]).any()
    gate(y, None, x, how=How("clamped_silu", 2.0))
    assert torch.isfinite(x[0]).tolist() == [True, True, False, True, False]
    assert_close(x[0, 1].cpu().float(), clamped_gate(torch.tensor(2.0), torch.tensor(2.0), 2.0), "half")


@pytest.mark.parametrize("kind", UNGATED)
def test_an_mlp_without_a_gate_has_its_activation(device: str, kind: Activation) -> None:
    """Of the compensated product, on both sides of every border; as it is, and times an expert's share."""
    oracle, width, share = _Ungated(kind), 44, torch.tensor([1.0, 1e-3])
    y = 3 * torch.randn(2, width, generator=torch.Generator().manual_seed(9))
    y[0, :9] = torch.tensor([0.0, 1e-3, -1e-3, -0.24, -0.26, -2e-6, -5e-7, -9.0, 20.0])
    dec = torch.full_like(y, 0.5)
    y -= dec
    slopes = Slopes(*(slope.to(device) for slope in oracle.slopes))
    for factors, rotated in ((None, True), (share, False)):
        x = poisoned(2, width, dtype=torch.float16, device=device)
        left = left_of(2, width, device, rotated=rotated)
        given = None if factors is None else factors.to(device)
        gate(y.to(device), dec.to(device), x, left, how=How(kind, 0.0, slopes), factors=given)
        assert_left(left, x)
        wanted = oracle.activated((y + dec).double(), 0) * (1 if factors is None else factors[:, None])
        assert_close(x.cpu().float(), wanted.float(), SUM)
    gate(torch.tensor([[torch.nan, torch.inf]], device=device), None, x[:1, :2], how=How(kind, 0.0, slopes))
    assert not torch.isfinite(x[0, :2]).any()


class _Ungated(Eager):
    """Activations without gates in plain torch."""

    slopes = torch.tensor([[0.7], [190.0]])

    def __init__(self, kind: Activation) -> None:
        self.spec = make_spec(activation=kind)

    def vector(self, name: str) -> torch.Tensor:
        return self.slopes[name.endswith("falling") + 0].double()


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
    token_gate(*both, tokens, x, left, how=How("gelu_tanh" if gelu else "silu"))
    assert_left(left, x)
    g, context = (y + other if own else y for (y, other), own in zip(outputs, dec, strict=True))
    up = rows[:, P : 2 * P].float() + rms_norm(context, weight, eps)
    assert_close(x.cpu().float(), (gelu_gate if gelu else silu_gate)(g, up), SUM)
