"""Norms, gates and heads: what stands between the products, on every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.rope import tables
from models.spec import RopeSpec
from runtime.backends.operations.layers import clamped_gate, gelu_gate, rms_norm, rotate, silu_gate, to_basis
from tests.close import assert_close
from tests.runtime.backends.contract.kernels import HeadOptions, Kernels

EPS = 1e-5
Pair = tuple[torch.Tensor, torch.Tensor]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("M", "C"), [(1, 1), (5, 48), (1, 64), (3, 172), (17, 256), (1, 896), (17, 1088), (5, 3072)], ids=str
)
def test_norm(kernels: Kernels, M: int, C: int) -> None:
    h, weight = normal(M, C) * normal(C, seed=1).exp(), 1 + 0.3 * normal(C, seed=2)
    assert_close(kernels.norm(h, weight, EPS), rms_norm(h, weight, EPS), kernels.written)


def test_epsilon_bounds_the_scale_of_small_rows(kernels: Kernels) -> None:
    h, weight = 1e-3 * normal(1, 64), torch.ones(64)
    assert_close(kernels.norm(h, weight, EPS), rms_norm(h, weight, EPS), kernels.written)


def test_zeros_stay_zeros_and_a_nan_spreads_over_its_row(kernels: Kernels) -> None:
    h = normal(3, 70)
    h[0], h[1, 3] = 0.0, torch.nan
    x = kernels.norm(h, torch.ones(70), EPS)
    assert not x[0].any()
    assert bool(x[1].isnan().all())
    assert bool(x[2].isfinite().all())


@pytest.mark.parametrize(("M", "width"), [(1, 1), (3, 172), (5, 172), (1, 512), (3, 520)], ids=str)
def test_gate(kernels: Kernels, M: int, width: int) -> None:
    y = 4 * normal(M, 2 * width, seed=width)
    y[0, : min(4, width)] = torch.tensor([90.0, -90.0, 0.0, -1e-3])[:width]
    assert_close(kernels.gate(y), silu_gate(y[:, :width], y[:, width:]), kernels.written)
    exact = gelu_gate(y[:, :width].double(), y[:, width:].double()).float()  # in float32, 1 + tanh cancels
    assert_close(kernels.gate(y, gelu=True), exact, kernels.written)


@pytest.mark.parametrize(("M", "width", "limit"), [(1, 5, 7.0), (3, 520, 0.7)], ids=str)
def test_the_clamped_gate(kernels: Kernels, M: int, width: int, limit: float) -> None:
    """Gates and ups beyond both limits, at them and within; a gate has no least."""
    y = 4 * normal(M, 2 * width, seed=width)
    y[0, :5] = torch.tensor([limit, 90.0, -90.0, 0.0, limit])
    y[0, width : width + 5] = torch.tensor([-limit, 90.0, -1.0, 3.0, -90.0])
    exact = clamped_gate(y[:, :width].double(), y[:, width:].double(), limit).float()
    assert_close(kernels.gate(y, limit=limit), exact, kernels.written)


SLOTS, POSITIONS = (1, 1, 0, 0, 0), (0, 1, 0, 1, 2)
"""Of a step's rows; a row's number is not its position."""


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("H", "H_kv", "D", "r"),
    [(4, 2, 32, 32), (7, 1, 64, 64), (2, 2, 80, 32), (3, 3, 96, 72), (2, 1, 256, 256), (2, 1, 48, 0)],
    ids=["H4-2-D32", "H7-1-D64", "H2-2-D80-r32", "H3-3-D96-r72", "H2-1-D256", "H2-1-D48-r0"],
)
def test_heads(kernels: Kernels, H: int, H_kv: int, D: int, r: int, norm: bool) -> None:
    norms = (normal(D, seed=1).abs() + 0.1, normal(D, seed=2).abs() + 0.1) if norm else None
    _check(kernels, H, H_kv, D, r, norms=norms)


@pytest.mark.parametrize(
    ("H", "H_kv", "D", "r"), [(4, 2, 64, 64), (3, 3, 96, 72), (2, 1, 8, 8), (1, 1, 40, 20), (6, 3, 20, 0), (2, 1, 2, 2)]
)
def test_heads_in_the_basis_of_the_cache(kernels: Kernels, H: int, H_kv: int, D: int, r: int) -> None:
    basis = normal(H_kv, D, seed=3) / D**0.5, normal(H_kv, D, seed=4)
    norms = (normal(D, seed=1).abs() + 0.1, normal(D, seed=2).abs() + 0.1) if D == 64 else None
    _check(kernels, H, H_kv, D, r, norms=norms, basis=basis)


@pytest.mark.parametrize(("H", "H_kv", "D", "r"), [(4, 2, 32, 32), (3, 3, 96, 72)])
def test_heads_that_are_rotated_first_and_grow(kernels: Kernels, H: int, H_kv: int, D: int, r: int) -> None:
    norms = (normal(D, seed=1).abs() + 0.1, normal(D, seed=2).abs() + 0.1)
    _check(kernels, H, H_kv, D, r, norms=norms, norm_last=True, growth=1 + torch.arange(9.0) / 7)


def _check(
    kernels: Kernels,
    H: int,
    H_kv: int,
    D: int,
    r: int,
    norms: Pair | None = None,
    basis: Pair | None = None,
    **more: Any,
) -> None:
    y = normal(len(SLOTS), (H + 2 * H_kv) * D)
    cos, sin = (torch.from_numpy(table) for table in tables(RopeSpec(rotary_dim=r), 9))
    sizes = {"heads": H, "kv_heads": H_kv, "dim": D, "cos": cos, "sin": sin, "slots": SLOTS, "positions": POSITIONS}
    how = HeadOptions(**sizes, norms=norms, basis=basis, **more)
    q, k, v = y.view(len(y), -1, D).split((H, H_kv, H_kv), dim=1)
    if norms is not None and not how.norm_last:
        q, k = rms_norm(q, norms[0], how.eps), rms_norm(k, norms[1], how.eps)
    own = torch.tensor(POSITIONS)
    q, k = rotate(q, cos[own], sin[own]), rotate(k, cos[own], sin[own])
    if norms is not None and how.norm_last:
        q, k = rms_norm(q, norms[0], how.eps), rms_norm(k, norms[1], how.eps)
    if how.growth is not None:
        q = q * how.growth[own, None, None]
    if basis is not None:
        q = to_basis(q, basis[0].repeat_interleave(H // H_kv, dim=0))
        k = to_basis(k, basis[0]) - basis[1]
    for what, actual, expected in zip(("q", "k", "v"), kernels.heads(y, how), (q, k, v), strict=True):
        assert_close(actual, expected, "heads", what=what)


def test_nothing_else_of_the_heads_is_broken_by_a_nan(kernels: Kernels) -> None:
    for part in (0, 4, 6):  # a query, a key, a value
        y = normal(1, 8 * 32)
        y[0, part * 32 + 5] = torch.nan
        cos, sin = (torch.from_numpy(table) for table in tables(RopeSpec(rotary_dim=32), 9))
        norms = (torch.ones(32), torch.ones(32))
        how = HeadOptions(heads=4, kv_heads=2, dim=32, cos=cos, sin=sin, slots=(0,), positions=(0,), norms=norms)
        broken = torch.cat([each[0] for each in kernels.heads(y, how)]).isnan().any(dim=1)
        assert broken.nonzero().flatten().tolist() == [part]
