"""Pages of layers with a window: whatever is written, cut back, forked, saved and loaded, what a row reads is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.kv import groups
from runtime.kv import pages as window_pages
from runtime.kv import states as snapshots
from runtime.kv.control import KVCache
from runtime.kv.groups import cache_bytes, live_pages, page_groups
from runtime.kv.kinds import KINDS, CacheKind, page_bytes
from runtime.kv.pages import WindowTable
from runtime.kv.stores import chunks
from tests.runtime.conftest import make_spec
from tests.runtime.engine.nowhere import Nowhere
from tests.runtime.kv.test_kv_control import ROWS, SMALL, ListStore

SLOTS, CONTEXT, SLACK = 3, 150, 4
WINDOWS = (None, 6, 11, 6)
SIZES = {"context": CONTEXT, "slots": SLOTS, "max_rows": ROWS}


class SavedLists(ListStore):
    """A store of lists that can be exported."""

    saved_layout = "lists"

    def read_pages(self, pages: Sequence[int]) -> dict[str, Any]:
        tokens = [(self.pages[page] + [""] * self.size)[: self.size] for page in pages]
        return {"tokens": np.array(tokens, "U60").reshape(-1, self.size)}

    def write_pages(self, pages: Sequence[int], arrays: Any) -> None:
        for page, tokens in zip(pages, arrays["tokens"].tolist(), strict=True):
            if page >= 0:
                self.pages[page] = [token for token in tokens if token]

    def read_window(self, slot: int, count: int) -> dict[str, Any]:
        return {"tokens": np.array((self.windows[slot] + [""] * count)[:count], "U60")}

    def write_window(self, slot: int, _count: int, arrays: Any) -> None:
        self.windows[slot] = arrays["tokens"].tolist()


class Mixed:
    """A cache of a model with two windows over lists, and beside it every slot's tokens as a plain list."""

    def __init__(self, kind: CacheKind, spec: Any) -> None:
        self.kind, self.groups = kind, page_groups(kind, spec, **SIZES)
        assert [(group.layers, group.window) for group in self.groups] == [((0,), None), ((1, 3), 6), ((2,), 11)]
        self.stores = [SavedLists(kind, group.pages) for group in self.groups]
        self.cache = KVCache(kind, spec, dict(zip(self.groups, self.stores, strict=True)), **SIZES)
        self.plain: list[list[str]] = [[] for _ in range(SLOTS)]
        self.written = 0

    def step(self, slot: int, start: int, rows: int, *, draft: bool = False) -> None:
        """Write rows, then look at everything that they see."""
        positions = np.arange(start, start + rows, dtype=np.int32)
        self.cache.begin(np.full(rows, slot, np.int32), positions, flush=not draft, draft=draft)
        del self.plain[slot][start:]
        for position in range(start, start + rows):
            self.written += 1
            self.plain[slot].append(f"{self.written}.")
            for table, store in zip(self.cache.tables, self.stores, strict=True):
                self.write(table, store, slot, position)
        self.check(slot, start)
        assert self.cache.reach(slot, start) == start

    def write(self, table: Any, store: SavedLists, slot: int, position: int) -> None:
        token, size = self.plain[slot][position], self.kind.page
        if self.kind.windowed:
            place = store.windows[slot]
            del place[position - self.cache.paged_length(slot) :]
            place.append(token)
        else:
            page = table.entries(slot)[position // size]
            assert table.references(page) == 1
            del store.pages[page][position % size :]
            store.pages[page].append(token + "q")

    def seen(self, number: int, slot: int, start: int) -> list[str]:
        """What a group has of the tokens that rows from `start` on see."""
        table, store, sinks = self.cache.tables[number], self.stores[number], self.kind.sinks
        paged, window, size = self.cache.paged_length(slot), self.groups[number].window, self.kind.page
        found, near = [], store.windows[slot]
        for position in range(0 if window is None else max(0, start - window + 1), self.cache.length(slot)):
            if self.kind.windowed and (not paged or position < sinks):
                found.append(near[position])
            elif self.kind.windowed and position >= sinks + paged:
                found.append(near[position - paged])
            else:
                page, place = divmod(position - sinks, size)
                entry = table.entries(slot)[page]
                assert entry >= 0, (number, slot, position)
                found.append(store.pages[entry][place])
        return [token.split(".")[0] + "." for token in found]

    def check(self, slot: int, start: int | None = None) -> None:
        start = len(self.plain[slot]) if start is None else start
        for number, group in enumerate(self.groups):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            assert self.seen(number, slot, start) == self.plain[slot][first:]
        for table, group in zip(self.cache.tables[1:], self.groups[1:], strict=True):
            assert isinstance(table, WindowTable)
            assert group.window is not None
            live = sum(page >= 0 for page in table.entries(slot)[table._first_live(slot) :])
            assert live <= live_pages(self.kind, group.window, ROWS)
            assert table.used == len({page for each in range(SLOTS) for page in table.held(each)})
            assert len(table.snapshots(slot)) <= snapshots.MOST_SNAPSHOTS

    def save_and_load(self, slot: int, other: int) -> None:
        pieces = [{name: array.copy() for name, array in piece.items()} for piece in self.cache.export(slot)]
        length, paged = self.cache.length(slot), self.cache.paged_length(slot)
        self.cache.load(other, length, paged, pieces)
        self.plain[other] = list(self.plain[slot])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances as small as the pages here."""
    monkeypatch.setattr(groups, "SLACK", SLACK)
    monkeypatch.setattr(snapshots, "SNAPSHOT_GAP", 5)
    monkeypatch.setattr(window_pages, "SMALL_STEP", 2)


Action = tuple[str, int, int, int, float]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "step", "draft", "trim", "fork", "clear", "saved"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, SLOTS - 1),
        st.integers(1, ROWS),
        st.floats(0, 1),
    ),
    min_size=10,
    max_size=60,
)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_whatever_happens_a_row_finds_what_it_reads(name: str, actions: list[Action]) -> None:
    run(Mixed(SMALL[name], make_spec(num_layers=4, windows=WINDOWS)), actions)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_whatever_happens_often_a_row_finds_what_it_reads(name: str, actions: list[Action]) -> None:
    run(Mixed(SMALL[name], make_spec(num_layers=4, windows=WINDOWS)), actions)


def run(mixed: Mixed, actions: list[Action]) -> None:
    cache = mixed.cache
    for action, slot, other, rows, share in actions:
        length = len(mixed.plain[slot])
        cut = cache.reach(slot, round(length * share))
        if action == "step" and length + rows <= CONTEXT:
            for start in range(length, min(CONTEXT - rows, length + round(30 * share)) + 1, rows):
                mixed.step(slot, start, rows)
        elif action == "draft" and length + SLACK <= CONTEXT and length:
            for drafted in range(SLACK):
                mixed.step(slot, length + drafted, 1, draft=drafted > 0)
                assert cache.reach(slot, length) == length
            mixed.step(slot, length, min(rows, SLACK))
        elif action == "trim":
            cache.trim(slot, cut)
            del mixed.plain[slot][cut:]
        elif action == "fork":
            cache.fork(slot, other, cut)
            mixed.plain[other] = mixed.plain[slot][:cut]
        elif action == "clear":
            cache.clear(slot)
            mixed.plain[slot] = []
        elif action == "saved" and length and slot != other:
            mixed.save_and_load(slot, other)
        for each in range(SLOTS):
            mixed.check(each)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["token-wise", "sinks 8", "keep 4"])
def test_a_slot_goes_back_a_little_and_to_where_prompts_began(name: str) -> None:
    mixed = Mixed(SMALL[name], make_spec(num_layers=4, windows=WINDOWS))
    for start in range(0, 30, 5):
        mixed.step(0, start, 5)  # a prompt
    for start in range(30, 100):
        mixed.step(0, start, 1)  # its answer
    mixed.step(0, 100, 7)  # the next message
    kept = [set(table.snapshots(0)) for table in mixed.cache.tables[1:]]
    assert 100 in kept[0] & kept[1]
    assert mixed.cache.reach(0, 100 - SLACK) == 100 - SLACK
    assert 25 <= mixed.cache.reach(0, 80) < 40  # the prompt's last step began at 25; pages end a little later
    with pytest.raises(RequestError, match=r"can be cut back to \d+ tokens, not to 60"):
        mixed.cache.trim(0, 60)
    with pytest.raises(RequestError, match="cut back"):
        mixed.cache.begin(np.zeros(1, np.int32), np.full(1, 60, np.int32))
    mixed.cache.fork(0, 1, 100)
    mixed.plain[1] = mixed.plain[0][:100]
    mixed.step(1, 100, 7)
    with pytest.raises(RequestError, match="cut back"):
        mixed.cache.begin(np.array([1, 0], np.int32), np.array([107, 60], np.int32))
    assert mixed.cache.length(1) == 107, "nothing has begun"
    mixed.check(0)


@pytest.mark.usefixtures("small")
def test_snapshots_go_when_pages_are_needed() -> None:
    mixed = Mixed(SMALL["token-wise"], make_spec(num_layers=4, windows=WINDOWS))
    for start in range(0, CONTEXT - ROWS, ROWS):
        for slot in range(SLOTS):
            mixed.step(slot, start, ROWS)
    table = mixed.cache.tables[2]
    assert isinstance(table, WindowTable)
    kept = sum(len(table.snapshots(slot)) for slot in range(SLOTS))
    assert 0 < kept < SLOTS * snapshots.MOST_SNAPSHOTS
    assert table.capacity - 2 < table.used <= table.capacity  # they use what no slot needs
    assert all(mixed.cache.has_room(slot, CONTEXT) for slot in range(SLOTS))


@pytest.mark.usefixtures("small")
def test_a_page_that_no_row_reads_goes_at_once() -> None:
    """A long step leaves more tokens to flush than the next one reads."""
    kind, rows = SMALL["keep 0"], 40
    sizes = {**SIZES, "max_rows": rows}
    spec = make_spec(num_layers=2, windows=(None, 6))
    (whole, group) = page_groups(kind, spec, **sizes)
    cache = KVCache(kind, spec, {whole: Nowhere(), group: Nowhere()}, **sizes)
    for start in (0, rows, 2 * rows):
        cache.begin(np.zeros(rows, np.int32), np.arange(start, start + rows, dtype=np.int32))
    assert cache.table.used == 2 * rows // kind.page
    assert group.window is not None
    assert cache.tables[1].used <= 2 * live_pages(kind, group.window, rows)  # the step's own, and a snapshot's


@pytest.mark.usefixtures("small")
def test_windows_alone_always_have_room() -> None:
    kind, spec = SMALL["token-wise"], make_spec(num_layers=2, windows=(6, 6))
    (group,) = page_groups(kind, spec, **SIZES)
    cache = KVCache(kind, spec, {group: ListStore(kind, group.pages)}, **SIZES)
    for start in range(0, CONTEXT - ROWS, ROWS):
        for slot in range(SLOTS):
            assert cache.has_room(slot, CONTEXT)
            assert cache.has_room_beside({0: CONTEXT, 1: CONTEXT}, CONTEXT, source=0, shared=start)
            cache.begin(np.full(ROWS, slot, np.int32), np.arange(start, start + ROWS, dtype=np.int32))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "tokens"), [("token-wise", 8), ("keep 0", 12), ("keep 0", 60), ("sinks 5, keep 3", 60)]
)
def test_a_slot_is_lengthened_by_what_is_read_next(name: str, tokens: int) -> None:
    kind = SMALL[name]
    mixed = Mixed(kind, make_spec(num_layers=4, windows=WINDOWS))
    for start in range(0, tokens, 4):
        mixed.step(0, start, 4)
        mixed.step(1, start, 4)
    mixed.cache.lengthen(0, tokens + 16 * kind.page)
    assert mixed.cache.reach(0, tokens + 16 * kind.page) == tokens + 16 * kind.page
    for table, group in zip(mixed.cache.tables[1:], mixed.groups[1:], strict=True):
        assert len(table.held(0)) <= live_pages(kind, group.window or 0, ROWS)
    mixed.plain[0] = ["?."] * (tokens + 16 * kind.page)
    for position in range(len(mixed.plain[0]), CONTEXT):
        mixed.cache.begin(np.zeros(1, np.int32), np.full(1, position, np.int32))
        mixed.plain[0].append("?.")
        for table, store in zip(mixed.cache.tables, mixed.stores, strict=True):
            mixed.write(table, store, 0, position)
    mixed.check(1)


def test_windows_that_save_little_keep_all_tokens() -> None:
    kind = KINDS["int4"]
    spec = make_spec(num_layers=3, windows=(512, 4096, 512))
    assert [group.window for group in page_groups(kind, spec, context=8192, slots=1, max_rows=128)] == [None, 512]
    assert [group.window for group in page_groups(kind, spec, context=32768, slots=1, max_rows=128)] == [512, 4096]
    assert [group.window for group in page_groups(kind, spec, context=512, slots=1, max_rows=128)] == [None]
    plain = make_spec(num_layers=3, windows=(None,) * 3)
    assert [group.layers for group in page_groups(kind, plain, context=8192, slots=4, max_rows=128)] == [(0, 1, 2)]


@pytest.mark.parametrize("kv", KINDS)
def test_a_cache_takes_what_its_groups_say(kv: Any) -> None:
    kind, sizes = KINDS[kv], {"context": 8192, "slots": 2, "max_rows": 128}
    spec = make_spec(num_layers=3, windows=(None, 512, 512))
    whole = cache_bytes(kind, make_spec(num_layers=3, windows=(None,) * 3), **sizes)
    full, windowed = page_groups(kind, spec, **sizes)
    saved = (full.pages - windowed.pages) * page_bytes(kind, spec, windowed.layers)
    assert cache_bytes(kind, spec, **sizes) == whole - saved
    assert windowed.pages < full.pages / 2


def test_a_shared_cache_is_kept_for_the_furthest_reader() -> None:
    mixers = ("attention", "attention", "shared", "shared")
    spec = make_spec(num_layers=4, mixers=mixers, windows=(None, 64, 128, None))
    found = page_groups(KINDS["fp16"], spec, context=8192, slots=1, max_rows=64)
    assert [(group.layers, group.window) for group in found] == [((0,), None), ((1,), 128)]


@pytest.mark.usefixtures("small")
def test_saved_pages_that_lack_one_are_refused() -> None:
    mixed = Mixed(SMALL["token-wise"], make_spec(num_layers=4, windows=WINDOWS))
    for start in range(0, 98, 7):
        mixed.step(0, start, 7)
    pieces = [{name: array.copy() for name, array in piece.items()} for piece in mixed.cache.export(0)]
    place = next(number for number, piece in enumerate(pieces) if "held" in piece)
    held = pieces[place]["held"]
    for wrong in (held[:-1], held[::-1].copy(), np.append(held, 99).astype(np.int32), held.astype(np.int64), None):
        changed = {"snapshots": pieces[place]["snapshots"], **({} if wrong is None else {"held": wrong})}
        with pytest.raises(RequestError, match="saved"):
            mixed.cache.load(1, 98, 98, [*pieces[:place], changed, *pieces[place + 1 :]])
        assert (mixed.cache.length(1), [table.count(1) for table in mixed.cache.tables]) == (0, [0, 0, 0])
    end = place + 1 + sum(1 for _ in chunks(held.tolist()))
    last = {"tokens": pieces[end - 1]["tokens"][:-1]}
    lacking = [{**pieces[place], "held": held[:-1]}, *pieces[place + 1 : end - 1], last, *pieces[end:]]
    with pytest.raises(RequestError, match="do not hold what the next token reads"):
        mixed.cache.load(1, 98, 98, [*pieces[:place], *lacking])
    mixed.cache.load(1, 98, 98, pieces)
    mixed.plain[1] = list(mixed.plain[0])
    mixed.step(1, 98, 3)
