"""Pages of layers with a window on the GPU: kernels give what they give where all tokens are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.backends.decoder import DecoderOptions
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.triton.decoder import TritonDecoder
from runtime.kv import groups
from runtime.kv import pages as window_pages
from runtime.kv import states as snapshots
from runtime.kv.kinds import KINDS
from tests.close import assert_close
from tests.runtime.backends.triton.decoding import copy_cache, read_prompt, step
from tests.runtime.backends.triton.test_triton_decoder import SHARING
from tests.runtime.engine.talking import SLOTS, Talk

SLOW = pytest.mark.slow
ALIKE = ("kcvt4", "gear2", "gear-l4", "gear-l2")
"""Kinds whose pages lie as those of `kivi2` or `gear4`; other backends are asked about every kind."""
PROMPT = 600


def poison(cache: Any, patch: pytest.MonkeyPatch) -> None:
    """Let kernels find not a number wherever a page was released."""
    page, begin = cache.tables[1]._take(), cache.begin
    for pool in cache.stores[1].pools.values():
        pool[page] = 255

    def beginning(*given: Any, **how: Any) -> None:
        begin(*given, **how)
        there = cache._there[1]
        there[there < 0] = page

    patch.setattr(cache, "begin", beginning)


@SLOW
def test_any_history_gives_what_a_fresh_prefill_gives(small: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, edits, branches, rejected drafts, saved chats, each compared with the reference decoder's prefill."""
    monkeypatch.setattr(window_pages, "MOST_SNAPSHOTS", 2)
    changes = {**SHARING, "windows": (20, None, None), "max_context": 1024}
    make, model = lambda *how: TritonDecoder(*how, device), small(changes, residual_bits=0)
    talk = Talk(make, model, 1, 0.01, fresh=ReferenceDecoder, longest=300, context=1024)
    talk.run(4)
    assert talk.reused > 100
    assert any(-1 in talk.decoder.cache.tables[1].entries(slot) for slot in range(SLOTS))


@pytest.mark.parametrize(
    ("kv", "every", "changes"),
    [
        pytest.param("fp16", 3, {}, id="few"),
        *(pytest.param(kv, 1, {}, id=kv, marks=SLOW) for kv in KINDS if kv not in ALIKE),
        pytest.param("int4", 1, SHARING, id="int4-shared", marks=SLOW),
    ],
)
def test_released_pages_are_never_read(
    small: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    kv: Any,
    every: int,
    changes: dict[str, Any],
) -> None:
    """A token, drafts, their verification, a prompt's rows and a fork, behind a prompt that the reference read."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_GAP", 2048)  # they would keep pages that are to be kept anyway
    window = 150 if KINDS[kv].windowed else 20  # wider than the tokens in half precision, so that pages are read
    kinds = {"num_layers": 2, **changes, "windows": (window, *changes.get("windows", (None, None))[1:])}
    model = small({**kinds, "max_context": 2048}, residual_bits=0)
    options = DecoderOptions(kv=kv, context=2048, slots=2, max_rows=20)
    tokens = np.random.default_rng(3).integers(3, 61, PROMPT).tolist()

    def opened() -> TritonDecoder:
        theirs, ours = ReferenceDecoder(model, options), TritonDecoder(model, options, device)
        read_prompt(theirs, tokens, options.max_rows)
        copy_cache(theirs, ours)
        return ours

    own = opened()
    with monkeypatch.context() as only_here:
        only_here.setattr(groups, "_CLEARLY_LESS", 0.0)
        whole = opened()
    assert [len(each.cache.tables) for each in (own, whole)] == [2, 1]
    assert own.kv_bytes < whole.kv_bytes
    assert -1 in own.cache.tables[1].entries(0)
    poison(own.cache, monkeypatch)
    at = PROMPT
    steps = [
        step([17], at),
        step([18], at + 1, draft=True),
        step([19], at + 2, draft=True),
        step([18, 20, 21], at + 1, rows=[0, 1, 2]),
        step(tokens[:20], at + 4, rows=[0, 19], prefill=True),
    ]
    for one in steps[::every]:
        assert_close(np.array(own.forward(one)), np.array(whole.forward(one)), "exact")
    for each in (own, whole):
        each.cache.fork(0, 1, at + 3)
    one = step([5], at + 3, slot=1)
    assert_close(np.array(own.forward(one)), np.array(whole.forward(one)), "exact")
