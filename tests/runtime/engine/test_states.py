"""Conversations with models whose layers have states, read each other's caches or have latents: whatever was said, cut
back, forked, drafted or saved before, the next token is the one that a fresh prefill gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.drafting import LARGEST_GAMMA
from runtime.errors import RequestError
from runtime.kv import states as snapshots
from runtime.kv.states import RING, SMALL_STEP, States, states_bytes
from tests.runtime.conftest import make_model, make_spec
from tests.runtime.engine.talking import CONTEXT, HYBRIDS, ROWS, Talk, decaying, hybrid

DECODERS: dict[str, Callable[..., Any]] = {"reference": ReferenceDecoder, "cpu": CpuDecoder}
MEAN = {"reference": 0.002, "cpu": 0.05}
"""See `Talk`: keys and values are half precision, and the CPU rounds activations to INT8."""


@pytest.fixture
def snapshots_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOT_GAP", 8)


@pytest.mark.usefixtures("snapshots_everywhere")
@pytest.mark.parametrize(
    ("backend", "seeds"),
    [
        pytest.param("reference", range(1), id="reference-few"),
        pytest.param("cpu", range(3), id="cpu-few"),
        pytest.param("reference", range(1, 6), id="reference-many", marks=pytest.mark.slow),
        pytest.param("cpu", range(3, 200), id="cpu-many", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mixer", [*HYBRIDS, "shared", "latents", "streams"])
def test_any_history_gives_what_a_fresh_prefill_gives(backend: str, seeds: range, mixer: str) -> None:
    model, reused = decaying(make_model(hybrid(mixer), residual_bits=0)), 0
    for seed in seeds:
        talk = Talk(DECODERS[backend], model, seed, MEAN[backend])
        talk.run(6)
        reused += talk.reused
    assert reused > 40 * len(seeds)


def test_drafts_are_cut_back_and_long_steps_are_not() -> None:
    assert SMALL_STEP == LARGEST_GAMMA + 1
    own = States(hybrid(), 2)
    own.begin(0, 0, 100, draft=False)
    assert (own.reach(0, 100), own.reach(0, 99)) == (100, 0)
    own.begin(0, 100, 100 + SMALL_STEP, draft=False)
    assert [own.reach(0, length) for length in (116, 103, 100, 99)] == [116, 103, 100, 0]
    own.trim(0, 103)
    for drafted in range(5):
        own.begin(0, 103 + drafted, 104 + drafted, draft=True)
    assert (own.reach(0, 103), own.reach(0, 102)) == (103, 0)
    own.begin(0, 103, 120, draft=False)  # one row more than a small step has: absorbed at once
    assert own.reach(0, 119) == 103  # a snapshot was taken before it
    with pytest.raises(RequestError, match="it can be cut back to 103"):
        own.check(0, 110, 111, draft=False)
    with pytest.raises(RequestError, match="too many to draft"):
        own.check(0, 120, 120 + 2 * SMALL_STEP + 1, draft=True)


def test_a_shift_moves_what_is_recent_along() -> None:
    own, rng = States(hybrid(), 2), np.random.default_rng(3)
    x = rng.standard_normal((9, own.shapes[0].inputs)).astype(np.float32)
    own.begin(1, 0, 9, draft=False)
    own.note(0, 1, 0, x)
    own.shift(1, RING + 7)
    assert np.array_equal(own.inputs(0, 1, RING + 7, RING + 16), x)


def test_snapshots_are_shared_thinned_and_freed() -> None:
    own = States(hybrid(), 2)
    for start in range(0, 2000, 64):
        own.begin(0, start, start + 64, draft=False)
    places = sorted(own._snapshots[0])
    assert len(places) == snapshots.MOST_SNAPSHOTS
    assert places[-1] == 1984
    gaps = np.diff(places)
    assert gaps[0] > gaps[-1]
    own.fork(0, 1, places[2])
    assert sorted(own._snapshots[1]) == places[:3]
    assert sum(own._references) == len(places) + 3
    own.clear(0)
    assert (own.reach(1, places[2]), own.reach(1, places[2] - 1)) == (places[2], places[1])
    own.clear(1)
    assert sum(own._references) == 0


def test_layers_without_a_cache_take_no_cache_memory() -> None:
    options = DecoderOptions(kv="int4", context=CONTEXT, slots=2, max_rows=ROWS)
    spec = hybrid()
    own, plain = (ReferenceDecoder(make_model(each), options) for each in (spec, make_spec(num_layers=1)))
    assert own.kv_bytes - plain.kv_bytes == states_bytes(spec, 2)
    assert states_bytes(spec, 2) > RING * 64 * 4 * 2 * 2


def test_saved_states_that_do_not_fit_leave_the_slot_empty() -> None:
    decoder = ReferenceDecoder(make_model(hybrid()), DecoderOptions(kv="fp16", context=CONTEXT, max_rows=ROWS))
    decoder.forward(Step.of(range(3, 33), prefill=True))
    decoder.forward(Step.of([5], 30))
    pieces = [{name: np.array(x) for name, x in piece.items()} for piece in decoder.cache.export(0)]
    for damaged in ({"absorbed": np.array([32], np.int32)}, {"absorbed": np.array([0], np.int32)}, {"recent.0": 0}):
        broken = [*pieces[:-1], {**pieces[-1], **{name: np.asarray(x) for name, x in damaged.items()}}]
        with pytest.raises(RequestError, match="saved"):
            decoder.cache.load(0, 31, 31, broken)
        assert (decoder.cache.length(0), decoder.cache.states.reach(0, 0)) == (0, 0)
    decoder.cache.load(0, 31, 31, pieces)
    assert decoder.cache.reach(0, 30) == 30


def test_a_verification_is_a_small_step() -> None:
    assert SMALL_STEP == LARGEST_GAMMA + 1
