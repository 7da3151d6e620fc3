"""The reference cache: its contents equal a plain history quantized in the same way, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.backends.operations.layers import attend
from runtime.backends.operations.pages import dequantize_page, quantize_page
from runtime.backends.reference.cache import ReferenceCache
from runtime.kv.kinds import KINDS, PARTS, CacheKind, KVKind
from tests.close import assert_close
from tests.runtime.conftest import make_spec

WINDOWED: list[KVKind] = [name for name, kind in KINDS.items() if kind.windowed]
H_KV, D, LAYERS = 2, 8, 1
SLOTS, CONTEXT, ROWS = 3, 700, 128


class Sut:
    """A cache, and beside it each slot's keys and values in float32 and what of them is known to be in pages."""

    def __init__(self, kind: CacheKind, spec: Any, *, context: int = CONTEXT, rows: int = ROWS, seed: int = 0) -> None:
        self.kind, self.spec = kind, spec
        self.cache = ReferenceCache(kind, spec, context=context, slots=SLOTS, max_rows=rows)
        self.plain = [torch.zeros(2, 0, H_KV, D) for _ in range(SLOTS)]
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, rows: dict[int, tuple[int, int]], *, flush: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Write random rows: slot -> (first position, count). Returns slots and positions."""
        slots = torch.tensor([slot for slot, (_, count) in rows.items() for _ in range(count)])
        positions = torch.tensor([p for start, count in rows.values() for p in range(start, start + count)])
        self.cache.begin(slots.numpy().astype(np.int32), positions.numpy().astype(np.int32), flush=flush)
        x = torch.randn(2, len(slots), H_KV, D, generator=self.generator) * 3 + 1
        for layer in range(LAYERS):
            self.cache.append(layer, slots, positions, *x)
        for slot, (start, _) in rows.items():
            self.plain[slot] = torch.cat([self.plain[slot][:, :start], x[:, slots == slot]], dim=1)
        return slots, positions

    def cut(self, slot: int, length: int) -> None:
        self.kept(slot, slot, length)  # before the cache forgets which pages there were
        self.cache.trim(slot, length)

    def fork(self, source: int, target: int, length: int) -> None:
        self.cache.fork(source, target, length)
        self.kept(source, target, length)

    def kept(self, source: int, target: int, length: int) -> None:
        """The plain history of a cut: an opened page's tokens are what they read back as."""
        history = self.plain[source][:, :length].clone()
        page, sinks = self.kind.page, self.kind.sinks
        if self.kind.windowed and sinks < length < sinks + self.pages[source] * page:
            start = sinks + (length - sinks) // page * page
            opened = self.read_page(self.plain[source][:, start : start + page])
            history[:, start:] = opened[:, : length - start]
        self.plain[target] = history

    @property
    def pages(self) -> list[int]:
        return [self.cache.table.count(slot) for slot in range(SLOTS)]

    def store_page(self, tokens: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """tokens [2, page, H_kv, D] as `quantize_page` stores them, both parts."""
        halves = tokens.half().float() if self.kind.windowed else tokens
        return [quantize_page(self.kind, part, halves[i].transpose(0, 1)[None]) for i, part in enumerate(PARTS)]

    def read_page(self, tokens: torch.Tensor) -> torch.Tensor:
        both = zip(PARTS, self.store_page(tokens), strict=True)
        return (
            torch.cat([dequantize_page(self.kind, part, stored, D) for part, stored in both])
            .half()
            .float()
            .transpose(1, 2)
        )

    def check(self, slot: int) -> None:
        """Every stored bit of a slot."""
        plain, page, cache = self.plain[slot], self.kind.page, self.cache
        assert cache.length(slot) == plain.shape[1]
        for i, number in enumerate(cache.table.held(slot)):
            tokens = plain[:, self.kind.sinks + i * page : self.kind.sinks + (i + 1) * page]
            for part, wanted in zip(PARTS, self.store_page(tokens), strict=True):
                found = cache.store.stored(part, 0, [number])
                for name, array in wanted.items():
                    here = found[name] if self.kind.windowed else found[name][:, :, : tokens.shape[1]]
                    assert torch.equal(here, array), (part, name, i)
        paged = cache.paged_length(slot)
        for i, part in enumerate(PARTS):
            window = cache.store.window(part, slot)[0, :, : cache.window_length(slot)]
            if self.kind.windowed:
                left = torch.cat([plain[i, : self.kind.sinks], plain[i, self.kind.sinks + paged :]])
                assert torch.equal(window, left.half().transpose(0, 1))


@pytest.fixture
def spec() -> Any:
    return make_spec(num_layers=LAYERS, num_heads=4, num_kv_heads=H_KV, head_dim=D, windows=(None,) * LAYERS)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "back", "trim", "fork", "clear", "both"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, SLOTS - 1),
        st.integers(1, ROWS),
        st.floats(0, 1),
    ),
    max_size=14,
)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=12, derandomize=True)
@given(actions=ACTIONS)
def test_any_sequence_of_actions_stores_what_a_plain_history_gives(
    name: KVKind, actions: list[tuple[str, int, int, int, float]]
) -> None:
    shape = {"num_layers": LAYERS, "num_heads": 4, "num_kv_heads": H_KV, "head_dim": D, "windows": (None,)}
    sut = Sut(KINDS[name], make_spec(**shape))
    for action, slot, other, rows, share in actions:
        length = sut.cache.length(slot)
        start = max(0, length - rows // 2) if action == "back" else length
        if action in ("step", "both", "back") and start + rows <= CONTEXT:
            if start < length:
                sut.kept(slot, slot, start)
            more = {other: (sut.cache.length(other), 1)} if action == "both" and other != slot else {}
            sut.step({slot: (start, rows), **more} if sut.cache.length(other) < CONTEXT else {slot: (start, rows)})
        elif action == "trim":
            sut.cut(slot, round(length * share))
        elif action == "fork" and slot != other:
            sut.fork(slot, other, round(length * share))
        elif action == "clear":
            sut.cache.clear(slot)
            sut.plain[slot] = torch.zeros(2, 0, H_KV, D)
        for one in range(SLOTS):
            sut.check(one)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gamma"), [("hierarchical", 1), ("hierarchical", 7), ("kivi2", 4), ("int4", 4)])
def test_five_thousand_tokens_with_rollbacks(name: KVKind, gamma: int, spec: Any) -> None:
    """Speculation: gamma drafted tokens, a flush at the first alone, gamma + 1 verified rows, some taken back."""
    kind = KINDS[name]
    sut = Sut(kind, spec, context=5200, rows=gamma + 1)
    rng = np.random.default_rng(gamma)
    sut.step({0: (0, 1)})
    while (length := sut.cache.length(0)) < 5000:
        for i in range(gamma):
            sut.step({0: (length + i, 1)}, flush=i == 0)
        before = sut.pages
        sut.step({0: (length, gamma + 1)})
        assert sut.pages == before or not kind.windowed
        back = int(rng.integers(0, gamma + 1))
        assert sut.cache.exact_from(0) <= length
        sut.cut(0, length + gamma + 1 - back)
    sut.cut(0, sut.cache.length(0) - 1)
    sut.step({0: (sut.cache.length(0), 1)})
    sut.check(0)
    if kind.windowed:
        assert sut.pages[0] == kind.stored_pages(sut.cache.length(0) - 1) > 34


@pytest.mark.parametrize("name", KINDS)
def test_attention_is_that_over_what_reads_back(name: KVKind, spec: Any) -> None:
    kind = KINDS[name]
    sut = Sut(kind, spec)
    for start in range(0, 384, 128):
        sut.step({0: (start, 128), 2: (start // 2, 64)})
    slots, positions = sut.step({0: (384, 3), 1: (0, 2), 2: (192, 1)})
    q = torch.randn(6, 4, D, generator=sut.generator)
    for window in (None, 1, 50, 300):
        found = sut.cache.attend(0, q, slots, positions, window)
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            k, v = (sut.cache.read(part, 0, slot)[: position + 1] for part in PARTS)
            alone = attend(q[row : row + 1], k, v, torch.tensor([position]), window)
            assert_close(found[row : row + 1], alone)
    off = [
        (sut.cache.read(part, 0, 0) - sut.plain[0][i]).norm() / sut.plain[0][i].norm() for i, part in enumerate(PARTS)
    ]
    if kind.sinks:
        assert_close(sut.cache.read("keys", 0, 0)[: kind.sinks], sut.plain[0][0][: kind.sinks], "half")
    limits = {
        "fp16": 5e-4,
        "int8": 0.01,
        "hierarchical": 0.008,
        "int4": 0.1,
        "kcvt4": 0.1,
        "gear-l4": 0.07,
        "gear4": 0.07,
    }
    assert max(off) < limits.get(name, 0.5)


@pytest.mark.parametrize("name", KINDS)
def test_only_hierarchical_drafts_read_less(name: KVKind, spec: Any) -> None:
    sut = Sut(KINDS[name], spec)
    for start in range(0, 512, 128):
        sut.step({0: (start, 128)})
    full, draft = (sut.cache.read("keys", 0, 0, draft=draft) for draft in (False, True))
    assert torch.equal(full, draft) == (not KINDS[name].has_draft)
    if KINDS[name].has_draft:
        paged = sut.cache.paged_length(0)
        assert torch.equal(full[paged:], draft[paged:])
        exact = sut.plain[0][0][:paged]
        assert float((full[:paged] - exact).norm()) < 0.1 * float((draft[:paged] - exact).norm())


@pytest.mark.parametrize("name", KINDS)
def test_bytes_in_use_are_those_of_pages_and_window_tokens(name: KVKind, spec: Any) -> None:
    kind = KINDS[name]
    sut = Sut(kind, spec)
    assert [sut.cache.slot_bytes(slot) for slot in (0, 1)] == [0, 0]
    for start in range(0, 640, 128):
        sut.step({0: (start, 128)})
    record = sum(sut.cache.store.records(part)[0].nbytes for part in PARTS)
    token = sum(sut.cache.store.window(part, 0)[:, :, :1].nbytes for part in PARTS)
    expected = sut.pages[0] * record + sut.cache.window_length(0) * token
    assert sut.cache.slot_bytes(0) == expected
    sut.fork(0, 1, 640)
    assert [sut.cache.slot_bytes(slot) for slot in (0, 1)] == [expected, expected]
    assert sut.cache.table.used == sut.cache.table.count(0), "shared pages count once"
    sut.cache.clear(0)
    sut.cache.clear(1)
    assert (sut.cache.slot_bytes(1), sut.cache.table.used) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_sixty_four_thousand_tokens(name: KVKind) -> None:
    spec = make_spec(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, windows=(None,))
    T, rows = 65536, 4096
    cache = ReferenceCache(KINDS[name], spec, context=T, slots=1, max_rows=rows)
    x = torch.randn(2, T, 1, 8, generator=torch.Generator().manual_seed(0))
    for start in range(0, T, rows):
        positions = torch.arange(start, start + rows)
        cache.begin(np.zeros(rows, np.int32), positions.numpy().astype(np.int32))
        cache.append(0, torch.zeros(rows, dtype=torch.long), positions, *x[:, start : start + rows])
    q = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(1))
    found = cache.attend(0, q, torch.zeros(1, dtype=torch.long), torch.tensor([T - 1]), None)
    wanted = attend(q, *x, torch.tensor([T - 1]), None)
    assert float((found - wanted).abs().max()) < (0.02 if KINDS[name].keys.bits == 2 else 0.005)
    assert cache.slot_bytes(0) <= cache.store.nbytes
