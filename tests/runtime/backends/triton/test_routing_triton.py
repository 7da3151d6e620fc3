"""The router's kernel against `models.routing`, and the grouping of a prompt's pairs by expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.routing import route as reference
from models.spec import MixtureSpec
from runtime.backends.operations.layers import rms_norm
from runtime.backends.triton.kernels.experts import most_blocks
from runtime.backends.triton.kernels.routing import GpuRouter, Routed, route
from runtime.backends.triton.workspace import Workspace
from tests.runtime.backends.triton.operands import grouped, poisoned

MIXTURES = {
    "after": MixtureSpec(experts=5, chosen=2, width=1, normalized=True),
    "before": MixtureSpec(experts=20, chosen=3, width=1, normalized=False),
    "one": MixtureSpec(experts=3, chosen=1, width=1, normalized=True),
    "gated": MixtureSpec(experts=6, chosen=3, width=1, normalized=True, shared=2),
    "shared": MixtureSpec(experts=4, chosen=2, width=1, normalized=True, shared=1, gated=False),
    "corrected": MixtureSpec(experts=6, chosen=2, width=1, normalized=True, corrected=True),
    "sigmoids": MixtureSpec(
        experts=17, chosen=4, width=1, normalized=True, scoring="sigmoid", corrected=True, scale=1.8, shared=1,
        gated=False,
    ),
    "biased": MixtureSpec(experts=20, chosen=4, width=1, normalized=True, bias=True),
    "biased-gated": MixtureSpec(experts=6, chosen=2, width=1, normalized=False, shared=1, bias=True),
    "sigmoids-plain": MixtureSpec(experts=6, chosen=6, width=1, normalized=False, scoring="sigmoid", corrected=True),
}  # fmt: skip


def _router(mixture: MixtureSpec, C: int, device: str, seed: int = 0) -> GpuRouter:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(mixture.scores, C, generator=generator) * 4 / C**0.5
    correction = torch.randn(mixture.experts, generator=generator).to(device) if mixture.corrected else None
    bias = torch.randn(mixture.scores, generator=generator).to(device) if mixture.bias else None
    return GpuRouter(mixture=mixture, weight=weight.to(device), bias=bias, correction=correction)


def _routed(mixture: MixtureSpec, M: int, device: str) -> Routed:
    """Outputs that show what is not written."""
    return Routed(
        torch.full((M, mixture.experts_per_token), -1, dtype=torch.int32, device=device),
        poisoned(M, mixture.experts_per_token, device=device),
        poisoned(M, mixture.scores, device=device),
    )


@pytest.mark.parametrize("M", [1, 3, 19])
@pytest.mark.parametrize("case", MIXTURES)
def test_experts_and_shares_are_the_reference_s(case: str, M: int, device: str) -> None:
    """A row alone, a few, and a prompt's blocks of rows, of which the last is not full."""
    mixture, C = MIXTURES[case], 72
    router, routed, workspace = _router(mixture, C, device), _routed(mixture, M, device), Workspace(device)
    x = torch.randn(M, C, generator=torch.Generator().manual_seed(M)).half()
    route(x.to(device), router, routed, workspace)
    correction = None if router.correction is None else router.correction.cpu()
    logits = x.float() @ router.weight.cpu().T + (0 if router.bias is None else router.bias.cpu())
    chosen, shares = reference(logits, mixture, correction)
    assert torch.equal(routed.chosen.cpu().long(), chosen)
    torch.testing.assert_close(routed.shares.cpu(), shares, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routed.logits.cpu(), logits, rtol=1e-5, atol=1e-5)
    assert not workspace.counters(2).any(), "a captured launch must find its counters as the first one did"


@pytest.mark.parametrize("M", [1, 3, 19])
def test_a_router_may_read_rows_through_a_norm(M: int, device: str) -> None:
    """Of the residual stream, in float32; the weight of the norm is in the router's."""
    mixture, eps = MIXTURES["after"], 0.1
    router, routed = replace(_router(mixture, 1100, device), eps=eps), _routed(mixture, M, device)
    x = 0.3 * torch.randn(M, 1100, generator=torch.Generator().manual_seed(M))
    route(x.to(device), router, routed, Workspace(device))
    logits = rms_norm(x, torch.ones(1100), eps) @ router.weight.cpu().T
    chosen, shares = reference(logits, mixture, None)
    assert torch.equal(routed.chosen.cpu().long(), chosen)
    torch.testing.assert_close(routed.logits.cpu(), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(routed.shares.cpu(), shares, rtol=1e-4, atol=1e-5)


def test_a_prompt_s_rows_choose_as_they_do_alone(device: str) -> None:
    """Equal ranks go to the lower number, whatever the block of rows."""
    mixture = MixtureSpec(experts=6, chosen=3, width=1, normalized=False)
    router = _router(mixture, 64, device)
    router.weight[2:5] = router.weight[1]
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(3)).half().to(device)
    together, alone = _routed(mixture, 20, device), _routed(mixture, 1, device)
    route(x, router, together, Workspace(device))
    for row in (0, 15, 16, 19):
        route(x[row : row + 1], router, alone, Workspace(device))
        assert torch.equal(together.chosen[row], alone.chosen[0])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_choose_experts_that_there_are(bad: float, device: str) -> None:
    """The shares pass them on; addresses stay within the table."""
    mixture = MixtureSpec(experts=5, chosen=3, width=1, normalized=True, shared=1)
    router, routed = _router(mixture, 64, device), _routed(mixture, 2, device)
    x = torch.ones(2, 64, dtype=torch.float16, device=device)
    x[0, 7] = bad
    route(x, router, routed, Workspace(device))
    rows = routed.chosen.cpu().numpy()
    assert all(sorted(set(row.tolist())) == row.tolist() and 0 <= row[0] <= row[-1] == 5 for row in rows)
    assert not bool(routed.shares[0].isfinite().all())
    assert bool(routed.shares[1].isfinite().all())


@pytest.mark.parametrize(("M", "each", "experts", "block_m"), [(17, 3, 6, 32), (600, 2, 5, 64), (20, 4, 40, 32)])
def test_pairs_are_grouped_by_expert(M: int, each: int, experts: int, block_m: int, device: str) -> None:
    """Every pair once, in blocks of one expert; experts that no row chose have none."""
    rng = np.random.default_rng(M)
    rows = np.stack([np.sort(rng.permutation(experts - 1)[:each]) for _ in range(M)]).astype(np.int32)
    most = most_blocks(M * each, experts, block_m)
    groups = grouped(torch.from_numpy(rows).to(device), experts, block_m)
    assert np.array_equal(groups.order.cpu().numpy(), np.argsort(rows.ravel(), kind="stable"))
    expert, first, count = groups.blocks.cpu().numpy()
    blocks = [(e, n) for e, total in enumerate(np.bincount(rows.ravel())) for n in range(0, total, block_m)]
    sizes = [min(int(np.sum(rows == e)) - n, block_m) for e, n in blocks]
    assert count.tolist() == sizes + [0] * (most - len(sizes))
    assert expert[: len(blocks)].tolist() == [e for e, _ in blocks]
    assert first[: len(blocks)].tolist() == np.cumsum([0, *sizes[:-1]]).tolist()


def test_the_bound_of_blocks_is_reached() -> None:
    """Every expert but one with a single pair of a block of its own."""
    assert most_blocks(64 + 3, 4, 32) == 2 + 4 >= 2 + 3
    assert most_blocks(5, 40, 32) == 5
