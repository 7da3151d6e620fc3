"""The beginning of a step and its norms on the GPU: embeddings, the residual sum, and the normalization.

Tolerances: embeddings and the residual stream, a float32 sum in the reference's order, are equal to the last bit. x is
rounded to half precision (2^-11 of the number, 4.9e-4), and its float32 scale comes from sums in another order (1e-6).
"""

from __future__ import annotations

import pytest
import torch

from runtime.backends.operations.layers import rms_norm
from runtime.backends.triton.kernels.norm import Beside, RowNorms, add_norm, embed_norm
from tests.close import assert_close
from tests.runtime.backends.triton.operands import assert_left, left_of, poisoned

EPS = 1e-5


class _Case:
    """Operands on the CPU, and one call of the kernel."""

    def __init__(self, M: int, C: int, y: bool, dec: bool) -> None:
        generator = torch.Generator().manual_seed(C + M)
        self.h = torch.randn(M, C, generator=generator)
        self.y = torch.randn(M, C, generator=generator) if y else None
        self.dec = torch.randn(M, C, generator=generator) if dec else None
        self.weight = torch.rand(C, generator=generator) + 0.5
        total = torch.zeros_like(self.h) if self.y is None else self.y
        self.sum = self.h + (total if self.dec is None else total + self.dec)

    def run(
        self,
        device: str,
        rows: list[int] | None = None,
        norms: RowNorms | None = None,
        *,
        rotated: bool = False,
        apart: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h and x after the call, on the CPU."""
        C = self.h.shape[1]
        h, y, dec = (
            None if one is None else one.to(device).repeat(1, apart)[:, :C] for one in (self.h, self.y, self.dec)
        )
        assert h is not None
        count = h.shape[0] if rows is None else len(rows)
        x = poisoned(count, h.shape[1], dtype=torch.float16, device=device)
        gathered = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)
        left = left_of(count, h.shape[1], device, rotated=rotated)
        add_norm(h, y, dec, norms or RowNorms(self.weight.to(device), EPS), x, gathered, left)
        assert_left(left, x)
        return h.cpu(), x.cpu().float()


@pytest.mark.parametrize(("rows", "apart"), [(None, 1), (None, 2), ([0, 2, 4], 1)], ids=["all", "apart", "gathered"])
def test_sums_are_normalized_and_stay_unless_rows_are_gathered(device: str, rows: list[int] | None, apart: int) -> None:
    """Of rows of a wider matrix, too."""
    case = _Case(5, 896, True, True)
    h, x = case.run(device, rows, rotated=rows is not None, apart=apart)
    assert torch.equal(h, case.h if rows else case.sum)
    assert_close(x, rms_norm(case.sum, case.weight, EPS)[rows or slice(None)], "half")


@pytest.mark.parametrize("before", [False, True], ids=["behind", "both"])
def test_what_is_added_may_pass_a_norm_of_its_own(device: str, before: bool) -> None:
    case, added, eps = _Case(3, 100, True, True), torch.linspace(0.5, 2, 100), 0.1
    norms = RowNorms(case.weight.to(device) if before else None, EPS, added.to(device), eps)
    h, x = case.run(device, None, norms)
    expected = case.h + rms_norm(case.sum - case.h, added, eps)
    assert_close(h, expected, "model")
    assert_close(x, rms_norm(expected, case.weight, EPS) if before else expected, "half")


@pytest.mark.parametrize("dec", [(False, False), (True, False), (False, True)], ids=["y", "first", "second"])
def test_two_outputs_pass_norms_before_their_sum_does(device: str, dec: tuple[bool, bool]) -> None:
    """Either may have a compensation. Then the stream is multiplied."""
    case, other = _Case(3, 100, True, dec[0]), _Case(4, 100, True, dec[1])
    weights, eps, scale = torch.rand(3, 100, generator=torch.Generator().manual_seed(1)) + 0.5, 0.1, torch.tensor([0.7])
    assert other.y is not None
    second = (other.y[:3], None if other.dec is None else other.dec[:3])
    there = [None if one is None else one.to(device) for one in second]
    own, whole, both = weights.to(device)
    norms = RowNorms(case.weight.to(device), EPS, both, eps, Beside(*there, own, whole), scale.to(device))
    h, x = case.run(device, None, norms)
    beside = rms_norm(second[0] if second[1] is None else second[0] + second[1], weights[0], eps)
    added = rms_norm(rms_norm(case.sum - case.h, weights[1], eps) + beside, weights[2], eps)
    expected = (case.h + added) * scale
    assert_close(h, expected, "model")
    assert_close(x, rms_norm(h, case.weight, EPS), "half")


@pytest.mark.parametrize("dec", [False, True], ids=["plain", "compensated"])
def test_two_outputs_are_added_as_they_are(device: str, dec: bool) -> None:
    case, other = _Case(3, 100, True, not dec), _Case(3, 104, True, dec)
    assert other.y is not None
    second = [None if one is None else one[:, :100].contiguous() for one in (other.y, other.dec)]
    there = Beside(*(None if one is None else one.to(device) for one in second), None, None)
    h, x = case.run(device, None, RowNorms(case.weight.to(device), EPS, beside=there))
    expected = case.sum + sum(one for one in second if one is not None)
    assert_close(h, expected, "model")
    assert_close(x, rms_norm(h, case.weight, EPS), "half")


@pytest.mark.parametrize(("M", "C"), [(1, 8), (2, 100), (9, 1024), (9, 1048)])
def test_the_stream_begins_with_embeddings(device: str, M: int, C: int) -> None:
    generator = torch.Generator().manual_seed(C)
    rows = torch.randn(M, C, generator=generator).half()
    weight = (torch.rand(C, generator=generator) + 0.5).to(device)
    h = torch.full((M, C), torch.nan, device=device)
    x, sums = torch.full_like(h, torch.nan, dtype=torch.float16), torch.full((M, -(-C // 32)), torch.nan, device=device)
    norms = RowNorms(weight, EPS)
    embed_norm(rows.to(device), h, norms, x, sums)
    assert torch.equal(h.cpu(), rows.float())
    wanted, wanted_sums = torch.empty_like(x), torch.empty_like(sums)
    add_norm(h, None, None, norms, wanted, None, wanted_sums)
    assert torch.equal(x, wanted)
    assert torch.equal(sums, wanted_sums)
