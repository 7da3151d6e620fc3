"""Pages more than 2^31 numbers after the first one: offsets in the cache have 64 bits.

The pools are memory that is asked for and hardly touched, so that no machine has to have it: keys and values share one,
the values one page further on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.backends.operations import layers as reference
from runtime.backends.triton.kernels.attention import attend
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.kernels.rope import Basis, HeadNorms, Rope, heads
from runtime.backends.triton.workspace import Workspace
from runtime.kv.kinds import KINDS, record_bytes
from tests.close import assert_close
from tests.runtime.backends.triton.operands import pages_of

D, KIND = 32, KINDS["fp16"]
PAGES = 3
"""Pages of the sequence."""


class Far:
    """A pool of 2^31 halves and a little more, whose last pages, from back to front, are those of a sequence."""

    def __init__(self, device: str) -> None:
        record = record_bytes(KIND, "keys", D)
        count = (1 << 32) // record + 2 * PAGES + 2
        if device == "cuda" and torch.cuda.mem_get_info()[0] < (count * record) + (1 << 30):
            pytest.skip("needs 5.3 GB of free memory on the card")
        self.pool = torch.empty(count, 1, record, dtype=torch.uint8, device=device)
        self.order = [count - 2 - 2 * i for i in range(PAGES)]
        tables = torch.tensor([self.order], dtype=torch.int32, device=device)
        self.pages = pages_of({"keys": self.pool[:-1], "values": self.pool[1:]}, tables, 1, D)

    def halves(self, part: Any) -> torch.Tensor:
        """The sequence's numbers, float16 [PAGES, tokens of a page, D]: a view of each page."""
        shift = 1 if part == "values" else 0
        return torch.stack([self.pool[page + shift].view(torch.float16).view(KIND.page, D) for page in self.order])

    def write(self, part: Any, numbers: torch.Tensor) -> None:
        """Fill the sequence's pages with float16 [PAGES, tokens of a page, D]."""
        for page, values in zip(self.order, numbers, strict=True):
            self.pool[page + (1 if part == "values" else 0)].view(torch.float16).view(KIND.page, D).copy_(values)


@pytest.fixture(scope="module")
def far(device: str) -> Far:
    return Far(device)


def test_attention_reads_them(far: Far, device: str) -> None:
    generator, T = torch.Generator().manual_seed(0), PAGES * KIND.page
    k, v = (torch.randn(PAGES, KIND.page, D, generator=generator).half() for _ in range(2))
    far.write("keys", k.to(device))
    far.write("values", v.to(device))
    q = torch.randn(1, 2 * D, generator=generator).half()
    rows = Rows(*(torch.tensor([n], dtype=torch.int32, device=device) for n in (T - 1, 0)))
    x = torch.full_like(q, torch.nan).to(device)
    attend(q.to(device), far.pages, rows, None, x, Workspace(device), context=T)
    past = [one.reshape(T, 1, D).float() for one in (k, v)]
    expected = reference.attend(q.view(1, 2, D).float(), *past, torch.tensor([T - 1]), None)
    assert_close(x.cpu().float().view(1, 2, D), expected, "half attention")


def test_tokens_are_appended_to_them(far: Far, device: str) -> None:
    T = PAGES * KIND.page
    y = torch.randn(1, 3 * D, generator=torch.Generator().manual_seed(1)).to(device)
    cos, sin = torch.ones(T, D // 2, device=device), torch.zeros(T, D // 2, device=device)
    rows = Rows(*(torch.tensor([n], dtype=torch.int32, device=device) for n in (T - 1, 0)))
    q = torch.zeros(1, D, dtype=torch.float16, device=device)
    heads(y, None, HeadNorms(None, None, 1e-6), Rope(cos, sin), Basis(None, None), rows, far.pages, q)
    for part, at in (("keys", D), ("values", 2 * D)):
        assert torch.equal(far.halves(part)[-1, -1], y[0, at : at + D].half())
