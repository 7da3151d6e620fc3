"""Heads on the GPU: split, normalization, rotation, append to the cache.

Tolerance: what is stored is rounded to half precision (2^-11 of the number, 4.9e-4); a rotated number is a difference
of products, so its float32 error (1e-6 of the products) shows where the two cancel.
"""

from __future__ import annotations

import pytest
import torch

from models.rope import tables
from models.spec import RopeSpec
from runtime.backends.operations.layers import rms_norm, rotate
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.kernels.rope import Basis, HeadNorms, Rope, heads
from tests.close import assert_close
from tests.runtime.backends.triton.operands import HalfPages

EPS, VALUE_EPS, CAPACITY = 1e-6, 0.1, 9


Shape = tuple[int, int, int, int]
"""H, H_kv, D, and channels that rotate."""


class _Case:
    """Operands on the CPU, what the kernel should leave behind, and one call of it."""

    def __init__(
        self,
        shape: Shape,
        rows: list[tuple[int, int]],
        *,
        dec: bool,
        norm: bool,
        values: bool = False,
        rank: int | None = None,
    ):
        (H, H_kv, D, r), T = shape, CAPACITY
        generator = torch.Generator().manual_seed(D + H)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        M, width = len(rows), (H + 2 * H_kv) * D
        self.sizes = (H, H_kv, D)
        self.y = normal(M, width)
        self.dec = normal(M, width) if dec else None
        self.norms = (normal(D).abs() + 0.1, normal(D).abs() + 0.1) if norm else (None, None)
        self.values, self.rank = values, rank
        self.cos, self.sin = (torch.from_numpy(table) for table in tables(RopeSpec(rotary_dim=r), T))
        self.slots, self.positions = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        self.caches = normal(2, int(self.slots.max()) + 1, H_kv, T, D).half()

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [M, H, D] and both caches, float32."""
        H, H_kv, D = self.sizes
        total = self.y if self.dec is None else self.y + self.dec
        q, k, v = total.view(len(total), -1, D).split((H, H_kv, H_kv), dim=1)
        if self.norms[0] is not None:
            q, k = rms_norm(q, self.norms[0], EPS), rms_norm(k, self.norms[1], EPS)
        if self.values:
            R = self.rank or D
            v = torch.cat((rms_norm(v[..., :R], torch.ones(R), VALUE_EPS), v[..., R:]), dim=-1)
            if self.rank is not None:
                k = torch.cat((k[..., :-R], rms_norm(k[..., -R:], torch.ones(R), VALUE_EPS)), dim=-1)
        cos, sin = self.cos[self.positions.long()], self.sin[self.positions.long()]
        keys, values = self.caches.float()
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys[self.slots, :, self.positions] = k
        values[self.slots, :, self.positions] = v
        return q, keys, values

    def run(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same from the kernel."""
        H, _, D = self.sizes

        def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, copy=True)

        cache = HalfPages(self.caches, device)
        q = torch.full((len(self.y), H * D), torch.nan, dtype=torch.float16, device=device)
        norms = HeadNorms(*map(there, self.norms), EPS, VALUE_EPS if self.values else None, self.rank)
        rope = Rope(*map(there, (self.cos, self.sin)))
        rows = Rows(*map(there, (self.positions, self.slots)))
        heads(*map(there, (self.y, self.dec)), norms, rope, Basis(None, None), rows, cache.pages, q)
        keys, values = cache.read().float()
        return q.cpu().float().view(len(q), H, D), keys, values


ROWS = [(1, 0), (1, 1), (0, 5), (2, 8)]


def _check(case: _Case, device: str) -> None:
    for actual, expected in zip(case.run(device), case.expected(), strict=True):
        assert_close(actual, expected, "heads")


@pytest.mark.parametrize(
    ("shape", "norm", "values"),
    [
        *(((4, 2, 32, 32), False, False), ((3, 3, 96, 72), True, False)),
        *(((4, 2, 40, 16), False, True), ((2, 1, 512, 128), True, True)),
    ],
)
def test_what_compensates_the_product_is_added(device: str, shape: Shape, norm: bool, values: bool) -> None:
    """Then come norms: of queries and keys with their weights, of values without."""
    _check(_Case(shape, ROWS, dec=True, norm=norm, values=values), device)


@pytest.mark.parametrize("shape", [(3, 1, 34, 10), (2, 1, 576, 64)])
def test_latents_alone_pass_a_norm(device: str, shape: Shape) -> None:
    """Behind what rotates of keys, and in front of what values do not have; where heads are the queries' own, too."""
    H, _, D, r = shape
    case = _Case(shape, ROWS, dec=True, norm=False, values=True, rank=D - r)
    _check(case, device)
    before = case.run(device)[1:]
    case.y, case.dec = case.y[:, H * D :], case.dec[:, H * D :]
    case.sizes = (0, 1, D)
    for alone, both in zip(case.run(device)[1:], before, strict=True):
        assert torch.equal(alone, both)


def test_nothing_else_of_the_cache_is_touched(device: str) -> None:
    case = _Case((4, 2, 32, 32), ROWS, dec=False, norm=True)
    _, keys, values = case.run(device)
    untouched = torch.ones(3, 9, dtype=torch.bool)
    untouched[case.slots, case.positions] = False
    for actual, before in zip((keys, values), case.caches.float(), strict=True):
        assert torch.equal(actual.transpose(1, 2)[untouched], before.transpose(1, 2)[untouched])


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_queries_alone_leave_the_cache_as_it_is(device: str, norm: bool) -> None:
    """Of a block that reads another one's cache: they are what they are beside keys and values."""
    case = _Case((4, 2, 40, 16), ROWS, dec=True, norm=norm, values=True)
    expected = case.expected()[0]
    case.y, case.dec = (one[:, : 4 * 40].contiguous() for one in (case.y, case.dec))
    case.norms = (case.norms[0], None)
    queries, keys, values = case.run(device)
    assert_close(queries, expected, "heads")
    for actual, before in zip((keys, values), case.caches.float(), strict=True):
        assert torch.equal(actual, before)
