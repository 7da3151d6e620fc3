"""The GPU's cache of every kind against the reference cache: contents, bit for bit, and attention over it.

Tolerance of attention: keys and values are read back in half precision and weights are rounded to it, 2^-11 each, where
the reference has float32; a wrong scale, plane or mask is off by the size of a value, 1.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.operations import pages as correction
from runtime.backends.operations.pages import dequantize_page, quantize_page
from runtime.backends.reference.cache import ReferenceCache
from runtime.backends.triton.cache import GpuCache
from runtime.backends.triton.kernels.attention import attend
from runtime.backends.triton.kernels.cache import Rows, low_rank
from runtime.backends.triton.kernels.rope import Basis, HeadNorms, Rope, heads
from runtime.backends.triton.workspace import Workspace
from runtime.kv.groups import cache_bytes
from runtime.kv.kinds import KINDS, PARTS, KVKind
from tests.close import TOLERANCES, Tolerance, assert_close
from tests.grid import QUICK_CACHES, grid
from tests.runtime.conftest import make_spec

WINDOWED: list[KVKind] = [name for name, kind in KINDS.items() if kind.windowed]
TOKENWISE: list[KVKind] = [name for name, kind in KINDS.items() if not kind.windowed]
SLOTS, ROWS = 3, 128
LARGE_KEYS = Tolerance(
    rtol=2e-2,
    atol=2e-2,
    why="keys of 100 are half a 16th off in half precision, and scores by a 6th of that in heads of 32 channels",
)


def test_layers_with_attention_have_the_pages(device: str) -> None:
    """One behind the other, whatever layers are between them, and as many as slots are to share."""
    mixers = ("convolution", "attention", "convolution", "attention")
    spec = make_spec(num_layers=4, mixers=mixers, conv_kernel_size=3)
    cache = GpuCache(KINDS["int8"], spec, context=100, slots=3, max_rows=8, device=torch.device(device), pages=5)
    assert cache.table.capacity == 5
    assert list(cache.layers) == [1, 3]
    for part in PARTS:
        for place, layer in enumerate(cache.layers.values()):
            assert layer.pools[part].data_ptr() == cache.store.pools[part][:, place].data_ptr()


class Pair:
    """The reference cache and the GPU's, given the same tokens."""

    def __init__(self, spec: Any, name: KVKind, device: str, *, context: int = 400, rows: int = ROWS) -> None:
        self.spec, self.kind, self.device, self.context, self.rows = spec, KINDS[name], device, context, rows
        sizes = {"context": context, "slots": SLOTS, "max_rows": rows}
        self.theirs = ReferenceCache(self.kind, spec, **sizes)
        self.ours = GpuCache(self.kind, spec, **sizes, device=torch.device(device))
        for part, pool in self.ours.store.pools.items():
            pool.fill_(255)  # NaN as halves
            self.theirs.store.records(part).fill_(255)
        for part, window in self.ours.store.windows.items():
            window.fill_(torch.nan)
            for slot in range(SLOTS):
                self.theirs.store.window(part, slot).fill_(torch.nan)
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def fill(self, slot: int, count: int, *, outlier: float = 1.0) -> None:
        """Write that many tokens of a slot in both, a few at a time."""
        for start in range(0, count, ROWS):
            self.step(slot, start, min(ROWS, count - start), outlier=outlier)

    def read(self, history: torch.Tensor, last: int) -> tuple[Any, Any]:
        """Keys and values [2, T, H_kv, D] of the one layer in slot 0: the last rows by both, what is before them by the
        reference, from which ours loads it. Returns the last rows' slots and positions."""
        T = history.shape[1]
        edges = [*range(0, T - last, self.rows), T - last, T]
        for start, end in itertools.pairwise(edges):
            slots, positions = np.zeros(end - start, np.int32), np.arange(start, end, dtype=np.int32)
            if end == T:
                pieces = [{name: array.copy() for name, array in piece.items()} for piece in self.theirs.export(0)]
                self.ours.load(0, start, self.theirs.paged_length(0), pieces)
                self.ours.begin(slots, positions)
                self.append(0, slots, positions, *history[:, start:])
            self.theirs.begin(slots, positions)
            self.theirs.append(0, torch.tensor(slots).long(), torch.tensor(positions).long(), *history[:, start:end])
        return slots, positions

    def step(self, slot: int, start: int, count: int, *, outlier: float = 1.0, copied: bool = True) -> tuple[Any, Any]:
        """Write rows of one slot, whose channel 3 has larger keys, in both. Returns slots and positions.

        The interpreter takes a while for a row, so most are `copied` from the reference's cache, which has the same
        layout, instead of being written by the kernel.
        """
        slots = np.full(count, slot, np.int32)
        positions = np.arange(start, start + count, dtype=np.int32)
        H_kv, D = self.spec.num_kv_heads, self.spec.head_dim
        for cache in (self.ours, self.theirs):
            cache.begin(slots, positions)
        for layer in range(self.spec.num_layers):
            k, v = self.normal(2, count, H_kv, D)
            k[:, :, 3] *= outlier
            k, v = k + 0.3, v - 0.2
            self.theirs.append(layer, torch.tensor(slots).long(), torch.tensor(positions).long(), k, v)
            if not copied:
                self.append(layer, slots, positions, k, v)
        if copied:
            for part in PARTS:
                if self.kind.windowed:
                    self.ours.store.windows[part][slot] = self.theirs.store.window(part, slot).to(self.device)
                else:
                    pages = self.theirs.table.held(slot)
                    self.ours.store.pools[part][pages] = self.theirs.store.records(part)[pages].to(self.device)
        return slots, positions

    def append(self, layer: int, slots: Any, positions: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Through the kernel that splits heads, which here neither normalizes nor rotates."""
        count, H, D = len(slots), self.spec.num_heads, self.spec.head_dim
        y = torch.cat([torch.zeros(count, H * D), k.flatten(1), v.flatten(1)], dim=1).to(self.device)
        nothing = torch.zeros(self.context, 0, device=self.device)
        q = torch.zeros(count, H * D, dtype=torch.float16, device=self.device)
        rows = Rows(torch.tensor(positions).to(self.device), torch.tensor(slots).to(self.device))
        norms, rope = HeadNorms(None, None, 1e-6), Rope(nothing, nothing)
        heads(y, None, norms, rope, Basis(None, None), rows, self.ours.layers[layer], q)

    def check_stored(self) -> None:
        """Pages and windows that are in use hold the same bytes."""
        for slot in range(SLOTS):
            pages, length = self.theirs.table.held(slot), self.theirs.paged_length(slot)
            assert self.ours.table.held(slot) == pages
            whole = length // self.kind.page
            for part in PARTS:
                ours = self.ours.store.pools[part].cpu()[pages[:whole]]
                theirs = self.theirs.store.records(part)[pages[:whole]]
                if self.kind.rank:
                    self.check_corrected(part, ours, theirs)
                else:
                    assert torch.equal(ours, theirs), part
                count = self.theirs.window_length(slot)
                ours = self.ours.store.windows[part].cpu()[slot, :, :, :count]
                if self.kind.windowed:
                    theirs = self.theirs.store.window(part, slot)[:, :, :count]
                    if self.kind.rank:  # what a cut brought back from a page, rounded to half precision
                        torch.testing.assert_close(ours, theirs, rtol=2**-9, atol=2**-9)
                    else:
                        assert torch.equal(ours, theirs), part

    def check_corrected(self, part: Any, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Pages with a low-rank correction read alike: the kernel's factors are not the QR's, their product is.

        Factors are float16, whose rounding hangs on the basis that was found; in the interpreter that is all.
        """
        if not ours.numel():
            return
        read = [
            dequantize_page(self.kind, part, self.ours.store.fields(part, records), self.spec.head_dim).float()
            for records in (ours, theirs)
        ]
        error = (read[0] - read[1]).square().mean() / read[1].square().mean()
        assert float(error) < (1e-4 if self.device == "cpu" else 0.05) ** 2, part

    def attended(
        self,
        slots: Any,
        positions: Any,
        window: int | None = None,
        *,
        q: torch.Tensor | None = None,
        dim: int | None = None,
        **how: Any,
    ) -> tuple[Any, Any]:
        """Attention of queries, or random ones, over both caches: float32 [M, H, D] each, or the first `dim` of D."""
        M, H, D = len(slots), self.spec.num_heads, self.spec.head_dim
        q = (self.normal(M, H, D) if q is None else q).half()
        x = torch.full((M, H * (dim or D)), torch.nan, dtype=torch.float16, device=self.device)
        rows = Rows(*(torch.tensor(each).to(self.device) for each in (positions, slots)))
        layer, flat = self.spec.num_layers - 1, q.view(M, H * D).to(self.device)
        pages, workspace = self.ours.layers[layer], Workspace(self.device)
        attend(flat, pages, rows, window, x, workspace, context=self.context, **how)
        where = (torch.tensor(slots).long(), torch.tensor(positions).long())
        return x.cpu().float().view(M, H, -1), self.theirs.attend(layer, q.float(), *where, window, **how)[..., :dim]

    def check_attended(self, slots: Any, positions: Any, window: int | None = None, **how: Any) -> None:
        assert_close(*self.attended(slots, positions, window, **how), "packed attention")


@pytest.fixture
def pair(device: str) -> Any:
    """Makes pairs of caches."""

    def make(name: KVKind, *, D: int = 32, H: int = 4, H_kv: int = 2, layers: int = 2, **sizes: Any) -> Pair:
        spec = make_spec(head_dim=D, num_heads=H, num_kv_heads=H_kv, num_layers=layers, windows=(None,) * layers)
        return Pair(spec, name, device, **sizes)

    return make


@pytest.mark.parametrize(("name", "D"), [*((name, 40) for name in TOKENWISE), ("int8", 8), ("int8", 64)])
def test_tokens_are_stored_as_the_reference_stores_them(pair: Any, name: KVKind, D: int) -> None:
    """Two slots in turns, a position written again, a page that two slots share and one then writes."""
    caches = pair(name, D=D, H=1)
    caches.step(1, 0, 62)
    for slot, start, count in ((1, 62, 3), (0, 0, 3), (0, 2, 2)):
        caches.step(slot, start, count, copied=False)
    for cache in (caches.ours, caches.theirs):
        cache.fork(1, 2, 65)
    caches.step(2, 65, 2, copied=False)
    caches.check_stored()


@pytest.mark.parametrize("name", grid(WINDOWED, {"hierarchical", "kivi2", "gear4"}))
def test_pages_are_flushed_as_the_reference_flushes_them(pair: Any, name: KVKind) -> None:
    """Whole pages leave the window; a cut that opens one brings its tokens back."""
    caches = pair(name, D=80 if name == "kivi2" else 40, H=1, H_kv=1, context=700)
    caches.step(1, 0, 128, outlier=20.0)
    caches.step(1, 128, 128)
    caches.step(1, 256, 3, copied=False)
    caches.check_stored()
    for cache in (caches.ours, caches.theirs):
        cache.fork(1, 0, 100)
    caches.step(0, 100, 2, copied=False)
    caches.check_stored()


def test_equal_numbers_have_scale_zero(pair: Any) -> None:
    for name in ("int8", "int4", "hierarchical"):
        caches = pair(name, H=1, H_kv=1, layers=1, context=700)
        caches.normal = lambda *shape: torch.full(shape, 0.5)
        caches.fill(0, 384)
        caches.step(0, 384, 1, copied=False)
        caches.check_stored()
        assert torch.isfinite(caches.attended(np.array([0], np.int32), np.array([384], np.int32))[0]).all()


@pytest.mark.parametrize("name", grid(KINDS, QUICK_CACHES))
def test_attention_over_every_kind(pair: Any, name: KVKind) -> None:
    """A decoded token and a few drafted ones behind pages and a window, with a planted outlier channel."""
    caches = pair(name, context=700)
    caches.fill(2, 384, outlier=30.0)
    caches.step(1, 0, 7)
    assert_close(*caches.attended(*caches.step(2, 384, 1, copied=False)), LARGE_KEYS)
    assert_close(*caches.attended(*caches.step(2, 385, 3)), LARGE_KEYS)


@pytest.mark.parametrize(("name", "D"), [("int8", 128), ("int4", 8), ("hierarchical", 80), ("gear2", 80)])
def test_attention_with_other_heads(pair: Any, name: KVKind, D: int) -> None:
    caches = pair(name, D=D, H=7, H_kv=1, layers=1)
    caches.fill(0, 256)
    caches.check_attended(*caches.step(0, 256, 2))


@pytest.mark.parametrize(("D", "H"), [(512, 8), pytest.param(576, 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", grid(KINDS, {"int4"}))
def test_heads_of_512_channels(pair: Any, name: KVKind, D: int, H: int) -> None:
    """Stored, and read by a token, a few rows, and those of a prompt; behind them keys have none or 64 more."""
    caches = pair(name, D=D, H=H, H_kv=1, layers=1)
    caches.fill(0, 256)
    caches.check_attended(*caches.step(0, 256, 1, copied=False), dim=512)
    caches.check_attended(*caches.step(0, 257, 2), dim=512)
    caches.check_attended(*caches.step(0, 259, 10), dim=512)
    caches.check_stored()


@pytest.mark.parametrize("name", grid(KINDS, {"int8", "hierarchical", "gear2"}))
def test_values_of_fewer_channels_than_keys(pair: Any, name: KVKind) -> None:
    """Some that are not given, and keys of more than a program's first channels."""
    caches = pair(name, D=48, H=3, H_kv=1, layers=1)
    caches.fill(0, 256)
    caches.check_attended(*caches.step(0, 256, 1), dim=40)
    caches.check_attended(*caches.step(0, 257, 3), dim=24)


@pytest.mark.parametrize(("name", "window"), [("int4", 1), ("int4", 200), ("kivi2", 70)])
def test_sliding_windows_begin_in_pages_and_in_the_window(pair: Any, name: KVKind, window: int) -> None:
    caches = pair(name, layers=1)
    caches.fill(0, 256)
    caches.check_attended(*caches.step(0, 256, 3), window)


@pytest.mark.parametrize("name", ["int8", "int4", "hierarchical", "gear4"])
def test_rows_of_several_slots_and_prefill_in_pieces(pair: Any, name: KVKind) -> None:
    caches = pair(name, H=2, H_kv=1, layers=1)
    parts = [caches.step(slot, start, count) for slot, start, count in ((2, 0, 128), (0, 0, 7), (1, 0, 1))]
    parts += [caches.step(2, 128, 128), caches.step(2, 256, 3)]
    slots, positions = (np.concatenate(each) for each in zip(*[parts[4], parts[1], parts[2]], strict=True))
    caches.check_attended(slots, positions)
    caches.check_attended(slots[:5], positions[:5])


def test_a_draft_reads_the_upper_plane_alone(pair: Any) -> None:
    caches = pair("hierarchical", layers=1, context=700)
    caches.fill(0, 384)
    last = caches.step(0, 384, 1)
    caches.check_attended(*last, draft=True)
    where = [torch.tensor(each).long() for each in last]
    whole, draft = (caches.theirs.attend(0, torch.ones(1, 4, 32), *where, None, draft=on) for on in (False, True))
    assert (whole - draft).abs().max() > 2 * TOLERANCES["packed attention"].atol


def test_what_leaves_the_cache_comes_back(pair: Any) -> None:
    caches = pair("hierarchical", layers=1)
    caches.fill(0, 384)
    pieces = [{name: array.copy() for name, array in piece.items()} for piece in caches.ours.export(0)]
    caches.ours.load(1, 384, 128, pieces)
    assert [{name: array.tobytes() for name, array in piece.items()} for piece in caches.ours.export(1)] == [
        {name: array.tobytes() for name, array in piece.items()} for piece in pieces
    ]


@pytest.mark.parametrize("name", KINDS)
def test_buffers_are_as_large_as_they_are_said_to_be(pair: Any, name: KVKind) -> None:
    caches = pair(name)
    options = {"context": caches.context, "slots": SLOTS, "max_rows": ROWS}
    assert caches.ours.store.nbytes == cache_bytes(KINDS[name], caches.spec, **options)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("alike", [0, 63])
@pytest.mark.parametrize(("T", "D", "rank"), [(16, 8, 4), (48, 20, 3), (128, 32, 4), (128, 500, 4)])
def test_the_product_is_that_of_householder_s_factors(device: str, T: int, D: int, rank: int, alike: int) -> None:
    """Over a residual with that many large directions and noise beside them."""
    residual = _random(3, T, rank) @ _random(3, rank, D) + 0.1 * _random(3, T, D)
    a, b = low_rank(residual.to(device), rank, alike=alike)
    wanted = correction.low_rank_product(*correction.low_rank(residual, rank, alike=alike))
    found = correction.low_rank_product(a.cpu(), b.cpu())
    assert (found - wanted).abs().max() <= 2e-3 * residual.abs().max()
    gram = a.float().mT @ a.float()
    assert (gram.cpu() - torch.eye(rank)).abs().max() < 2e-3


def test_noise_is_corrected_as_well_as_by_householder_s(device: str) -> None:
    residual = _random(4, 128, 32)
    errors = [
        (residual - correction.low_rank_product(a.cpu(), b.cpu())).square().sum().sqrt()
        for a, b in (low_rank(residual.to(device), 4), correction.low_rank(residual, 4))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_residual_of_lower_rank_is_met_exactly(device: str, rank: int) -> None:
    residual = _random(2, 32, max(rank, 1)) @ _random(2, max(rank, 1), 16) * (rank > 0)
    a, b = low_rank(residual.to(device), 4)
    most = 2e-3 * max(1.0, float(residual.abs().max()))
    assert (correction.low_rank_product(a.cpu(), b.cpu()) - residual).abs().max() <= most
    assert bool(torch.isfinite(a).all())


def test_a_broken_number_stays_visible_in_its_page_alone(device: str) -> None:
    residual = _random(2, 32, 16)
    residual[0, 3, 5] = torch.nan
    a, b = low_rank(residual.to(device), 4)
    assert not torch.isfinite(correction.low_rank_product(a.cpu(), b.cpu())[0]).all()
    assert bool(torch.isfinite(a[1]).all() and torch.isfinite(b[1]).all())


@pytest.mark.parametrize("name", ["gear4", "gear2", "gear-l4", "gear-l2"])
def test_pages_read_back_as_the_oracle_s(device: str, name: str) -> None:
    """To 1 % of a page's spread; a number between two codes may fall to either."""
    kind = KINDS[name]
    tokens = _random(2, kind.page, 32)
    for part in ("keys", "values"):
        ours = quantize_page(kind, part, tokens.to(device), low_rank=low_rank)
        back = [
            dequantize_page(kind, part, {field: array.cpu() for field, array in stored.items()}, 32)
            for stored in (ours, quantize_page(kind, part, tokens))
        ]
        assert (back[0] - back[1]).square().mean().sqrt() < 1e-2 * tokens.std()
