"""Moving, dropping, sharing and copying of tokens: a store of plain tokens compared with lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.kv.control import KVCache
from runtime.kv.groups import page_groups
from runtime.kv.kinds import KINDS, CacheKind, page_bytes
from tests.runtime.conftest import make_spec

SLOTS, CONTEXT, ROWS = 3, 60, 7
SIZES = {"context": CONTEXT, "slots": SLOTS, "max_rows": ROWS}

SMALL = {
    "token-wise": replace(KINDS["int8"], page=4),
    "keep 0": replace(KINDS["kivi2"], page=4, sinks=0),
    "sinks 8": replace(KINDS["int4"], page=4, sinks=8),
    "sinks 5, keep 3": replace(KINDS["int4"], page=4, sinks=5, keep=3),
    "keep 4": replace(KINDS["hierarchical"], page=4, keep=4),
    "keep 3": replace(KINDS["hierarchical"], page=4, keep=3),
}


class ListStore:
    """Pages and windows as lists. Quantizing a token marks it: q; reading it back: r; both once more: qr and so on."""

    def __init__(self, kind: CacheKind, pages: int) -> None:
        self.size, self.sinks = kind.page, kind.sinks
        self.pages: list[list[str]] = [[] for _ in range(pages)]
        self.windows: list[list[str]] = [[] for _ in range(SLOTS)]

    def flush(self, slot: int, page: int, rest: int) -> None:
        window, behind = self.windows[slot], self.sinks + self.size
        assert len(window) >= behind + rest
        self.pages[page] = [token + "q" for token in window[self.sinks : behind]]
        self.windows[slot] = window[: self.sinks] + window[behind : behind + rest]

    def restore(self, page: int, slot: int, count: int) -> None:
        assert len(self.windows[slot]) >= self.sinks
        self.windows[slot][self.sinks :] = [token + "r" for token in self.pages[page][:count]]

    def copy_window(self, source: int, target: int, count: int) -> None:
        self.windows[target] = self.windows[source][:count]

    def copy_page(self, source: int, target: int) -> None:
        self.pages[target] = list(self.pages[source])


class Sut:
    """A cache over lists, and beside it every slot's tokens as a plain list."""

    def __init__(self, kind: CacheKind, spec: Any) -> None:
        self.kind = kind
        self.store = ListStore(kind, SLOTS * kind.max_pages(CONTEXT))
        self.cache = KVCache(kind, spec, dict.fromkeys(page_groups(kind, spec, **SIZES), self.store), **SIZES)
        self.plain: list[list[str]] = [[] for _ in range(SLOTS)]
        self.written = 0

    def step(self, rows: dict[int, tuple[int, int]], *, flush: bool = True) -> None:
        """Write rows: slot -> (first position, count)."""
        slots = np.array([slot for slot, (_, count) in rows.items() for _ in range(count)], np.int32)
        positions = np.array([p for start, count in rows.values() for p in range(start, start + count)], np.int32)
        self.cache.begin(slots, positions, flush=flush)
        for slot, (start, count) in rows.items():
            del self.plain[slot][start:]
            for position in range(start, start + count):
                self.written += 1
                token = f"{self.written}."
                self.plain[slot].append(token)
                self.write(slot, position, token)

    def write(self, slot: int, position: int, token: str) -> None:
        if self.kind.windowed:
            window = self.store.windows[slot]
            del window[position - self.cache.paged_length(slot) :]
            window.append(token)
            assert len(window) <= self.kind.window_capacity(ROWS)
        else:
            page = self.cache.table.held(slot)[position // self.kind.page]
            assert self.cache.table.references(page) == 1
            del self.store.pages[page][position % self.kind.page :]
            self.store.pages[page].append(token + "q")

    def read(self, slot: int) -> list[str]:
        pages = [token for page in self.cache.table.held(slot) for token in self.store.pages[page]]
        window = self.store.windows[slot][: self.cache.window_length(slot)]
        sinks = self.kind.sinks
        return [*window[:sinks], *pages[: self.cache.paged_length(slot)], *window[sinks:]]

    def check(self) -> None:
        for slot in range(SLOTS):
            found = self.read(slot)
            assert [token.split(".")[0] + "." for token in found] == self.plain[slot]
            assert self.cache.length(slot) == len(self.plain[slot])
        windows = sum(self.cache.window_length(slot) for slot in range(SLOTS))
        if self.kind.windowed:
            assert windows <= SLOTS * self.kind.window_capacity(ROWS)
            counts = [self.cache.table.count(slot) for slot in range(SLOTS)]
            # Cutting back to within the window keeps all pages.
            limits = [self.kind.stored_pages(len(tokens) + self.kind.keep) for tokens in self.plain]
            assert all(count <= limit for count, limit in zip(counts, limits, strict=True) if limit)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "rollback", "trim", "fork", "clear", "both"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, SLOTS - 1),
        st.integers(1, ROWS),
        st.floats(0, 1),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=150)
@given(actions=ACTIONS)
def test_any_sequence_of_actions_keeps_every_token_in_its_place(
    name: str, actions: list[tuple[str, int, int, int, float]]
) -> None:
    sut = Sut(SMALL[name], make_spec())
    for action, slot, other, rows, share in actions:
        length = len(sut.plain[slot])
        cut = round(length * share)
        if action in ("step", "both") and length + rows <= CONTEXT:
            both = action == "both" and other != slot and len(sut.plain[other]) < CONTEXT
            sut.step({slot: (length, rows), **({other: (len(sut.plain[other]), 1)} if both else {})})
        elif action == "rollback":
            back = min(rows, length)
            sut.step({slot: (length - back, rows)}) if length - back + rows <= CONTEXT else None
        elif action == "trim":
            sut.cache.trim(slot, cut)
            del sut.plain[slot][cut:]
        elif action == "fork":
            sut.cache.fork(slot, other, cut)
            sut.plain[other] = sut.plain[slot][:cut]
        elif action == "clear":
            sut.cache.clear(slot)
            sut.plain[slot] = []
        sut.check()


@pytest.mark.parametrize("name", ["keep 0", "keep 4", "keep 3"])
def test_what_is_stored_depends_on_the_tokens_alone(name: str) -> None:
    kind = SMALL[name]
    rng = np.random.default_rng(7)
    for _ in range(20):
        sut = Sut(kind, make_spec())
        while len(sut.plain[1]) < CONTEXT:
            sut.step({1: (len(sut.plain[1]), int(rng.integers(1, min(ROWS, CONTEXT - len(sut.plain[1])) + 1)))})
        sut.cache.trim(1, CONTEXT - 1)
        sut.step({1: (CONTEXT - 1, 1)})
        tokens = [token.removesuffix("q") for token in sut.read(1)]
        assert tokens == sut.plain[1]
        assert sut.cache.table.count(1) == kind.stored_pages(CONTEXT - 1)


def test_rolling_back_a_step_never_reopens_a_page() -> None:
    rng = np.random.default_rng(3)
    for name in ("keep 0", "keep 4", "keep 3"):
        sut = Sut(SMALL[name], make_spec())
        while (length := len(sut.plain[0])) + ROWS <= CONTEXT:
            sut.step({0: (length, ROWS)})
            back = int(rng.integers(0, ROWS))
            assert sut.cache.exact_from(0) <= length
            sut.cache.trim(0, length + ROWS - back)
            del sut.plain[0][length + ROWS - back :]
        assert not any("r" in token for token in sut.read(0))


def test_drafts_do_not_flush() -> None:
    sut = Sut(SMALL["keep 4"], make_spec())
    sut.step({0: (0, 7)})
    for position in range(7, 14):
        sut.step({0: (position, 1)}, flush=False)
    assert sut.cache.table.count(0) == 0
    with pytest.raises(RequestError, match="is full"):
        sut.step({0: (14, 2)}, flush=False)
    sut.step({0: (7, 5)})  # verification: the tokens before it did not fill the window
    assert sut.cache.table.count(0) == 0
    sut.step({0: (12, 1)})
    assert sut.cache.table.count(0) == 2
    sut.check()


@pytest.mark.parametrize("name", SMALL)
def test_steps_that_end_before_the_next_flush_see_what_decoding_sees(name: str) -> None:
    kind = SMALL[name]
    one, many = Sut(kind, make_spec()), Sut(kind, make_spec())
    seen = {}
    for position in range(CONTEXT):
        one.step({0: (position, 1)})
        seen[position] = one.cache.table.count(0)
    while (length := many.cache.length(0)) < CONTEXT:
        rows = min(many.cache.rows_until_flush(0), ROWS, CONTEXT - length)
        many.step({0: (length, rows)})
        if kind.windowed:
            assert {seen[position] for position in range(length, length + rows)} == {many.cache.table.count(0)}


def test_a_partly_kept_page_comes_back_as_it_reads() -> None:
    sut = Sut(SMALL["keep 0"], make_spec())
    sut.step({0: (0, 7)})
    sut.step({0: (7, 3)})
    assert sut.read(0)[:5] == ["1.q", "2.q", "3.q", "4.q", "5."]
    sut.cache.fork(0, 2, 3)
    assert sut.read(2) == ["1.qr", "2.qr", "3.qr"]
    assert sut.read(0)[:4] == ["1.q", "2.q", "3.q", "4.q"]
    assert sut.cache.exact_from(0) == 4


def test_sharing_costs_no_pages_until_somebody_writes() -> None:
    kind = SMALL["token-wise"]
    sut = Sut(kind, make_spec())
    sut.step({0: (0, 6)})
    before = sut.cache.slot_bytes(0)
    assert before == 2 * page_bytes(kind, make_spec())
    sut.cache.fork(0, 1, 6)
    assert (sut.cache.slot_bytes(0), sut.cache.slot_bytes(1), sut.cache.table.used) == (before, before, 2)
    sut.plain[1] = list(sut.plain[0])
    sut.step({1: (6, 1)})
    assert sut.cache.table.used == 3
    sut.check()


def test_impossible_steps_are_refused_before_anything_changes() -> None:
    sut = Sut(SMALL["keep 4"], make_spec())
    sut.step({0: (0, 7)})
    bad = [
        ([0, 0], [6, 9], "consecutive"),
        ([0, 1, 0], [5, 0, 6], "adjacent"),
        ([0], [8], "has 7 tokens"),
        ([0, 1], [3, 1], "has 0 tokens"),
    ]
    for slots, positions, message in bad:
        with pytest.raises(RequestError, match=message):
            sut.cache.begin(np.array(slots, np.int32), np.array(positions, np.int32))
    with pytest.raises(RequestError, match="context is 60"):
        sut.cache.begin(np.zeros(60, np.int32), np.arange(1, 61, dtype=np.int32))
    for length in (-1, 8):
        with pytest.raises(RequestError, match="cut back"):
            sut.cache.trim(0, length)
    with pytest.raises(RequestError, match="cut back"):
        sut.cache.fork(0, 1, 8)
    sut.check()


@pytest.mark.parametrize("name", SMALL)
def test_a_slot_is_lengthened_by_copies_of_its_pages(name: str) -> None:
    sut = Sut(SMALL[name], make_spec())
    kind, store, cache = sut.kind, sut.store, sut.cache
    store.flush = lambda slot, page, rest: store.pages.__setitem__(page, [f"page {page}"])  # type: ignore[method-assign]
    for start in range(0, 16, 4):
        cache.begin(np.zeros(4, np.int32), np.arange(start, start + 4, dtype=np.int32))
    if not kind.windowed:
        for page in cache.table.held(0):
            store.pages[page] = [f"page {page}"]
    window, held = cache.window_length(0), cache.table.held(0)
    cache.lengthen(0, 40)
    assert (cache.length(0), cache.window_length(0)) == (40, window)
    now = cache.table.held(0)
    assert now[: len(held)] == held
    assert len(set(now)) == len(now) == (40 - window) // kind.page
    assert [store.pages[page] for page in now] == [store.pages[held[i % len(held)]] for i in range(len(now))]
    for length in (41, 36, CONTEXT + 4):
        with pytest.raises(RequestError, match="lengthened"):
            cache.lengthen(0, length)
    with pytest.raises(RequestError, match="lengthened"):
        cache.lengthen(1, 8)
    cache.begin(np.zeros(1, np.int32), np.array([40], np.int32))
    assert cache.length(0) == 41
