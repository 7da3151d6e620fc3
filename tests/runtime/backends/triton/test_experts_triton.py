"""Products with the matrices of chosen experts against float64 products with each of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.packed import PackedLinear
from models.packing import pack
from runtime.backends.triton import expert_layout
from runtime.backends.triton.expert_layout import GpuExperts, HostRecords, stack
from runtime.backends.triton.kernels.experts import block_of, few, many, sum_up
from runtime.backends.triton.kernels.grouping import Groups, group, most_blocks
from runtime.backends.triton.kernels.sums import piece_sums
from runtime.backends.triton.layout import dequantize, repack
from runtime.backends.triton.residual import ordinary, page_locked
from runtime.backends.triton.sizes import EXPERT_WORDS, linear_bytes, record_sizes
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError
from tests.close import assert_close
from tests.grid import grid
from tests.runtime.backends.triton.test_gemm_triton import ROUNDED
from tests.runtime.backends.triton.test_gemv_triton import TOLERANCE, activations


def packed(N: int, K: int, bits: int, group_size: int, seed: int, *, biased: bool = False) -> PackedLinear:
    """A random matrix of uniform groups, as stored."""
    rng, G = np.random.default_rng(seed), -(-K // group_size)
    return PackedLinear(
        name=f"layers.0.experts.{seed}.down",
        shape=(N, K),
        bits=bits,
        group_size=group_size,
        codes=pack(rng.integers(0, 1 << bits, (N, K), dtype=np.uint8), bits),
        scales=rng.normal(0, 0.02, (N, G)).astype(np.float16),
        zeros=rng.integers(0, 1 << bits, (N, G), dtype=np.uint8),
        bias=rng.normal(0, 1, N).astype(np.float32) if biased else None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )


def experts(
    count: int,
    N: int,
    K: int,
    bits: int,
    group_size: int,
    device: str,
    resident: Collection[int] | None = None,
    *,
    biased: bool = False,
) -> GpuExperts:
    host = HostRecords(ordinary if device == "cpu" else page_locked)
    stored = [packed(N, K, bits, group_size, seed, biased=biased) for seed in range(count)]
    return stack(stored, torch.device(device), repack, resident=resident, host=host)


def choice(M: int, each: int, count: int, device: str) -> torch.Tensor:
    """Experts of rows, int32 [M, each], ascending."""
    generator = torch.Generator().manual_seed(M)
    rows = [torch.randperm(count, generator=generator)[:each].sort().values for _ in range(M)]
    return torch.stack(rows).to(torch.int32).to(device)


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


CASES = [
    # N, K, bits, group size, split: whole blocks, tails, ragged rows and groups
    (64, 512, 4, 128, 1),
    (70, 768, 4, 128, 2),
    (40, 1100, 3, 32, 3),
    (33, 20, 3, 32, 1),
]
BIASED = [(case, biased) for case in CASES for biased in (False, True) if not biased or case[0] in (33, 40)]
"""These and with biases, of one part and of several."""


@pytest.mark.parametrize("summed", [False, True], ids=["each", "summed"])
@pytest.mark.parametrize(("case", "biased"), BIASED, ids=str)
def test_a_few_rows(case: tuple[int, int, int, int, int], biased: bool, summed: bool, device: str) -> None:
    N, K, bits, group_size, split = case
    M, each = 3, 2
    weight, chosen = experts(4, N, K, bits, group_size, device, biased=biased), choice(M, each, 4, device)
    shares = shares_of(chosen) if summed else None
    x = activations(M * each if summed else M, K, device, 1)
    sums, workspace = torch.empty(len(x), -(-K // 32), device=device), Workspace(device)
    piece_sums(x, sums)
    out = torch.full((M if summed else M * each, N), float("nan"), device=device)
    few(x, sums, weight, chosen, out, workspace, shares=shares, split=split)
    wanted = expected(x, weight, chosen, [pair if summed else pair // each for pair in range(M * each)], shares)
    assert_close(out, wanted.view(M, each, N).sum(1) if summed else wanted, TOLERANCE)
    assert not workspace.counters(8).any(), "a captured launch must find its counters as the first one did"


def test_a_row_has_the_same_bits_alone_and_among_others(device: str) -> None:
    """Also where five rows fill the device, and one alone would be divided further."""
    weight, chosen = experts(4, 70, 600, 4, 128, device, biased=True), choice(5, 2, 4, device)
    shares = shares_of(chosen)
    x = activations(10, 600, device, 2)
    sums = torch.empty(10, 19, device=device)
    piece_sums(x, sums)
    together, alone = torch.empty(5, 70, device=device), torch.empty(1, 70, device=device)
    few(x, sums, weight, chosen, together, Workspace(device), shares=shares)
    few(x[6:8], sums[6:8], weight, chosen[3:4], alone, Workspace(device), shares=shares[3:4])
    assert torch.equal(together[3], alone[0])


def test_one_expert_a_row_is_written_without_parts(device: str) -> None:
    weight, chosen = experts(3, 40, 64, 4, 32, device, biased=True), choice(2, 1, 3, device)
    shares = shares_of(chosen)
    x, sums = activations(2, 64, device, 3), torch.empty(2, 2, device=device)
    piece_sums(x, sums)
    out, workspace = torch.full((2, 40), float("nan"), device=device), Workspace(device)
    few(x, sums, weight, chosen, out, workspace, shares=shares, split=1)
    assert_close(out, expected(x, weight, chosen, [0, 1], shares), TOLERANCE)
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
    weight = experts(count, N, K, bits, group_size, device, biased=biased)
    chosen = choice(M, each, count - 1, device)
    shares = None if each_reads else shares_of(chosen)
    pairs = M * each
    most = most_blocks(pairs, count, block_m)
    groups = Groups(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((pairs,), (3, most))))
    group(chosen, count, groups, block_m)
    x = activations(M if each_reads else pairs, K, device, 4)
    out = torch.full((pairs, N), float("nan"), device=device)
    many(x, weight, groups, out, each=each if each_reads else 1, block_m=block_m, shares=shares)
    wanted = expected(x, weight, chosen, [pair // each if each_reads else pair for pair in range(pairs)], shares)
    errors = out.cpu().double() - wanted
    assert float(errors.square().mean().sqrt()) < ROUNDED * float(wanted.square().mean().sqrt())
    summed = torch.full((M, N), float("nan"), device=device)
    sum_up(out, summed)
    assert_close(summed, out.view(M, each, N).double().sum(1), TOLERANCE)


def test_blocks_are_large_where_experts_have_many_pairs() -> None:
    assert block_of(512 * 8, 128) == 32
    assert block_of(512 * 2, 8) == 64


@pytest.mark.parametrize("resident", [None, (0, 2), ()], ids=str)
def test_a_stack_holds_every_expert_s_matrix(resident: tuple[int, ...] | None) -> None:
    """Records begin at whole lines, and sizes are those of the plan."""
    weight = experts(3, 7, 96, 3, 32, "cpu", resident)
    for number, record in enumerate(weight.records):
        assert torch.equal(dequantize(weight.of(number)), dequantize(repack(packed(7, 96, 3, 32, number), "cpu")))
        assert record.data_ptr() % 128 == 0
    sizes, exact = record_sizes((7, 96), 3, 32), linear_bytes((7, 96), 3, 32, bias=False)
    assert exact <= sizes.nbytes < exact + 2 * 4 * EXPERT_WORDS
    here = 3 if resident is None else len(resident)
    assert (weight.nbytes, weight.host_bytes) == (here * sizes.nbytes + 3 * 8, (3 - here) * sizes.nbytes)


@pytest.mark.parametrize("rows", grid(["few", "many"], {"many"}))
def test_products_have_the_same_bits_wherever_experts_are(rows: str, device: str) -> None:
    """Experts on the device, in main memory, and after some of them have exchanged their places, twice."""
    count, N, K, M, each = 5, 70, 768, 9, 2
    chosen, x = choice(M, each, count, device), activations(M, K, device, 5)
    pairs, sums = M * each, torch.empty(M, K // 32, device=device)
    piece_sums(x, sums)
    most = most_blocks(pairs, count, 32)
    groups = Groups(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((pairs,), (3, most))))
    group(chosen, count, groups, 32)

    def product(weight: GpuExperts) -> torch.Tensor:
        out = torch.full((pairs, N), float("nan"), device=device)
        if rows == "few":
            few(x, sums, weight, chosen, out, Workspace(device))
        else:
            many(x, weight, groups, out, each=each, block_m=32)
        return out

    wanted = product(experts(count, N, K, 4, 128, device, biased=True))
    assert torch.isfinite(wanted).all()
    for resident in ((1, 3), (0,), ()):
        assert torch.equal(product(experts(count, N, K, 4, 128, device, resident, biased=True)), wanted)
    weight = experts(count, N, K, 4, 128, device, (1, 3), biased=True)
    for leaving, coming, kept in ((3, 0, [0, 1]), (1, 4, [0, 4]), (0, 3, [3, 4])):
        before = (weight.nbytes, weight.host_bytes)
        weight.exchange(leaving, coming)
        assert [expert for expert in range(count) if weight.resident[expert]] == kept
        assert (weight.nbytes, weight.host_bytes) == before
        assert torch.equal(product(weight), wanted)
        assert torch.equal(
            dequantize(weight.of(coming)), dequantize(repack(packed(N, K, 4, 128, coming, biased=True), device))
        )


def test_records_of_all_blocks_share_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of powers of two, which torch would round up to; what is left of a slab serves smaller records."""
    monkeypatch.setattr(expert_layout, "SLAB_BYTES", 4096)
    asked: list[int] = []
    host = HostRecords(lambda nbytes: (asked.append(nbytes), ordinary(nbytes))[1])
    taken = [host.take(words) for words in (320, 320, 640, 320, 2048, 96)]
    assert asked == [4096, 4096, 16384]
    for record in taken:
        assert record.data_ptr() % 128 == 0
    spans = sorted((record.data_ptr(), record.data_ptr() + record.nbytes) for record in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_stack_holds_every_expert_s_bias() -> None:
    weight = experts(3, 7, 96, 3, 32, "cpu", biased=True)
    for number in range(3):
        own, stored = weight.of(number), packed(7, 96, 3, 32, number, biased=True)
        assert own.bias is not None
        assert stored.bias is not None
        assert own.bias.tolist() == stored.bias.tolist()
        assert torch.equal(dequantize(own), dequantize(repack(stored, "cpu")))
    assert weight.nbytes == experts(3, 7, 96, 3, 32, "cpu").nbytes + 3 * 7 * 4


def test_experts_that_differ_or_have_what_kernels_do_not_know_are_refused() -> None:
    one = packed(8, 64, 4, 32, 0)
    for other, message in (
        (packed(8, 64, 3, 32, 1), "differ in shape, bits, groups or having a bias"),
        (packed(8, 64, 4, 64, 1), "differ in shape, bits, groups or having a bias"),
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
