"""Conversations with models whose layers have windows, and keep only what these read: whatever was said, cut back,
forked, drafted or saved before, the next token is the one that a fresh prefill gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from models.spec import ModelSpec
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.kv import groups
from runtime.kv import pages as window_pages
from runtime.kv import states as snapshots
from runtime.kv.control import KVCache
from runtime.kv.kinds import KINDS, KVKind
from runtime.kv.states import SMALL_STEP
from tests.grid import QUICK_CACHES
from tests.runtime.conftest import SHARED, STREAMS, make_model, make_spec
from tests.runtime.engine.talking import ROWS, SLOTS, Talk
from tests.runtime.engine.test_states import DECODERS, MEAN

CONTEXT, LONGEST = 1536, 400
MODELS: dict[str, dict[str, Any]] = {
    "mixed": {"num_layers": 3, "windows": (20, None, 20)},
    "wide": {"num_layers": 3, "windows": (150, None, 150)},
    "two windows": {"num_layers": 3, "windows": (20, 70, None), "qk_norm": True},
    "states": {
        "num_layers": 3,
        "windows": (None, None, 20),
        "mixers": ("convolution", "attention", "attention"),
        "conv_kernel_size": 7,
    },
    "windows alone": {"num_layers": 2, "windows": (33, 33)},
    "shared": SHARED,
    "streams": STREAMS,
}
ERRORS: dict[KVKind, float] = {"fp16": 0.0, "int8": 0.01, "int4": 0.3, "hierarchical": 0.05, "gear4": 0.3}
"""What a page that was reopened and stored again adds to the mean error of a logit, of the spread of logits. It is the
same where all tokens are kept; a wrong page is off by the spread."""


def windowed(name: str) -> ModelSpec:
    return make_spec(max_context=CONTEXT, **MODELS[name])


def converse(backend: str, model: Any, seeds: Iterable[int], kv: KVKind = "fp16") -> int:
    """Several exchanges for each seed; returns the tokens that prompts did not compute again."""
    error = MEAN[backend] + ERRORS[kv]
    reused, released = 0, False
    for seed in seeds:
        talk = Talk(DECODERS[backend], model, seed, error, kv=kv, context=CONTEXT, longest=LONGEST)
        for _ in range(6):
            talk.exchange()
            released |= has_released(talk.decoder.cache)
            if talk.random.random() < 0.3:
                talk.save_and_load()
        reused += talk.reused
    assert released
    return reused


@pytest.fixture(autouse=True)
def few_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that conversations as short as these lose pages."""
    monkeypatch.setattr(window_pages, "MOST_SNAPSHOTS", 2)


def has_released(cache: KVCache) -> bool:
    """Whether a slot lacks pages of a group with a window."""
    return any(-1 in cache.tables[-1].entries(slot) for slot in range(SLOTS))


@pytest.mark.parametrize(
    ("backend", "seeds"),
    [
        pytest.param("reference", range(1), id="reference-few"),
        pytest.param("cpu", range(4), id="cpu-few"),
        pytest.param("reference", range(4, 8), id="reference-many", marks=pytest.mark.slow),
        pytest.param("cpu", range(4, 54), id="cpu-many", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_any_history_gives_what_a_fresh_prefill_gives(backend: str, seeds: range, name: str) -> None:
    model = make_model(windowed(name), residual_bits=0)
    assert converse(backend, model, seeds) > 100 * len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("kv", [kv for kv in ERRORS if kv != "fp16"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_so_does_every_kind_of_cache(backend: str, kv: KVKind) -> None:
    model, seeds = make_model(windowed("wide"), residual_bits=0), range(8 if backend == "cpu" else 5)
    assert converse(backend, model, seeds, kv) > 100 * len(seeds)


class Twins:
    """A decoder whose layers keep what their windows read, and one that keeps all tokens, in lockstep."""

    def __init__(self, make: Callable[..., Any], model: Any, kv: KVKind, seed: int, patch: pytest.MonkeyPatch) -> None:
        options = DecoderOptions(kv=kv, context=CONTEXT, slots=SLOTS, max_rows=ROWS, threads=1)
        self.own = make(model, options)
        with patch.context() as only_here:
            only_here.setattr(groups, "_CLEARLY_LESS", 0.0)
            self.whole = make(model, options)
        self.caches = (self.own.cache, self.whole.cache)
        assert [len(cache.tables) for cache in self.caches] == [2, 1]
        assert self.own.kv_bytes < self.whole.kv_bytes
        self.random = np.random.default_rng(seed)
        self.lengths = [0] * SLOTS
        self.released = False
        if make is CpuDecoder:
            self.poison(patch)

    def poison(self, patch: pytest.MonkeyPatch) -> None:
        """Let kernels find not a number wherever a page was released. (The reference reads it all, and hides it.)"""
        cache, table = self.own.cache, self.own.cache.tables[1]
        page, begin, run = table._take(), cache.begin, self.own.forward
        cache.stores[1].records[:, page] = 255

        def beginning(*given: Any, **how: Any) -> None:
            begin(*given, **how)
            table.tables[table.tables < 0] = page

        def running(one: Step) -> Any:
            try:
                return run(one)
            finally:
                table.tables[table.tables == page] = -1

        patch.setattr(cache, "begin", beginning)
        patch.setattr(self.own, "forward", running)

    def forward(self, slot: int, start: int, rows: int, **how: bool) -> None:
        tokens = self.random.integers(3, self.own.spec.vocab_size, rows).tolist()
        one = Step.of(tokens, start, slot=slot, **how)
        np.testing.assert_array_equal(np.array(self.own.forward(one)), np.array(self.whole.forward(one)))
        self.lengths[slot] = start + rows

    def act(self) -> None:
        """Part of a prompt, an answer, drafts and their verification, a cut, a fork, or a save and a load."""
        slot, other = self.random.permutation(SLOTS)[:2].tolist()
        length, what = self.lengths[slot], self.random.random()
        cut = self.own.cache.reach(slot, int(self.random.integers(0, length + 1)))
        if (what < 0.4 and length < CONTEXT - 300) or not length:
            for _ in range(self.random.integers(1, 7)):
                self.forward(slot, self.lengths[slot], int(self.random.integers(1, ROWS + 1)), prefill=True)
        elif what < 0.6:
            for _ in range(self.random.integers(1, 20)):
                self.forward(slot, self.lengths[slot], 1)
        elif what < 0.75:
            drafted = int(self.random.integers(1, min(SMALL_STEP, self.own.cache.rows_until_flush(slot)) + 1))
            for place in range(drafted):
                self.forward(slot, length + place, 1, draft=True)
            self.forward(slot, length, drafted)
        elif what < 0.85:
            for cache in self.caches:
                cache.trim(slot, cut)
            self.lengths[slot] = cut
        elif what < 0.95:
            for cache in self.caches:
                cache.fork(slot, other, cut)
            self.lengths[other] = cut
        else:
            for cache in self.caches:
                pieces = [{name: np.array(x) for name, x in piece.items()} for piece in cache.export(slot)]
                cache.load(other, length, cache.paged_length(slot), pieces)
            self.lengths[other] = length
        self.released |= has_released(self.own.cache)


@pytest.mark.parametrize(
    ("kv", "backend", "actions"),
    [
        *(pytest.param(kv, backend, 30, id=f"{kv}-{backend}") for kv in ("int8", "int4") for backend in DECODERS),
        *(
            pytest.param(kv, backend, 120, id=f"{kv}-{backend}-long", marks=pytest.mark.slow)
            for kv in KINDS
            for backend in DECODERS
            if backend == "cpu" or kv in QUICK_CACHES
        ),
    ],
)
def test_logits_are_those_of_a_cache_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch, kv: KVKind, backend: str, actions: int
) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOT_GAP", 300)  # they would keep pages that are to be kept anyway
    # Wider than the tokens in half precision of kinds that have them, so that pages are read.
    model = make_model(windowed("wide" if KINDS[kv].windowed else "mixed"), residual_bits=0)
    twins = Twins(DECODERS[backend], model, kv, 1, monkeypatch)
    for _ in range(actions):
        twins.act()
    assert twins.released


@pytest.mark.parametrize("backend", DECODERS)
def test_a_page_for_which_there_is_no_room_is_not_loaded(backend: str) -> None:
    options = DecoderOptions(kv="int8", context=CONTEXT, slots=SLOTS, max_rows=ROWS, threads=1)
    cache = DECODERS[backend](make_model(windowed("mixed"), residual_bits=0), options).cache
    store, random = cache.stores[1], np.random.default_rng(1)
    pages = list(range(cache.tables[1].capacity))
    store.write_pages(pages, {name: filled(x, random) for name, x in store.read_pages(pages).items()})
    before = [stored(store, page) for page in pages]
    given = {name: np.array(x) for name, x in store.read_pages([0, 1]).items()}
    store.write_pages([2, -1], given)
    assert [stored(store, page) for page in pages] == [*before[:2], before[0], *before[3:]]


def filled(like: Any, random: np.random.Generator) -> Any:
    """Random bytes in an array like another."""
    return random.integers(0, 256, like.shape, np.uint8)


def stored(store: Any, page: int) -> bytes:
    """All bytes of a page."""
    return b"".join(array.tobytes() for array in store.read_pages([page]).values())
