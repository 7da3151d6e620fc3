"""Kernels with barriers between programs, under many schedules; and seeded defects, each of which is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from models import per_token
from models.spec import MixtureSpec
from runtime.backends.triton.kernels import compensate as kernels
from runtime.backends.triton.kernels.activations import piece_sums
from runtime.backends.triton.kernels.compensate import LaunchConfig, Output, compensate, room_of
from runtime.backends.triton.kernels.experts import few
from runtime.backends.triton.kernels.gemv import LaunchConfig as GemvConfig
from runtime.backends.triton.kernels.gemv import few_rows, prepare
from runtime.backends.triton.kernels.routing import GpuRouter, Routed, route
from runtime.backends.triton.kernels.select import make_selection
from runtime.backends.triton.kernels.w4a8 import gemm_w4a8, repack_w4a8
from runtime.backends.triton.layout import repack
from runtime.backends.triton.residual import residuals_to_device
from runtime.backends.triton.workspace import Workspace
from tests.grid import combined, grid
from tests.runtime.conftest import pack_linear

if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)

from tests.runtime.backends.contract.on_triton import placed
from tests.runtime.backends.contract.operands import uneven_activations, whole_matrix
from tests.runtime.backends.triton.interleaving import interleaved
from tests.runtime.backends.triton.operands import experts

N_TB, LAUNCHES, SCHEDULES = 3, 3, 12
"""Programs; launches one after another, over the same counters and buffers; seeds."""


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "with the product"])
def compensated(request: pytest.FixtureRequest) -> Callable[..., bool]:
    """Runs launches of fused compensation under one schedule and says whether each was right to the bit."""
    N, K = 520, 1100  # three lines of 256 outputs, two chunks of channels
    weight = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    packed = pack_linear(weight, bits=3, residual_bits=4)
    residual = residuals_to_device([packed.residual], packed.shape, "cpu")
    selection = make_selection(packed, k_chunk=10, device="cpu")
    rows = [torch.randn(1, K, generator=torch.Generator().manual_seed(i)).half() for i in range(LAUNCHES)]
    plain, matrix, division = LaunchConfig(n_tb=1, fused=False), repack(packed, "cpu"), GemvConfig(split=2)

    def launch(x: torch.Tensor, out: torch.Tensor, config: LaunchConfig, workspace: Workspace) -> None:
        compensate(x, selection, residual, Output(out), config, workspace)

    expected, products = [], [torch.empty(1, N) for _ in rows]
    for x, product in zip(rows, products, strict=True):
        expected.append(torch.empty(1, N))
        launch(x, expected[-1], plain, Workspace("cpu"))
        few_rows(x, matrix, product, Workspace("cpu"), division)

    def run(seed: int, *, fences: bool = True) -> bool:
        workspace, main, right = Workspace("cpu"), Workspace("cpu"), True
        config = LaunchConfig(n_tb=N_TB, fused=True)
        with pytest.MonkeyPatch.context() as patch, interleaved(seed, fences=fences, patience=5000) as machine:
            patch.setattr(kernels, "_check", lambda *_: None)  # which refuses programs that wait under the interpreter
            for x, wanted, multiplied in zip(rows, expected, products, strict=True):
                out, product = torch.full((1, N), torch.nan), multiplied
                if request.param:
                    product, sums = torch.full((1, N), torch.nan), torch.empty(1, 35)
                    piece_sums(x, sums)
                    ready = prepare(x, matrix, product, main, division, sums=sums)
                    config = LaunchConfig(n_tb=N_TB, fused=True, product=ready)
                try:
                    launch(x, out, config, workspace)
                except triton.runtime.errors.InterpreterError as error:
                    if "Stuck" not in str(error):
                        raise
                    return False
                right = right and torch.equal(out, wanted) and torch.equal(product, multiplied)
                right = right and workspace.counters(2).tolist() == [0, 0] and not main.counters(9).any()
            assert machine.launches >= LAUNCHES
        return right

    return run


@pytest.mark.parametrize("seeds", grid([range(3), range(3, SCHEDULES)], {range(3)}), ids=str)
def test_compensation_is_right_under_every_schedule(compensated: Callable[..., bool], seeds: range) -> None:
    """Chosen channels are read after the barrier alone, and each launch finds its counters at zero."""
    assert all(compensated(seed) for seed in seeds)


@pytest.mark.slow
def test_a_schedule_can_be_repeated_and_without_fences_it_breaks(compensated: Callable[..., bool]) -> None:
    first = [compensated(seed, fences=False) for seed in range(2)]
    assert not all(first)
    assert [compensated(seed, fences=False) for seed in range(2)] == first


@triton.jit
def _never_wait(counters_ptr, _programs):
    tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _wait_without_release(counters_ptr, programs):
    """Arrival does not send off what was chosen."""
    arrived = tl.atomic_add(counters_ptr, 1, sem="acquire", scope="gpu") + 1
    while arrived < programs:
        arrived = tl.atomic_add(counters_ptr, 0, sem="acquire", scope="gpu")


@triton.jit
def _wait_for_all_but_one(counters_ptr, programs):
    programs -= 1
    arrived = tl.atomic_add(counters_ptr, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < programs:
        arrived = tl.atomic_add(counters_ptr, 0, sem="acquire", scope="gpu")


@triton.jit
def _reset_by_the_first(counters_ptr, _programs):
    """The first to leave resets, while others may still wait to see that all are here."""
    if tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu") == 0:
        tl.store(counters_ptr, 0)
        tl.store(counters_ptr + 1, 0)


@triton.jit
def _never_reset(counters_ptr, _programs):
    tl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu")


DEFECTS: dict[str, tuple[str, Any]] = {
    "no barrier": ("_wait_for_all", _never_wait),
    "a release is missing": ("_wait_for_all", _wait_without_release),
    "one is not waited for": ("_wait_for_all", _wait_for_all_but_one),
    "a reset too early": ("_leave", _reset_by_the_first),
    "no reset": ("_leave", _never_reset),
}


QUICK = {*((False, defect) for defect in DEFECTS), (True, "no barrier")}


@pytest.mark.parametrize(*combined(QUICK, compensated=[False, True], defect=DEFECTS), indirect=["compensated"], ids=str)
def test_a_seeded_defect_is_caught(
    compensated: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    monkeypatch.setattr(kernels, *DEFECTS[defect])
    assert not all(compensated(seed) for seed in range(SCHEDULES))


@triton.jit
def _exchange_kernel(data_ptr, counters_ptr, out_ptr, SEM: tl.constexpr):
    """Each program writes a number and reads all the others' after a barrier, and one of them before it."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(out_ptr + 32 * pid, tl.load(data_ptr))
    tl.store(data_ptr + pid, pid + 1)
    arrived = tl.atomic_add(counters_ptr, 1, sem="release") + 1
    while arrived < programs:
        arrived = tl.atomic_add(counters_ptr, 0, sem="relaxed")
    tl.atomic_add(counters_ptr + 1, 1, sem=SEM)
    total = tl.full([], 0, tl.int32)
    for other in range(programs):
        total += tl.load(data_ptr + other)
    tl.store(out_ptr + 32 * pid, total)


@pytest.mark.parametrize(("sem", "holds"), [("acquire", True), ("relaxed", False)])
def test_a_line_that_was_read_before_the_barrier_is_stale_until_an_acquire(sem: str, holds: bool) -> None:
    found = []
    for seed in range(SCHEDULES):
        data, counters, out = (torch.zeros(128, dtype=torch.int32) for _ in range(3))
        with interleaved(seed):
            _exchange_kernel[(N_TB,)](data, counters, out, SEM=sem)
        found.append(out[: 32 * N_TB : 32].tolist() == [6] * N_TB)
    assert all(found) == holds


class Merged(NamedTuple):
    """A launch whose last program merges what all leave in scratch."""

    launch: Callable[[Sequence[torch.Tensor], Workspace], object]
    results: list[torch.Tensor]
    scratch: tuple[int, torch.dtype]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def split_product(pack: Any) -> Merged:
    """Of three parts."""
    matrix, x = repack(pack(normal(20, 1030, seed=1).numpy(), bits=4), "cpu"), normal(1, 1030, seed=2).half()
    return Merged(
        lambda out, workspace: few_rows(x, matrix, out[0], workspace, GemvConfig(split=3)),
        [torch.empty(1, 20)],
        (60, torch.float32),
    )


def split_product_of_tokens(_pack: Any) -> Merged:
    """W4A8 of two rows."""
    weight = repack_w4a8(whole_matrix(20, 600, 128), "cpu")
    tokens = placed(*per_token.quantize(uneven_activations(2, 600)), 128, "cpu")
    return Merged(
        lambda out, workspace: gemm_w4a8(tokens, weight, out[0], workspace, 3),
        [torch.empty(2, 20)],
        (120, torch.int32),
    )


def summed_experts(_pack: Any) -> Merged:
    """Two rows, two experts each, in two parts: eight programs, of which the last of a row's four adds up."""
    weight, chosen = experts(3, 20, 1030, 4, 128, "cpu"), torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)
    x, sums, shares = normal(4, 1030, seed=5).half(), torch.empty(4, 33), torch.ones(2, 2)
    piece_sums(x, sums)
    return Merged(
        lambda out, workspace: few(x, sums, weight, chosen, out[0], workspace, shares=shares, split=2),
        [torch.empty(2, 20)],
        (160, torch.float32),
    )


def router(_pack: Any) -> Merged:
    """Ten logits of four programs a row, which then choose."""
    mixture = MixtureSpec(experts=9, chosen=3, width=1, normalized=True, shared=1)
    own = GpuRouter(mixture=mixture, weight=normal(10, 40, seed=6), bias=None, correction=None)
    x = normal(2, 40, seed=7).half()
    return Merged(
        lambda out, workspace: route(x, own, Routed(*out), workspace),
        [torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4), torch.zeros(2, 10)],
        (64, torch.float32),
    )


@pytest.mark.parametrize("fences", [True, False])
@pytest.mark.parametrize("made", [split_product, split_product_of_tokens, summed_experts, router])
def test_parts_are_merged_once_all_of_them_are_there(made: Any, fences: bool) -> None:
    """The same under every schedule, over counters that are set back; without fences it is not.

    Parts of another launch would be seen, as its scratch is overwritten.
    """
    launch, results, scratch = made(pack_linear)
    expected, right, workspace = [torch.empty_like(one) for one in results], [], Workspace("cpu")
    launch(expected, Workspace("cpu"))
    for seed in range(4):
        found = [torch.full_like(one, torch.nan if one.is_floating_point() else -1) for one in results]
        workspace.scratch(*scratch).fill_(12345)
        with interleaved(seed, fences=fences):
            launch(found, workspace)
        right.append(all(map(torch.equal, found, expected)) and not workspace.counters(2).any())
    assert all(right) == fences


def test_rows_that_share_what_they_fetch_are_right_under_every_schedule() -> None:
    """Each row has the bits that it has alone, however the programs that list, copy and add take turns."""
    K = 1100
    packed = pack_linear(np.random.default_rng(3).standard_normal((40, K)).astype(np.float32), bits=3)
    residual = residuals_to_device([packed.residual], packed.shape, "cpu")
    selection = make_selection(packed, k_chunk=6, device="cpu")
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(4)).half()
    alone, plain = torch.empty(3, 40), LaunchConfig(n_tb=2, fused=False)
    for row in range(3):
        compensate(x[row : row + 1], selection, residual, Output(alone[row : row + 1]), plain, Workspace("cpu"))
    for seed in range(4):
        copied = torch.full((2 * room_of(selection, 3) * residual.codes.shape[1],), -1, dtype=torch.int32)
        together = torch.full((3, 40), torch.nan)
        config = LaunchConfig(n_tb=2, fused=False, copied=copied)
        with interleaved(seed) as machine:
            compensate(x, selection, residual, Output(together), config, Workspace("cpu"))
        assert torch.equal(together, alone)
        assert (copied != -1).any()
        assert machine.launches > 2
