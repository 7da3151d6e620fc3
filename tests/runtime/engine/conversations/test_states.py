"""Conversations with models whose layers have states, or read each other's caches: whatever was said, cut back, forked,
drafted or saved before, the next token is the one that a fresh prefill gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from models.spec import DeltaSpec, ModelSpec
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.drafting import LARGEST_GAMMA
from runtime.engine.conversations.conversations import Conversations
from runtime.errors import RequestError
from runtime.kv import states
from runtime.kv.states import RING, SMALL_STEP, States, states_bytes
from tests.runtime.conftest import SHARED

Tokens = list[int]
CONTEXT, ROWS, SLOTS = 256, 40, 3
DECODERS: dict[str, Callable[..., Any]] = {"reference": ReferenceDecoder, "cpu": CpuDecoder}
MEAN = {"reference": 0.002, "cpu": 0.05}
"""Largest mean error of a logit, of the spread of logits: keys and values are half precision, and the CPU rounds
activations to INT8. A wrong state is off by the spread."""


HYBRIDS: dict[str, dict[str, Any]] = {
    "convolution": {"mixers": ("convolution", "attention", "convolution"), "conv_bias": True},
    "delta": {
        "mixers": ("delta", "attention", "delta"),
        "delta": DeltaSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=24),
        "gated": True,
    },
}


def hybrid(tiny_spec: Callable[..., ModelSpec], mixer: str = "convolution") -> ModelSpec:
    if mixer == "shared":
        return tiny_spec(max_context=CONTEXT, **SHARED)
    return tiny_spec(num_layers=3, taps=4, qk_norm=True, max_context=CONTEXT, **HYBRIDS[mixer])


class Talk:
    """Conversations in the slots of a decoder, of which each answer is compared with a fresh decoder's."""

    def __init__(self, make: Callable[..., Any], model: Any, seed: int, error: float) -> None:
        options = DecoderOptions(kv="fp16", context=CONTEXT, slots=SLOTS, max_rows=ROWS, threads=1)
        self.decoder = make(model, options)
        self.fresh = make(model, DecoderOptions(kv="fp16", context=CONTEXT, max_rows=CONTEXT, threads=1))
        self.conversations = Conversations(self.decoder.cache, slots=SLOTS, context=CONTEXT)
        self.random, self.error = np.random.default_rng(seed), error
        self.said: list[Tokens] = []
        self.reused = 0

    def words(self, most: int) -> Tokens:
        return self.random.integers(3, self.decoder.spec.vocab_size, self.random.integers(1, most)).tolist()

    def forward(self, slot: int, tokens: Tokens, start: int, **how: bool) -> Any:
        return self.decoder.forward(Step.of(tokens, start, slot=slot, **how)).copy()

    def check(self, logits: Any, tokens: Tokens) -> None:
        self.fresh.cache.clear(0)
        expected = self.fresh.forward(Step.of(tokens, 0, [len(tokens) - 1], prefill=True))[0]
        assert np.abs(logits - expected).mean() <= self.error * expected.std(), len(tokens)

    def prompt(self) -> Tokens:
        """A new chat, the next message, the last one again, an edited message, or a branch in an answer."""
        if not self.said or self.random.random() < 0.15:
            return self.words(90)
        said = self.said[self.random.integers(len(self.said))]
        kept = len(said) if self.random.random() < 0.5 else int(self.random.integers(1, len(said) + 1))
        return [*said[:kept], *self.words(40)][: CONTEXT - 60]

    def exchange(self) -> None:
        """A prompt, read in parts, and an answer that is stopped somewhere."""
        prompt = self.prompt()
        slot, cached = self.conversations.begin(prompt)
        held = self.conversations.tokens(slot)
        assert self.decoder.cache.length(slot) == cached == len(held)
        self.reused += cached
        while len(held) < len(prompt):
            part = prompt[len(held) : len(held) + int(self.random.integers(1, ROWS + 1))]
            logits = self.forward(slot, part, len(held), prefill=True)
            held.extend(part)
        self.check(logits[-1], held)
        for _ in range(self.random.integers(0, 5)):
            self.round(slot, held)
        self.said.append(list(held))
        self.conversations.release(slot)

    def round(self, slot: int, held: Tokens) -> None:
        """A token of the answer, or several that verify a draft, of which some are rejected."""
        token, draft = self.words(2)[0], self.words(SMALL_STEP) if self.random.random() < 0.7 else []
        start = len(held)
        if draft and self.random.random() < 0.5:  # by the model itself, a token at a time
            for at, each in enumerate([token, *draft][:-1]):
                self.forward(slot, [each], start + at, draft=True)
        logits = self.forward(slot, [token, *draft], start)
        accepted = int(self.random.integers(0, len(draft) + 1))
        held.extend([token, *draft[:accepted]])
        self.conversations.cut(slot, len(held))
        self.check(logits[accepted], held)

    def save_and_load(self) -> None:
        """A conversation goes to a file and back, into another slot."""
        slot = max(range(SLOTS), key=lambda slot: len(self.conversations.tokens(slot)))
        cache, tokens = self.decoder.cache, list(self.conversations.tokens(slot))
        pieces = [{name: np.array(x) for name, x in piece.items()} for piece in cache.export(slot)]
        paged, other = cache.paged_length(slot), (slot + 1) % SLOTS
        self.conversations.clear(other)
        self.conversations.clear(slot)
        cache.load(other, len(tokens), paged, pieces)
        self.conversations.tokens(other).extend(tokens)


@pytest.fixture
def snapshots_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SNAPSHOT_GAP", 8)


@pytest.mark.usefixtures("snapshots_everywhere")
@pytest.mark.parametrize(
    ("backend", "seeds"),
    [
        pytest.param("reference", range(3), id="reference-few"),
        pytest.param("cpu", range(3), id="cpu-few"),
        pytest.param("reference", range(3, 40), id="reference-many", marks=pytest.mark.slow),
        pytest.param("cpu", range(3, 200), id="cpu-many", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mixer", [*HYBRIDS, "shared"])
def test_any_history_gives_what_a_fresh_prefill_gives(
    tiny_model: Any, tiny_spec: Any, backend: str, seeds: range, mixer: str
) -> None:
    model, reused = tiny_model(hybrid(tiny_spec, mixer), residual_bits=0), 0
    for name in model.vectors:
        model.vectors[name] *= -0.3 if name.endswith("decay") else 1
    for seed in seeds:
        talk = Talk(DECODERS[backend], model, seed, MEAN[backend])
        for _ in range(6):
            talk.exchange()
            if talk.random.random() < 0.2:
                talk.save_and_load()
        reused += talk.reused
    assert reused > 40 * len(seeds)


def test_drafts_are_cut_back_and_long_steps_are_not(tiny_spec: Any) -> None:
    assert SMALL_STEP == LARGEST_GAMMA + 1
    own = States(hybrid(tiny_spec), 2)
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


def test_snapshots_are_shared_thinned_and_freed(tiny_spec: Any) -> None:
    own = States(hybrid(tiny_spec), 2)
    for start in range(0, 2000, 64):
        own.begin(0, start, start + 64, draft=False)
    places = sorted(own._snapshots[0])
    assert len(places) == states.MOST_SNAPSHOTS
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


def test_layers_without_a_cache_take_no_cache_memory(tiny_model: Any, tiny_spec: Any) -> None:
    options = DecoderOptions(kv="int4", context=CONTEXT, slots=2, max_rows=ROWS)
    spec = hybrid(tiny_spec)
    own, plain = (ReferenceDecoder(tiny_model(each), options) for each in (spec, tiny_spec(num_layers=1)))
    assert own.kv_bytes - plain.kv_bytes == states_bytes(spec, 2)
    assert states_bytes(spec, 2) > RING * 64 * 4 * 2 * 2


def test_saved_states_that_do_not_fit_leave_the_slot_empty(tiny_model: Any, tiny_spec: Any) -> None:
    decoder = ReferenceDecoder(tiny_model(hybrid(tiny_spec)), DecoderOptions(kv="fp16", context=CONTEXT, max_rows=ROWS))
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
