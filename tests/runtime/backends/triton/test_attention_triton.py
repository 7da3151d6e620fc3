"""Attention on the GPU against the plain torch operation on the same half-precision queries, keys and values.

Tolerance: the output is a mean of values of size 1, weighted with numbers rounded to half precision (2^-11 each, so at
most 4.9e-4 of the mean magnitude), and is itself rounded to half precision (2^-11). Sums are float32.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.spec import GateForm
from runtime.backends.operations import layers as reference
from runtime.backends.triton.kernels import attention as kernels
from runtime.backends.triton.kernels.activations import Projected
from runtime.backends.triton.kernels.attention import (
    KEPT_ROWS,
    MAX_SPLITS,
    MIN_BLOCKS,
    SPLIT_ROWS,
    Room,
    attend,
    launch_config,
)
from runtime.backends.triton.kernels.cache import Rows, power_of_two
from runtime.backends.triton.workspace import Workspace
from runtime.kv.kinds import KINDS, KVKind
from tests.close import assert_close
from tests.runtime.backends.triton.operands import HalfPages, assert_left, left_of


class _Case:
    """A cache that is NaN wherever no step has written, and the rows of one step: (slot, position) each."""

    def __init__(
        self, rows: list[tuple[int, int]], H: int, H_kv: int, D: int, T: int, window: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(len(rows) + D)
        self.shape = (len(rows), H, D)
        self.window = window
        self.slots, self.positions = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        self.q = torch.randn(*self.shape, generator=generator).half()
        self.cache = torch.randn(2, int(self.slots.max()) + 1, H_kv, T, D, generator=generator).half()
        for slot in range(self.cache.shape[1]):
            written = self.positions[self.slots == slot]
            self.cache[:, slot, :, int(written.max()) + 1 if len(written) else 0 :] = torch.nan

    def expected(self) -> torch.Tensor:
        """float32 [M, H, D]."""
        out = torch.empty(self.shape)
        for slot in set(self.slots.tolist()):
            rows = (self.slots == slot).nonzero().flatten()
            positions = self.positions[rows].long()
            k, v = self.cache[:, slot, :, : int(positions.max()) + 1].transpose(1, 2).float()
            out[rows] = reference.attend(self.q[rows].float(), k, v, positions, self.window)
        return out

    def run(self, device: str, workspace: Workspace | None = None, **how: Any) -> torch.Tensor:
        """The same from the kernel."""
        M, H, D = self.shape
        x = torch.full((M, H * D), torch.nan, dtype=torch.float16, device=device)
        pages, T = HalfPages(self.cache, device).pages, self.cache.shape[3]
        q, positions, slots = (one.to(device) for one in (self.q.view(M, H * D), self.positions, self.slots))
        rows = Rows(positions, slots)
        left = None if D % 32 else left_of(M, H * D, device, rotated=D % 64 == 0 and D > 64)
        attend(q, pages, rows, self.window, x, workspace or Workspace(device), context=T, left=left, **how)
        if left is not None and bool(x.isfinite().all()):
            assert_left(left, x)
        return x.cpu().float().view(M, H, D)

    def check(self, device: str) -> None:
        """Compare the two."""
        assert_close(self.run(device), self.expected(), "half attention")


def _run_of(slot: int, first: int, count: int) -> list[tuple[int, int]]:
    """Consecutive rows of one slot."""
    return [(slot, first + step) for step in range(count)]


ONE, MIXED = [(0, 140)], [(0, 130), *_run_of(2, 0, 6), *_run_of(1, 40, 3), (3, 149)]
SEVERAL = [0, 299, 5, 64, 130, 1, 250, 33, 298]
"""Positions, a slot each."""
CASES: dict[str, tuple[list[tuple[int, int]], tuple[int, int, int], int, int | None]] = {
    # rows, heads, capacity and window
    **{f"position-{at}": ([(0, at)], (2, 1, 64), 150, None) for at in (0, 1, 63, 64, 149)},
    **{
        f"{name}-H{H}-{H_kv}-D{D}": (rows, (H, H_kv, D), 150, None)
        for H, H_kv, D in (
            *(
                (1, 1, 32),
                (4, 2, 64),
                (7, 1, 80),
                (3, 3, 96),
                (8, 1, 128),
                (6, 2, 40),
                (2, 1, 192),
                (2, 1, 256),
                (8, 1, 512),
                (20, 1, 512),
            ),
            *((17, 1, 32), (3, 1, 8)),
        )
        for name, rows in (("decode", ONE), ("mixed", MIXED))
        if name == "decode" or (H, D) not in ((1, 32), (3, 96), (8, 128), (6, 40), (20, 512))
    },
    **{
        f"slots-{M}": ([(M - 1 - slot, SEVERAL[slot]) for slot in range(M)], (2, 1, 32), 300, None)
        for M in (SPLIT_ROWS, SPLIT_ROWS + 1)
    },
    "rows-of-a-slot": (_run_of(1, 60, 5), (4, 2, 32), 150, None),
    "prompt": (_run_of(0, 0, 26), (5, 1, 32), 110, None),  # a tile of 25 rows, and one of the next
    "prompt-behind": (_run_of(0, 70, 26), (5, 1, 32), 110, None),
    **{f"window-{window}": ([(0, 149)], (2, 1, 64), 150, window) for window in (1, 65)},
    "first-window": ([(0, 0)], (2, 1, 64), 150, 2),
    **{f"mixed-window-{window}": (MIXED, (2, 1, 64), 150, window) for window in (2, 65, 4096)},
}


@pytest.mark.parametrize("case", CASES)
def test_attention_is_the_plain_one(device: str, case: str) -> None:
    rows, heads, T, window = CASES[case]
    _Case(rows, *heads, T, window).check(device)


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("_order", ["backwards"], indirect=True)
def test_what_pads_a_head_is_left_to_the_next(device: str) -> None:
    """Channels of a program behind its head's 192 belong to another program, which here has written them before."""
    _Case(ONE, 2, 1, 192, 150).check(device)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("rows", [[(1, 149)], MIXED], ids=["decode", "mixed"])
def test_any_number_of_splits(
    device: str, rows: list[tuple[int, int]], splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels, "launch_config", lambda *shape, **how: replace(launch_config(*shape, **how), splits=splits)
    )
    _Case(rows, 2, 1, 64, 150).check(device)


def test_a_window_of_one_gives_the_value_itself(device: str) -> None:
    case = _Case(MIXED, 2, 1, 32, 150, 1)
    own = case.cache[1, case.slots, 0, case.positions].float()
    assert torch.equal(case.run(device), own[:, None].expand(-1, 2, -1))


def test_sharp_scores_pick_their_value(device: str) -> None:
    """Scores of a thousand: the softmax must subtract the largest, in every split and in the merge."""
    case = _Case([(0, 149)], 1, 1, 64, 150)
    case.cache[0, 0, 0] *= 0.01
    case.cache[0, 0, 0, 7] = 100 * torch.sign(case.q[0, 0])
    assert_close(case.run(device)[0, 0], case.cache[1, 0, 0, 7].float(), "half attention")


@pytest.mark.parametrize("rows", [[(0, 149)], _run_of(0, 130, 12)], ids=["decode", "prefill"])
def test_a_nan_in_the_past_reaches_the_output(device: str, rows: list[tuple[int, int]]) -> None:
    case = _Case(rows, 2, 2, 64, 150)
    case.cache[0, 0, 1, 70, 3] = torch.nan
    x = case.run(device)
    assert not x[:, 0].isnan().any()
    assert bool(x[:, 1].isnan().all())


@pytest.mark.parametrize(("rows", "T"), [([(0, 149)], 4096), (MIXED, 150)], ids=["decode", "mixed"])
def test_results_repeat_in_a_workspace_that_holds_anything(device: str, rows: list[tuple[int, int]], T: int) -> None:
    """Also where a short past leaves most splits of a long context nothing to write, which no merge reads."""
    case, workspace = _Case(rows, 2, 1, 64, T), Workspace(device)
    workspace.scratch(1 << 20, torch.float32).fill_(torch.nan)
    first = case.run(device, workspace)
    assert_close(first, case.expected(), "half attention")
    assert torch.equal(case.run(device, workspace), first)
    assert torch.equal(case.run(device), first)


def test_many_rows_are_launched_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The splits of all of them together would take more memory than is planned for."""
    monkeypatch.setattr(kernels, "KEPT_ROWS", 4 * 5)
    _Case(MIXED, 4, 2, 32, 150).check(device)


@pytest.mark.parametrize("width", [128, 4], ids=["channels", "heads"])
@pytest.mark.parametrize(("compensated", "form"), [(False, "sigmoid"), (True, "sigmoid"), (True, "softplus")])
def test_outputs_are_multiplied_by_their_gates(
    device: str, monkeypatch: pytest.MonkeyPatch, compensated: bool, form: GateForm, width: int
) -> None:
    """The last channels of a wider projection, with and without its compensation, launched in parts."""
    monkeypatch.setattr(kernels, "KEPT_ROWS", 4 * 5)
    case = _Case(_run_of(0, 60, 7), 4, 2, 32, 150)
    y = 3 * torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    dec = torch.full_like(y, 0.5).to(device) if compensated else None
    shares = (y + 0.5 if compensated else y)[:, -width:].view(7, 4, -1)
    shares = shares.sigmoid() if form == "sigmoid" else torch.nn.functional.softplus(shares)
    gates = Projected(y.to(device)[:, -width:], dec if dec is None else dec[:, -width:])
    found = case.run(device, gates=gates, softplus=form == "softplus")
    assert_close(found, case.expected() * shares, "half attention")


LAPTOP, LARGE = Room(multiprocessors=20, shared_kib=100), Room(multiprocessors=132, shared_kib=228)


@pytest.mark.parametrize("room", [LAPTOP, LARGE], ids=["laptop", "large"])
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim"),
    [(1, 32, 96), (4, 8, 128), (7, 2, 64), (8, 1, 256), (8, 4, 512), (20, 1, 512), (24, 1, 64)],
)
def test_launches_cover_every_row_and_keep_to_the_limits(group: int, kv_heads: int, dim: int, room: Room) -> None:
    for M, seen in itertools.product((1, 2, 8, 9, 128, 512), (1, 100, 8192, 131072)):
        config = launch_config(M, group, kv_heads, dim, seen, room=room)
        assert config.rows >= 1, (M, seen)
        assert config.rows * group // config.parts <= config.block_m, (M, seen)
        assert config.block_m >= 16, (M, seen)
        assert config.block_d >= dim, (M, seen)
        assert config.num_stages >= 2, (M, seen)
        assert 1 <= config.splits <= min(MAX_SPLITS, max(1, -(-seen // config.block_t))), (M, seen)
        assert config.splits == 1 or config.splits * M * group * kv_heads <= KEPT_ROWS, (M, seen)
        for block in (config.block_m, config.block_t, config.block_d):
            assert block == power_of_two(block), (M, seen)


@pytest.mark.parametrize(("room", "programs"), [(LAPTOP, 20), (LARGE, 3 * 132)], ids=["laptop", "large"])
@pytest.mark.parametrize(("group", "kv_heads"), [(4, 8), (1, 32), (7, 4)])
def test_a_decoded_token_fills_the_device_and_no_more(group: int, kv_heads: int, room: Room, programs: int) -> None:
    """At 8192 positions, in few whole waves of the programs that run at the same time; a laptop's are no 256."""
    splits = launch_config(1, group, kv_heads, 128, 8192, room=room).splits
    waves = -(-splits * kv_heads // programs)
    assert waves <= 8
    assert splits == 8192 // 64 // MIN_BLOCKS or splits * kv_heads >= 0.75 * waves * programs


class _Recorded:
    """Stands for a kernel and keeps what it would be compiled for."""

    def __init__(self, name: str, variants: set[object]) -> None:
        self._name, self._variants = name, variants

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            absent = tuple(place for place, one in enumerate(arguments) if one is None)
            self._variants.add((self._name, absent, *sorted(constants.items(), key=str)))

        return launch


@pytest.mark.parametrize("kv", ["fp16", "int8", "int4", "hierarchical", "gear4"])
@pytest.mark.parametrize(("group", "kv_heads", "dim"), [(4, 8, 128), (1, 32, 96), (3, 3, 64), (7, 2, 64), (8, 4, 512)])
def test_what_a_load_compiles_of_attention(
    group: int, kv_heads: int, dim: int, kv: KVKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of rows, contexts of any capacity, drafts, and layers with a window: at most a dozen kernels."""
    variants: set[object] = set()
    for name in ("_attend_kernel", "_merge_kernel"):
        monkeypatch.setattr(kernels, name, _Recorded(name, variants))
    H, kind = group * kv_heads, KINDS[kv]
    layouts: Any = lambda draft: ("draft" if draft and kind.has_draft else "all",)  # noqa: E731
    pages: Any = type("Pages", (), {})()
    pages.head_dim, pages.kv_heads, pages.kind, pages.tensors = dim, kv_heads, kind, "tensors"
    pages.stride, pages.per_slot, pages.layout = 1, 1, layouts
    workspace = Workspace("cpu")
    for M in (*range(1, 20), 24, 32, 33, 64, 128, 129, 512):
        q = torch.zeros(M, H * dim, dtype=torch.float16)
        rows = Rows(*torch.zeros(2, M, dtype=torch.int32))
        for context in (100, 2048, 131072):
            for window, draft in ((None, False), (None, True), (64, False)):
                attend(q, pages, rows, window, q, workspace, context=context, draft=draft and M == 1)
    assert len(variants) <= 12, variants


@pytest.mark.gpu
def test_a_captured_launch_replays_at_any_position(cuda: str) -> None:
    cases = [_Case([(0, position)], 8, 2, 64, 600) for position in (3, 599, 256)]
    workspace = Workspace(cuda)
    static = {name: getattr(cases[1], name).to(cuda) for name in ("q", "positions", "slots")}
    x = torch.zeros(1, 8 * 64, dtype=torch.float16, device=cuda)
    pages, *others = [HalfPages(case.cache, cuda).pages for case in (cases[1], *cases)]

    def launch() -> None:
        q = static["q"].view(1, 512)
        attend(q, pages, Rows(static["positions"], static["slots"]), None, x, workspace, context=600)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for case, other in zip(cases, others, strict=True):
        for name, tensor in static.items():
            tensor.copy_(getattr(case, name))
        for part, pool in pages.pools.items():
            pool.copy_(other.pools[part])
        graph.replay()
        assert_close(x.cpu().float().view(1, 8, 64), case.expected(), "half attention")
