"""W4A8 on the GPU: products with the bits of the integer reference, and tokens rounded as the CPU rounds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models import per_token
from models.packed import PackedLinear
from models.spec import Activation
from runtime.backends.operations import linear as reference
from runtime.backends.triton.kernels.activations import Tokens, round_tokens
from runtime.backends.triton.kernels.gate import How, gate
from runtime.backends.triton.kernels.norm import RowNorms, add_norm, embed_norm
from runtime.backends.triton.kernels.w4a8 import gemm_w4a8, repack_w4a8
from runtime.backends.triton.sizes import token_width, w4a8_bytes
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError
from tests.runtime.backends.contract.on_triton import placed
from tests.runtime.backends.contract.operands import uneven_activations, whole_matrix

EPS = 1e-5


def empty_tokens(M: int, K: int, group_size: int, device: str) -> Tokens:
    """Room for tokens, filled with what must not stay."""
    width = token_width(K, group_size)
    return Tokens(
        torch.full((M, width), 99, dtype=torch.int8, device=device),
        torch.full((M,), torch.nan, device=device),
        torch.full((M, width // group_size if group_size else 1), 12345, dtype=torch.int32, device=device),
        group_size,
    )


def tokens_of(x: torch.Tensor, group_size: int, device: str) -> Tokens:
    """Rows x float32 [M, K], rounded by the rule."""
    codes, scales = per_token.quantize(x)
    return placed(codes, scales, group_size, device)


def multiplied(packed: PackedLinear, tokens: Tokens, device: str) -> torch.Tensor:
    """The kernel's product, on the CPU."""
    out = torch.full((len(tokens.codes), packed.shape[0]), torch.nan, device=device)
    gemm_w4a8(tokens, repack_w4a8(packed, device), out)
    return out.cpu()


@pytest.mark.parametrize("group_size", [128, 0])
@pytest.mark.parametrize("M", [1, 5])
def test_parts_along_the_channels_have_the_bits_of_the_whole(M: int, group_size: int, device: str) -> None:
    """Five groups in two, three and more parts than groups; counters are back at zero, for a graph to run again."""
    packed, workspace = whole_matrix(70, 600, group_size), Workspace(device)
    tokens, weight = tokens_of(uneven_activations(M, 600), group_size, device), repack_w4a8(packed, device)
    expected = multiplied(packed, tokens, device)
    for split in (1, 2, 3, 7, 2):
        out = torch.full((M, 70), torch.nan, device=device)
        gemm_w4a8(tokens, weight, out, workspace, split)
        assert torch.equal(out.cpu(), expected), split
    assert not workspace.counters(2).any()


@pytest.mark.parametrize("group_size", [64, 128, 0])
def test_bytes_are_what_the_plan_says(group_size: int) -> None:
    found = repack_w4a8(replace(whole_matrix(70, 600, group_size), bias=None), "cpu")
    assert found.nbytes == w4a8_bytes((70, 600), group_size)


@pytest.mark.parametrize("group_size", [32, 96])
def test_groups_that_kernels_do_not_take_are_refused(group_size: int) -> None:
    with pytest.raises(BackendError, match=f"groups of {group_size} channels; of qoq's, the GPU takes 64, 128"):
        repack_w4a8(whole_matrix(8, 192, group_size), "cpu")


def test_operands_of_another_shape_are_refused() -> None:
    weight, tokens = repack_w4a8(whole_matrix(8, 256, 128), "cpu"), empty_tokens(2, 256, 128, "cpu")
    with pytest.raises(BackendError, match=r"\(2, 256\) activations and \(2, 9\) results for 8 by 256 weights"):
        gemm_w4a8(tokens, weight, torch.zeros(2, 9))
    with pytest.raises(BackendError, match="has groups of 128; the activations have sums of 64"):
        gemm_w4a8(empty_tokens(2, 256, 64, "cpu"), weight, torch.zeros(2, 8))


def assert_tokens(found: Tokens, x: torch.Tensor) -> None:
    """Codes, scales and sums of rows x float32 [M, K], to the bit."""
    expected = tokens_of(x, found.group_size, "cpu")
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert torch.equal(found.sums.cpu(), expected.sums)


@pytest.mark.parametrize(("K", "group_size"), [(64, 64), (300, 0), (300, 128), (1000, 64), (1000, 0)])
def test_rows_in_half_precision_are_rounded_as_the_rule_says(K: int, group_size: int, device: str) -> None:
    x = uneven_activations(5, K).half()
    found = empty_tokens(5, K, group_size, device)
    round_tokens(x.to(device), found)
    assert_tokens(found, x.float())


def test_ties_go_to_even(device: str) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5]]).half()
    found = empty_tokens(1, 8, 0, device)
    round_tokens(x.to(device), found)
    assert found.codes[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 64]


def test_what_is_not_finite_makes_a_scale_of_nan_in_its_row_alone(device: str) -> None:
    x = uneven_activations(4, 96).half()
    x[1, 5], x[3, 7] = torch.nan, torch.inf
    found = empty_tokens(4, 96, 128, device)
    round_tokens(x.to(device), found)
    assert found.scales.isnan().tolist() == [False, True, False, True]


@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_norms_round_what_they_would_have_written(rows: list[int] | None, device: str) -> None:
    """Before half precision: codes are those of the float32 norm, but for what float32 sums in another order move."""
    h, y, weight = uneven_activations(4, 200), uneven_activations(4, 200).flip(0), torch.rand(200) + 0.5
    total = h + y if rows is None else (h + y)[rows]
    M, index = len(total), None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)
    found = empty_tokens(M, 200, 128, device)
    x = torch.full((M, 200), torch.nan, dtype=torch.float16, device=device)
    add_norm(h.to(device), y.to(device), None, RowNorms(weight.to(device), EPS), x, index, found)
    exact = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * weight
    assert_near(found, exact)
    assert torch.allclose(x.cpu().float(), exact, rtol=1e-3)


def test_the_first_norm_rounds_too(device: str) -> None:
    rows, weight = torch.randn(2, 96, generator=torch.Generator().manual_seed(3)).half(), torch.ones(96)
    found, x = empty_tokens(2, 96, 64, device), torch.empty(2, 96, dtype=torch.float16, device=device)
    norms = RowNorms(weight.to(device), EPS)
    embed_norm(rows.to(device), torch.empty(2, 96, device=device), norms, x, found)
    rows = rows.float()
    assert_near(found, rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + EPS))


@pytest.mark.parametrize(("width", "kind"), [(96, "silu"), (700, "silu"), (96, "relu2")])
def test_gates_round_what_they_would_have_written(width: int, kind: Activation, device: str) -> None:
    y, dec = (torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    if kind == "relu2":
        y, dec = y[:, :width].contiguous(), dec[:, :width].contiguous()
    found = empty_tokens(3, width, 128, device)
    x = torch.full((3, width), torch.nan, dtype=torch.float16, device=device)
    gate(y.to(device), dec.to(device), x, found, how=How(kind))
    total = y + dec
    exact = torch.nn.functional.silu(total[:, :width]) * total[:, width:] if kind == "silu" else total.relu().square()
    assert_near(found, exact)
    assert torch.allclose(x.cpu().float(), exact, rtol=1e-3, atol=1e-4)


def assert_near(found: Tokens, x: torch.Tensor) -> None:
    """Tokens of rows that were computed in another order: a code may fall to the other side of a tie."""
    expected = tokens_of(x, found.group_size, "cpu")
    assert torch.allclose(found.scales.cpu(), expected.scales, rtol=1e-5)
    apart = (found.codes.cpu().int() - expected.codes.int()).abs()
    assert int(apart.max()) <= 1
    assert float(apart.float().mean()) < 5e-3
    own = found.codes.cpu().int().view(len(x), -1, found.group_size).sum(2)
    assert torch.equal(found.sums.cpu(), own.int())


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [128, 0])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 4096, 4096), (64, 6144, 4096), (300, 4096, 14336)])
def test_a_large_product_has_the_bits_of_the_integer_reference(
    M: int, N: int, K: int, group_size: int, cuda: str
) -> None:
    packed, x = whole_matrix(N, K, group_size), uneven_activations(M, K)
    codes, scales = per_token.quantize(x)
    expected = reference.gemm_w4a8(codes, scales, reference.integer_weights(packed), packed)
    assert torch.equal(multiplied(packed, tokens_of(x, group_size, cuda), cuda), expected)


@pytest.mark.gpu
def test_large_rows_are_rounded_as_the_rule_says(cuda: str) -> None:
    x = uneven_activations(64, 14336).half()
    found = empty_tokens(64, 14336, 128, cuda)
    round_tokens(x.to(cuda), found)
    assert_tokens(found, x.float())
