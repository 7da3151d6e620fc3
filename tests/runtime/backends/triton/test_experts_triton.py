"""Experts: their products against float64 ones, their records in both memories, and which of them are on the device."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.routing import route
from models.spec import MixtureSpec
from runtime.backends.experts import hottest
from runtime.backends.triton import experts as placing
from runtime.backends.triton.experts import GpuExperts, HostRecords, stack
from runtime.backends.triton.kernels.activations import piece_sums
from runtime.backends.triton.kernels.experts import block_of, few, many, sum_up
from runtime.backends.triton.layout import repack
from runtime.backends.triton.placement import Placement
from runtime.backends.triton.residual import ordinary
from runtime.backends.triton.sizes import EXPERT_WORDS, linear_bytes, record_sizes
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError
from tests.close import assert_close
from tests.grid import grid
from tests.runtime.backends.triton.operands import (
    EXACT,
    activations,
    choice,
    dequantize,
    experts,
    grouped,
    packed_matrix,
    poisoned,
    uniform,
)
from tests.runtime.backends.triton.test_gemm_triton import ROUNDED


def shares_of(chosen: torch.Tensor) -> torch.Tensor:
    """Shares of rows' experts, float32 [M, each]."""
    return torch.rand(chosen.shape, generator=torch.Generator().manual_seed(7)).to(chosen.device)


def expected(
    x: torch.Tensor, weight: GpuExperts, chosen: torch.Tensor, rows: list[int], shares: torch.Tensor | None = None
) -> torch.Tensor:
    """Each pair's product, plus its expert's bias times its share, float64 [P, N]; `rows` are those of x it reads."""
    found = []
    for pair, (row, expert) in enumerate(zip(rows, chosen.flatten().tolist(), strict=True)):
        own = weight.of(int(expert))
        found.append(x[row].cpu().double() @ dequantize(own).double().T)
        if own.bias is not None:
            found[-1] += own.bias.cpu().double() * (1.0 if shares is None else float(shares.flatten()[pair]))
    return torch.stack(found)


def summed(x: torch.Tensor) -> torch.Tensor:
    """Sums of pieces, as kernels write them."""
    sums = torch.empty(len(x), -(-x.shape[1] // 32), device=x.device)
    piece_sums(x, sums)
    return sums


CASES = [
    # N, K, bits, group size, split: whole blocks, tails, ragged rows and groups
    (64, 512, 4, 128, 1),
    (70, 768, 4, 128, 2),
    (40, 1100, 3, 32, 3),
    (33, 20, 3, 32, 1),
]
BIASED = [(case, biased) for case in CASES for biased in (False, True) if not biased or case[0] in (33, 40)]
"""These and with biases, of one part and of several."""


@pytest.mark.parametrize("added", [False, True], ids=["each", "added"])
@pytest.mark.parametrize(("case", "biased"), BIASED, ids=str)
def test_a_few_rows(case: tuple[int, int, int, int, int], biased: bool, added: bool, device: str) -> None:
    N, K, bits, group_size, split = case
    M, each = 3, 2
    weight, chosen = experts(4, N, K, bits, group_size, device, bias=biased), choice(M, each, 4, device)
    shares = shares_of(chosen) if added else None
    x, workspace = activations(M * each if added else M, K, device, 1), Workspace(device)
    out = poisoned(M if added else M * each, N, device=device)
    few(x, summed(x), weight, chosen, out, workspace, shares=shares, split=split)
    wanted = expected(x, weight, chosen, [pair if added else pair // each for pair in range(M * each)], shares)
    assert_close(out, wanted.view(M, each, N).sum(1) if added else wanted, EXACT)
    assert not workspace.counters(8).any(), "a captured launch must find its counters as the first one did"


def test_a_row_has_the_same_bits_alone_and_among_others(device: str) -> None:
    """Also where five rows fill the device, and one alone would be divided further."""
    weight, chosen = experts(4, 70, 600, 4, 128, device, bias=True), choice(5, 2, 4, device)
    shares, x = shares_of(chosen), activations(10, 600, device, 2)
    together, alone = torch.empty(5, 70, device=device), torch.empty(1, 70, device=device)
    few(x, summed(x), weight, chosen, together, Workspace(device), shares=shares)
    few(x[6:8], summed(x[6:8]), weight, chosen[3:4], alone, Workspace(device), shares=shares[3:4])
    assert torch.equal(together[3], alone[0])


def test_one_expert_a_row_is_written_without_parts(device: str) -> None:
    weight, chosen = experts(3, 40, 64, 4, 32, device, bias=True), choice(2, 1, 3, device)
    shares, x, workspace = shares_of(chosen), activations(2, 64, device, 3), Workspace(device)
    out = poisoned(2, 40, device=device)
    few(x, summed(x), weight, chosen, out, workspace, shares=shares, split=1)
    assert_close(out, expected(x, weight, chosen, [0, 1], shares), EXACT)
    assert not workspace.nbytes


@pytest.mark.parametrize("each_reads", [False, True], ids=["a-row-each", "a-row-for-all"])
@pytest.mark.parametrize(
    ("case", "block_m", "biased"),
    [(CASES[0], 32, False), (CASES[1], 64, False), (CASES[2], 32, False), (CASES[3], 32, True)],
    ids=str,
)
def test_a_prompt_s_rows(
    case: tuple[int, int, int, int, int], block_m: int, biased: bool, each_reads: bool, device: str
) -> None:
    """Blocks that are full and not, and an expert that no row goes to; `down` reads a row each, and has shares."""
    N, K, bits, group_size, _ = case
    M, each, count = 40, 2, 4
    weight = experts(count, N, K, bits, group_size, device, bias=biased)
    chosen = choice(M, each, count - 1, device)
    shares = None if each_reads else shares_of(chosen)
    pairs = M * each
    groups = grouped(chosen, count, block_m)
    x = activations(M if each_reads else pairs, K, device, 4)
    out = poisoned(pairs, N, device=device)
    many(x, weight, groups, out, each=each if each_reads else 1, block_m=block_m, shares=shares)
    wanted = expected(x, weight, chosen, [pair // each if each_reads else pair for pair in range(pairs)], shares)
    errors = out.cpu().double() - wanted
    assert float(errors.square().mean().sqrt()) < ROUNDED * float(wanted.square().mean().sqrt())
    added = poisoned(M, N, device=device)
    sum_up(out, added)
    assert_close(added, out.view(M, each, N).double().sum(1), EXACT)


def test_blocks_are_large_where_experts_have_many_pairs() -> None:
    assert block_of(512 * 8, 128) == 32
    assert block_of(512 * 2, 8) == 64


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("resident", [None, (0, 2), ()], ids=str)
def test_a_stack_holds_every_expert_s_matrix(resident: tuple[int, ...] | None, bias: bool) -> None:
    """Records begin at whole lines, and sizes are those of the plan; biases are always on the device."""
    weight = experts(3, 7, 96, 3, 32, "cpu", resident, bias=bias)
    for number, record in enumerate(weight.records.values()):
        own, stored = weight.of(number), uniform(7, 96, 3, 32, "cpu", number, bias=bias)
        assert torch.equal(dequantize(own), dequantize(stored))
        assert (own.bias is None and stored.bias is None) or torch.equal(own.bias, stored.bias)
        assert record.data_ptr() % 128 == 0
    sizes, exact = record_sizes((7, 96), 3, 32), linear_bytes((7, 96), 3, 32, bias=False)
    assert exact <= sizes.nbytes < exact + 2 * 4 * EXPERT_WORDS
    here = 3 if resident is None else len(resident)
    assert weight.nbytes == here * sizes.nbytes + 3 * 8 + (3 * 7 * 4 if bias else 0)
    assert weight.host_bytes == (3 - here) * sizes.nbytes


@pytest.mark.parametrize("rows", grid(["few", "many"], {"many"}))
def test_products_have_the_same_bits_wherever_experts_are(rows: str, device: str) -> None:
    """Experts on the device, in main memory, and after some of them have exchanged their places, twice."""
    count, N, K, M, each = 5, 33, 520, 9, 2
    chosen, x = choice(M, each, count, device), activations(M, K, device, 5)
    pairs, sums = M * each, summed(x)
    groups = grouped(chosen, count, 32)

    def product(weight: GpuExperts) -> torch.Tensor:
        out = poisoned(pairs, N, device=device)
        if rows == "few":
            few(x, sums, weight, chosen, out, Workspace(device))
        else:
            many(x, weight, groups, out, each=each, block_m=32)
        return out

    wanted = product(experts(count, N, K, 4, 128, device, bias=True))
    assert torch.isfinite(wanted).all()
    for resident in ((1, 3), (0,), ()):
        assert torch.equal(product(experts(count, N, K, 4, 128, device, resident, bias=True)), wanted)
    weight, down = (experts(count, *shape, device, (1, 3), bias=True) for shape in ((N, K, 4, 128), (40, 64, 3, 32)))
    mixture = MixtureSpec(experts=count, chosen=each, width=1, normalized=True)
    placed, here = Placement({7: [weight, down]}, mixture, torch.device(device)), weight.places[[1, 3]].tolist()
    for come, kept in (([0], [0, 3]), ([2, 4], [2, 4]), ([2, 1], [1, 2]), ([0, 3, 4], [0, 3]), ([0, 1, 2], [0, 1])):
        before = (weight.nbytes, weight.host_bytes)
        placed.admit(7, torch.tensor([come], dtype=torch.int32, device=device))
        assert (weight.nbytes, weight.host_bytes) == before
        assert [expert for expert in range(count) if weight.places[expert] in here] == kept
        assert torch.equal(product(weight), wanted)
        for expert in range(count):
            assert torch.equal(dequantize(weight.of(expert)), dequantize(uniform(N, K, 4, 128, device, expert)))
            assert torch.equal(dequantize(down.of(expert)), dequantize(uniform(40, 64, 3, 32, device, expert)))


def test_records_of_all_blocks_share_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of powers of two, which torch would round up to; what is left of a slab serves smaller records."""
    monkeypatch.setattr(placing, "SLAB_BYTES", 4096)
    asked: list[int] = []
    host = HostRecords(lambda nbytes: (asked.append(nbytes), ordinary(nbytes))[1])
    taken = [host.take(words) for words in (320, 320, 640, 320, 2048, 96)]
    assert asked == [4096, 4096, 16384]
    for record in taken:
        assert record.data_ptr() % 128 == 0
    spans = sorted((record.data_ptr(), record.data_ptr() + record.nbytes) for record in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_experts_that_differ_or_have_what_kernels_do_not_know_are_refused() -> None:
    one = packed_matrix(8, 64, 4, 32, 0)
    for other, message in (
        (packed_matrix(8, 64, 3, 32, 1), "differ in shape, bits, groups or having a bias"),
        (packed_matrix(8, 64, 4, 64, 1), "differ in shape, bits, groups or having a bias"),
        (replace(one, bias=np.zeros(8, np.float32)), "differ in shape, bits, groups or having a bias"),
        (replace(one, per_token=True), "uniform codes"),
    ):
        with pytest.raises(BackendError, match=message):
            stack([other, one], torch.device("cpu"), repack)


def test_other_operands_are_refused() -> None:
    weight, chosen = experts(2, 8, 64, 4, 32, "cpu"), torch.zeros(1, 2, dtype=torch.int32)
    sums, shares = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(BackendError, match=r"out must be contiguous torch\.float32 \[2, 8\], not .* \[1, 8\]"):
        few(torch.zeros(1, 64).half(), sums, weight, chosen, torch.zeros(1, 8), Workspace("cpu"))
    with pytest.raises(BackendError, match=r"x must be contiguous torch\.float16 \[2, 64\]"):
        few(torch.zeros(1, 64).half(), sums, weight, chosen, torch.zeros(1, 8), Workspace("cpu"), shares=shares)


def test_what_was_used_longest_ago_leaves(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices of a toy mixture whose stream drifts, a token and three at a time, beside a list in their order."""
    monkeypatch.setattr("runtime.backends.triton.placement.WINDOW", 240)
    mixture, most, rows = MixtureSpec(experts=24, chosen=3, width=1, normalized=True, shared=1, gated=False), 9, 3
    generator = torch.Generator().manual_seed(2)
    router, stream, chosen = torch.randn(24, 16, generator=generator), torch.zeros(16), []
    for _ in range(240):
        stream = 0.9 * stream + torch.randn(16, generator=generator)
        chosen.append(route((router @ stream)[None], mixture)[0][0])
    text, resident = torch.stack(chosen).int(), [*range(most - 1), 24]
    weight, down = (experts(25, 4, 32, 4, 32, device, resident) for _ in range(2))
    placed, here = Placement({0: [weight, down]}, mixture, torch.device(device)), weight.places[resident].tolist()
    order, hits, steps = OrderedDict.fromkeys(resident), 0, [*text[:120].split(1), *text[120:].split(rows)]
    for step in steps:
        used = sorted(set(step.flatten().tolist()))
        hits += sum(expert in order for expert in step[:, :3].flatten().tolist())
        for expert in used:
            if expert not in order and (leaving := next((one for one in order if one not in used), None)) is not None:
                del order[leaving]
                order[expert] = None
        for expert in filter(order.__contains__, used):  # those used at once leave by their numbers
            order.move_to_end(expert)
        placed.admit(0, step.to(device))
        placed.after(len(step))
        assert {expert for expert in range(25) if weight.places[expert] in here} == set(order)
    assert placed.report.hit_rate == hits / 720
    counts = np.bincount(text[:120].flatten().numpy(), minlength=25).astype(np.int32)
    fixed = np.isin(text[120:, :3].numpy(), hottest(counts, most, mixture)).mean()
    assert hits / 720 > 1.5 * fixed, "a list of what the first half read most"
