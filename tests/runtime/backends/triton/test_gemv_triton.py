"""The matrix-vector kernel against a float64 product with the dequantized matrix."""

from __future__ import annotations

import pytest
import torch

from runtime.backends.triton.kernels.codes import Form
from runtime.backends.triton.kernels.gemv import BUSY, LaunchConfig, configure, few_rows, resident
from runtime.backends.triton.sizes import BLOCK
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError
from tests.close import assert_close
from tests.runtime.backends.triton.operands import EXACT, activations, codebook, poisoned, product, uniform

CASES = [
    # M, N, K, bits, group size (0: codebooks), split, block_n, bias: groups of every kind, ragged N, K within a block,
    # a group and a piece; and every cut
    (1, 96, 1100, 3, 128, 3, 64, True),
    (1, 70, 1056, 4, 32, 2, 64, False),
    (1, 48, 640, 3, 64, 2, 64, True),
    (1, 50, 700, 4, 96, 2, 64, True),
    (1, 33, 1024, 3, 256, 2, 64, False),
    (1, 80, 520, 4, 1024, 2, 64, False),
    (1, 1, 40, 3, 32, 1, 64, False),
    (1, 96, 1100, 3, 0, 2, 64, True),
    (1, 64, 640, 4, 0, 2, 64, True),
    (2, 70, 1100, 3, 128, 2, 64, True),
    (9, 70, 1100, 4, 96, 2, 64, True),
    *((1, 70, 1536, 4, 128, split, block_n, False) for block_n, split in ((32, 1), (32, 3), (128, 1), (128, 3))),
]


@pytest.mark.parametrize(("M", "N", "K", "bits", "group_size", "split", "block_n", "bias"), CASES)
def test_products_are_the_exact_ones(M, N, K, bits, group_size, split, block_n, bias, device):
    if group_size:
        weight = uniform(N, K, bits, group_size, device, N + K, bias=bias)
    else:
        weight = codebook(N, K, bits, device, N + K)
    x, out = activations(M, K, device, M + K), poisoned(M, N, device=device)
    few_rows(x, weight, out, Workspace(device), LaunchConfig(block_n=block_n, split=split))
    assert_close(out, product(x, weight), EXACT)


def test_counters_return_to_zero_and_a_second_run_gives_the_same_bits(device):
    weight = uniform(70, 1536, 4, 128, device, 9)
    x, workspace = activations(1, 1536, device, 10), Workspace(device)
    outs = [poisoned(1, 70, device=device) for _ in range(2)]
    for out in outs:
        few_rows(x, weight, out, workspace, LaunchConfig(split=3))
        assert not workspace.counters(2).any()
    assert torch.equal(outs[0], outs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (6144, 2560)])
def test_a_captured_graph_replays_with_the_same_bits(N, K, bits, cuda):
    weight, workspace = uniform(N, K, bits, 128, cuda, 20, bias=True), Workspace(cuda)
    x, out = activations(1, K, cuda, 21), poisoned(1, N, device=cuda)
    few_rows(x, weight, out, workspace)  # compiles, and takes its memory
    assert_close(out, product(x, weight), EXACT)
    first, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        few_rows(x, weight, out, workspace)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
    x.copy_(activations(1, K, cuda, 22))
    graph.replay()
    assert_close(out, product(x, weight), EXACT)


def test_a_nan_is_passed_on_and_large_activations_stay_finite(device):
    """The product raises no flag of its own: selection sees the same activations and does. Offsets of up to 2^(bits+1)
    times the largest half are far from float32's limit."""
    weight, out = uniform(48, 512, 4, 128, device, 11), torch.zeros(1, 48, device=device)
    x = torch.full((1, 512), 65504.0, dtype=torch.float16, device=device)
    few_rows(x, weight, out, Workspace(device), LaunchConfig(split=1))
    assert_close(out, product(x, weight), EXACT)
    x[0, 77] = float("nan")
    few_rows(x, weight, out, Workspace(device), LaunchConfig(split=1))
    assert bool(out.isnan().all())


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (torch.zeros(1, 64), torch.zeros(1, 8), r"x must be contiguous torch\.float16 with rows of 64, not .*32"),
        (torch.zeros(1, 65).half(), torch.zeros(1, 8), r"rows of 64, not torch\.float16 of shape \(1, 65\)"),
        (torch.zeros(1, 64).half(), torch.zeros(1, 9), r"out must be contiguous torch\.float32 with rows of 8"),
        (torch.zeros(1, 128).half()[:, ::2], torch.zeros(1, 8), "x must be contiguous"),
        (torch.zeros(17, 64).half(), torch.zeros(17, 8), "17 rows at once; this kernel takes 16"),
        (torch.zeros(2, 64).half(), torch.zeros(3, 8), "2 rows of activations for 3 rows of results"),
    ],
)
def test_other_operands_are_refused(x, out, message):
    with pytest.raises(BackendError, match=message):
        few_rows(x, uniform(8, 64, 4, 32, "cpu", 1), out, Workspace("cpu"))


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
    assert configure(128256, 4096, 20, held).split == 1, "large matrices are not split"


def test_the_cut_of_a_token_is_what_an_h200_showed_to_be_the_fastest():
    """Of up to 14 divisions each."""
    for bits in (3, 4):
        form = Form(128, bits, KIND="uniform", SPAN=128, EVEN_K=True, TAIL=0)
        for N, K, fastest in ((6144, 4096, 8), (4096, 4096, 8), (28672, 4096, 3), (4096, 14336, 10)):
            assert configure(N, K, 132, resident(1, form, 9)).split == fastest


@pytest.mark.parametrize("wrong", [{"block_n": 48}, {"block_n": 16}, {"split": 0}])
def test_impossible_cuts_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        LaunchConfig(**{"split": 1, **wrong})
