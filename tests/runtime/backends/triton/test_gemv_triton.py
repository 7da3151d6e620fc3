"""The matrix-vector kernel against a float64 product with the dequantized matrix."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from models.packed import PackedLinear
from models.packing import pack
from runtime.backends.operations import linear as reference
from runtime.backends.triton.codes import Form
from runtime.backends.triton.kernels.gemv import BUSY, LaunchConfig, configure, few_rows, gemv, resident
from runtime.backends.triton.layout import GpuLinear, dequantize, repack, repack_codebook
from runtime.backends.triton.sizes import BLOCK
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError
from tests.close import Tolerance, assert_close

# Codes and activations enter exactly and products are exact in float32; only sums are rounded, about sqrt(K) steps of
# 2^-24 of the largest partial sum. Under the interpreter that is up to 1e-6 of the results' root mean square; tensor
# cores truncate instead of rounding, and sums are some eight times as large before the offset is taken off again.
TOLERANCE = Tolerance(spread=1e-5, why="sums rounded in another order")

CASES = [
    # N, K, bits, group size, split, bias: groups of every kind, ragged N, K within a block, a group and a piece
    (64, 512, 4, 128, 1, False),
    (96, 1100, 3, 128, 3, True),
    (70, 1056, 4, 32, 2, False),
    (48, 640, 3, 64, 2, True),
    (50, 700, 4, 96, 1, True),
    (33, 1024, 3, 256, 2, False),
    (80, 520, 4, 1024, 2, False),
    (1, 40, 3, 32, 1, False),
]


def _id(case: tuple[object, ...]) -> str:
    N, K, bits, group_size, split, bias = case
    return f"N{N}-K{K}-b{bits}-g{group_size}-split{split}{'-bias' if bias else ''}"


def uniform(N: int, K: int, bits: int, group_size: int, bias: bool, device: str, seed: int) -> GpuLinear:
    """A random matrix of uniform groups."""
    rng = np.random.default_rng(seed)
    G = -(-K // group_size)
    packed = PackedLinear(
        name="layers.0.down",
        shape=(N, K),
        bits=bits,
        group_size=group_size,
        codes=pack(rng.integers(0, 1 << bits, (N, K), dtype=np.uint8), bits),
        scales=rng.normal(0, 0.02, (N, G)).astype(np.float16),
        zeros=rng.integers(0, 1 << bits, (N, G), dtype=np.uint8),
        bias=rng.normal(size=N).astype(np.float32) if bias else None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )
    return repack(packed, device)


def codebook(N: int, K: int, bits: int, device: str, seed: int) -> GpuLinear:
    """A random matrix with a codebook an output channel."""
    rng = np.random.default_rng(seed)
    return repack_codebook(
        name="layers.0.o",
        shape=(N, K),
        bits=bits,
        codes=pack(rng.integers(0, 1 << bits, (N, K), dtype=np.uint8), bits),
        codebook=rng.normal(0, 0.02, (N, 1 << bits)).astype(np.float16),
        bias=rng.normal(size=N).astype(np.float32),
        device=device,
    )


def activations(M: int, K: int, device: str, seed: int) -> torch.Tensor:
    """Activations with a mean and a few outliers, as layers see them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=generator) + 0.25
    x[:, :: max(1, K // 3)] *= 30
    return x.to(torch.float16).to(device)


def assert_product(out: torch.Tensor, x: torch.Tensor, weight: GpuLinear) -> None:
    """Compare with float64, relative to the root mean square of all results."""
    expected = x.cpu().double() @ dequantize(weight).double().T
    if weight.bias is not None:
        expected += weight.bias.cpu().double()
    assert_close(out, expected, TOLERANCE)


def _seed(case: object) -> int:
    return zlib.crc32(repr(case).encode())


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_a_token(case, device):
    N, K, bits, group_size, split, bias = case
    weight = uniform(N, K, bits, group_size, bias, device, _seed(case))
    x, out = activations(1, K, device, _seed(case) + 1)[0], torch.full((N,), float("nan"), device=device)
    gemv(x, weight, out, Workspace(device), LaunchConfig(split=split))
    assert_product(out[None], x[None], weight)


@pytest.mark.parametrize("case", [(96, 1100, 3, 2), (50, 512, 4, 1), (64, 640, 4, 2)], ids=str)
def test_a_token_with_codebooks(case, device):
    N, K, bits, split = case
    weight = codebook(N, K, bits, device, _seed(case))
    x, out = activations(1, K, device, _seed(case) + 1)[0], torch.full((N,), float("nan"), device=device)
    gemv(x, weight, out, Workspace(device), LaunchConfig(split=split))
    assert_product(out[None], x[None], weight)


@pytest.mark.parametrize("M", [2, 9])
def test_a_few_rows(M, device):
    weight = uniform(70, 1100, 3 + M % 2, (128, 96)[M % 2], True, device, M)
    x, out = activations(M, 1100, device, M), torch.full((M, 70), float("nan"), device=device)
    few_rows(x, weight, out, Workspace(device), LaunchConfig(split=2))
    assert_product(out, x, weight)


def test_the_uniform_reference_agrees_with_the_layout():
    """The matrix that the tests above compare with is the stored one."""
    rng = np.random.default_rng(5)
    packed = PackedLinear(
        name="w",
        shape=(20, 300),
        bits=3,
        group_size=128,
        codes=pack(rng.integers(0, 8, (20, 300), dtype=np.uint8), 3),
        scales=rng.normal(0, 0.02, (20, 3)).astype(np.float16),
        zeros=rng.integers(0, 8, (20, 3), dtype=np.uint8),
        bias=None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
    )
    assert torch.equal(dequantize(repack(packed, "cpu")), reference.dequantize(packed))


@pytest.mark.parametrize(("block_n", "split"), [(32, 1), (32, 3), (64, 2), (128, 1), (128, 3)])
def test_every_cut_gives_the_same_product(block_n, split, device):
    weight = uniform(70, 1536, 4, 128, False, device, 7)
    x = activations(1, 1536, device, 8)[0]
    out = torch.full((70,), float("nan"), device=device)
    gemv(x, weight, out, Workspace(device), LaunchConfig(block_n=block_n, split=split))
    assert_product(out[None], x[None], weight)


def test_counters_return_to_zero_and_a_second_run_gives_the_same_bits(device):
    weight = uniform(70, 1536, 4, 128, False, device, 9)
    x, workspace = activations(1, 1536, device, 10)[0], Workspace(device)
    outs = [torch.full((70,), float("nan"), device=device) for _ in range(2)]
    for out in outs:
        gemv(x, weight, out, workspace, LaunchConfig(split=3))
        assert not workspace.counters(2).any()
    assert torch.equal(outs[0], outs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (6144, 2560)])
def test_a_captured_graph_replays_with_the_same_bits(N, K, bits, cuda):
    weight, workspace = uniform(N, K, bits, 128, True, cuda, 20), Workspace(cuda)
    x, out = activations(1, K, cuda, 21)[0], torch.full((N,), float("nan"), device=cuda)
    gemv(x, weight, out, workspace)  # compiles, and takes its memory
    assert_product(out[None], x[None], weight)
    first, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemv(x, weight, out, workspace)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
    x.copy_(activations(1, K, cuda, 22)[0])
    graph.replay()
    assert_product(out[None], x[None], weight)


def test_a_nan_is_passed_on_for_selection_to_report(device):
    """The product raises no flag of its own: selection sees the same activations and does."""
    weight = uniform(48, 512, 4, 128, False, device, 11)
    x, out = activations(1, 512, device, 12)[0], torch.zeros(48, device=device)
    x[77] = float("nan")
    gemv(x, weight, out, Workspace(device), LaunchConfig(split=1))
    assert bool(out.isnan().all())


def test_large_activations_stay_finite(device):
    """Offsets of up to 2^(bits+1) times the largest half are far from float32's limit."""
    weight = uniform(48, 512, 4, 128, False, device, 13)
    x, out = torch.full((512,), 65504.0, dtype=torch.float16, device=device), torch.zeros(48, device=device)
    gemv(x, weight, out, Workspace(device), LaunchConfig(split=1))
    assert_product(out[None], x[None], weight)


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (torch.zeros(64), torch.zeros(8), r"x must be contiguous torch\.float16 with rows of 64, not torch\.float32"),
        (torch.zeros(65).half(), torch.zeros(8), r"rows of 64, not torch\.float16 of shape \(1, 65\)"),
        (torch.zeros(64).half(), torch.zeros(9), r"out must be contiguous torch\.float32 with rows of 8"),
        (torch.zeros(128).half()[::2], torch.zeros(8), "x must be contiguous"),
    ],
)
def test_other_operands_are_refused(x, out, message):
    with pytest.raises(BackendError, match=message):
        gemv(x, uniform(8, 64, 4, 32, False, "cpu", 1), out, Workspace("cpu"))


def test_too_many_rows_are_refused():
    with pytest.raises(BackendError, match="17 rows at once; this kernel takes 16"):
        few_rows(
            torch.zeros(17, 64).half(), uniform(8, 64, 4, 32, False, "cpu", 1), torch.zeros(17, 8), Workspace("cpu")
        )


def test_rows_of_results_must_be_those_of_activations():
    with pytest.raises(BackendError, match="2 rows of activations for 3 rows of results"):
        few_rows(torch.zeros(2, 64).half(), uniform(8, 64, 4, 32, False, "cpu", 1), torch.zeros(3, 8), Workspace("cpu"))


@pytest.mark.parametrize("sm_count", [1, 20, 24, 46, 128, 132])
@pytest.mark.parametrize("held", [4, 6])
@pytest.mark.parametrize(
    ("N", "K"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (64, 64)]
)
def test_the_cut_keeps_multiprocessors_busy(N, K, sm_count, held):
    config = configure(N, K, sm_count, held)
    blocks = -(-K // BLOCK)
    programs = -(-N // config.block_n) * config.split
    assert 1 <= config.split <= blocks
    assert programs >= min(min(BUSY, held) * sm_count * 2 // 3, -(-N // config.block_n) * blocks)


@pytest.mark.parametrize("sm_count", [128, 132])
@pytest.mark.parametrize("held", [4, 6])
def test_few_programs_make_no_second_wave(sm_count, held):
    """On a large device. Gate and up gain by one where six programs are held: 29.8 µs instead of 30.8 on an H200."""
    for N, K in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        config = configure(N, K, sm_count, held)
        assert -(-N // config.block_n) * config.split <= held * sm_count or (N, held) == (28672, 6)


@pytest.mark.parametrize(
    ("N", "K", "fastest"),
    [
        (6144, 4096, {3: 8, 4: 8}),
        (4096, 4096, {3: 8, 4: 8}),
        (28672, 4096, {3: 3, 4: 3}),
        (4096, 14336, {3: 10, 4: 10}),
    ],
)
def test_the_cut_of_a_token_is_what_an_h200_showed_to_be_the_fastest(N, K, fastest):
    """Of up to 14 divisions each."""
    forms = {bits: Form(128, bits, CODEBOOK=False, SPAN=128, EVEN_K=True, TAIL=0) for bits in fastest}
    assert {bits: configure(N, K, 132, resident(1, form, 9)).split for bits, form in forms.items()} == fastest


def test_large_matrices_are_not_split():
    assert configure(128256, 4096, 20, 6).split == 1


@pytest.mark.parametrize("wrong", [{"block_n": 48}, {"block_n": 16}, {"split": 0}])
def test_impossible_cuts_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        LaunchConfig(**{"split": 1, **wrong})
