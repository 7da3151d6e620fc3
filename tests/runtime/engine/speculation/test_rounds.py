"""Rounds of speculation against decoding one by one: the same tokens, the same logits, the same cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.engine.conversations.conversations import Conversations
from runtime.engine.rows import run_alone
from runtime.engine.speculation import rounds as rounds_module
from runtime.engine.speculation.copying import StepTimes
from runtime.engine.speculation.gamma import FixedGamma
from runtime.engine.speculation.rounds import DecodeContext, Rounds
from runtime.errors import Cancelled
from runtime.kv.kinds import KVKind
from runtime.text.sampling import Draw, Drawn, Sampler, SamplingOptions, log_probabilities
from tests.grid import grid

V = 96
PROMPT = np.random.default_rng(3).integers(0, V, 300).tolist()
GREEDY = SamplingOptions(temperature=0)
Factory = Callable[..., Any]


class Checked:
    """A decoder that asks before each step whether to go on."""

    def __init__(self, decoder: Any, check: Callable[[], None]) -> None:
        self._decoder, self._check = decoder, check

    def forward(self, step: Step) -> Any:
        self._check()
        return self._decoder.forward(step)


class Bench:
    """A decoder with the prompt in slot 0."""

    def __init__(self, backend: type, model: Any, sampling: SamplingOptions, prompt: int, **options: Any) -> None:
        self.decoder = backend(
            model, DecoderOptions(**{"context": 1200, "max_rows": 64, "kv": "hierarchical", **options})
        )
        options_used = self.decoder.options
        self.conversations = Conversations(self.decoder.cache, slots=options_used.slots, context=options_used.context)
        self.sampling, self.prompt = sampling, PROMPT[:prompt]
        self.steps: list[Step] = []

    def logits(self) -> np.ndarray[Any, Any]:
        """Those after the prompt."""
        _, cached = self.conversations.begin(self.prompt)
        for start in range(cached, len(self.prompt), 64):
            rows = self.prompt[start : start + 64]
            logits = self.decoder.forward(Step.of(rows, start, [len(rows) - 1], prefill=True))
            self.conversations.tokens(0).extend(rows)
        self.conversations.release(0)
        return logits[0]

    def run(
        self,
        gamma: int,
        count: int,
        ends: tuple[int, ...] = (),
        check: Callable[[], None] = lambda: None,
        times: StepTimes | None = None,
    ) -> tuple[list[int], list[np.ndarray[Any, Any]], Rounds]:
        """`count` tokens, the logits that they were drawn from, and what counted them. The clock stands still."""
        context = DecodeContext(decoder=self.decoder, conversations=self.conversations, slot=0, clock=lambda: 0.0)
        rounds = Rounds(context, Sampler(self.sampling, self.prompt), FixedGamma(gamma), ends=ends, times=times)
        tokens: list[int] = []
        logits: list[np.ndarray[Any, Any]] = []

        def take(token: int, own: np.ndarray[Any, Any]) -> bool:
            tokens.append(token)
            logits.append(own.copy())
            assert self.conversations.tokens(0) == [*self.prompt, *tokens[:-1]]
            return len(tokens) < count

        run_alone(Checked(self.decoder, check), rounds.decode(self.logits(), take, lambda: count - len(tokens)))
        return tokens, logits, rounds


@pytest.fixture(scope="module")
def model(tiny_model: Factory, tiny_spec: Factory) -> Any:
    return tiny_model(tiny_spec(max_context=2048), bits=3, residual_bits=4)


@pytest.fixture(scope="module")
def sliding(tiny_model: Factory, tiny_spec: Factory) -> Any:
    return tiny_model(tiny_spec(max_context=2048, windows=(150, None)), bits=3, residual_bits=4)


@pytest.mark.parametrize("gamma", grid([1, 3, 6, 11], {3}))
@pytest.mark.parametrize("backend", grid([ReferenceDecoder, CpuDecoder], {CpuDecoder}))
@pytest.mark.parametrize(("k_chunk", "draft_k_chunk"), [(1024, 0), (200, 16), (0, 0)], ids=["residual", "some", "base"])
def test_greedy_tokens_are_the_targets_own(
    model: Any, backend: type, gamma: int, k_chunk: int, draft_k_chunk: int
) -> None:
    """Over several pages, with weights so coarse that many drafts are refused."""
    count = 800
    options = {"k_chunk": k_chunk, "draft_k_chunk": draft_k_chunk}
    alone, own, _ = Bench(backend, model, GREEDY, 30, **options).run(0, count)
    bench = Bench(backend, model, GREEDY, 30, **options)
    tokens, logits, rounds = bench.run(gamma, count)
    assert tokens == alone
    assert all(np.array_equal(a, b) for a, b in zip(own, logits, strict=True))
    assert bench.decoder.cache.paged_length(0) > 400
    counts = rounds.counts
    assert counts.rounds + counts.accepted + counts.plain == pytest.approx(count - 1, abs=gamma)
    if k_chunk == 1024:
        assert 0.05 < counts.accepted / counts.drafted < 0.95


@pytest.mark.slow
def test_two_thousand_tokens_of_the_reference(model: Any) -> None:
    """Across a dozen pages, with every residual, of which drafts have none."""
    options = {"k_chunk": 1024, "context": 2048}
    alone, *_ = Bench(ReferenceDecoder, model, GREEDY, 30, **options).run(0, 2000)
    for gamma in (1, 3, 6, 11):
        tokens, _, rounds = Bench(ReferenceDecoder, model, GREEDY, 30, **options).run(gamma, 2000)
        assert tokens == alone
        assert rounds.counts.accepted < 0.8 * rounds.counts.drafted


@pytest.mark.parametrize("kv", grid(["fp16", "int8", "int4", "kivi2", "gear4"], {"int4"}))
def test_every_kind_of_cache_can_be_drafted_on(model: Any, kv: KVKind) -> None:
    options = {"k_chunk": 1024, "kv": kv}
    alone, own, _ = Bench(CpuDecoder, model, GREEDY, 30, **options).run(0, 500)
    tokens, logits, rounds = Bench(CpuDecoder, model, GREEDY, 30, **options).run(5, 500)
    assert tokens == alone
    assert all(np.array_equal(a, b) for a, b in zip(own, logits, strict=True))
    assert rounds.counts.rounds > 50


class Planted:
    """Drafts of every length from an answer that is known, many with a wrong token in it. In the place of `Copies`."""

    def __init__(self, answer: list[int]) -> None:
        self._answer, self._said = answer, 1
        self._random = np.random.default_rng(0)

    possible = True

    def note(self, token: int) -> None:
        assert token == self._answer[self._said]
        self._said += 1

    def draft(self, most: int, _company: int) -> list[int]:
        count = int(self._random.integers(0, 16))
        found = self._answer[self._said :][: min(count, most)]
        if found and self._random.random() < 0.5:
            at = int(self._random.integers(0, len(found)))
            found[at] = (found[at] + 1) % V
        return found


DRAWN = SamplingOptions(temperature=0.8, top_p=0.9, repetition_penalty=1.05, seed=3)


@pytest.mark.parametrize(
    "kv", grid(["fp16", "int8", "int4", "hierarchical", "kivi2", "gear4"], {"int4", "hierarchical"})
)
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_copied_drafts_change_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch, kv: KVKind, sampling: SamplingOptions
) -> None:
    """The same tokens from the same logits, drawn with a seed too, across pages, whatever is refused of a draft."""
    options = {"kv": kv, "k_chunk": 64}
    alone, own, _ = Bench(CpuDecoder, model, sampling, 100, **options).run(0, 250)
    monkeypatch.setattr(rounds_module, "Copies", lambda *_: Planted(alone))
    tokens, logits, rounds = Bench(CpuDecoder, model, sampling, 100, **options).run(0, 250, times=StepTimes())
    assert tokens == alone
    assert all(np.array_equal(a, b) for a, b in zip(own, logits, strict=True))
    counts = rounds.counts
    assert counts.rounds + counts.accepted + counts.plain == 249
    assert counts.rounds > 20
    assert 0.3 * counts.drafted < counts.accepted < 0.9 * counts.drafted


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("prompt", [PROMPT[:30], PROMPT[:20] * 5], ids=["free", "copying"])
def test_what_is_found_in_the_text_changes_nothing(model: Any, gamma: int, prompt: list[int]) -> None:
    """By itself, and before drafts of the model."""
    found = []
    for times in (None, StepTimes()):
        bench = Bench(CpuDecoder, model, GREEDY, 30, k_chunk=1024)
        bench.prompt = prompt
        found.append(bench.run(gamma, 400, times=times))
    (alone, own, without), (tokens, logits, rounds) = found
    assert tokens == alone
    assert all(np.array_equal(a, b) for a, b in zip(own, logits, strict=True))
    assert rounds.counts.drafted != without.counts.drafted


@pytest.mark.parametrize("kv", grid(["hierarchical", "fp16"], {"hierarchical"}))
def test_sliding_windows(sliding: Any, kv: KVKind) -> None:
    options = {"k_chunk": 1024, "kv": kv}
    alone, own, _ = Bench(CpuDecoder, sliding, GREEDY, 130, **options).run(0, 600)
    tokens, logits, _ = Bench(CpuDecoder, sliding, GREEDY, 130, **options).run(7, 600)
    assert tokens == alone
    assert all(np.array_equal(a, b) for a, b in zip(own, logits, strict=True))


def test_penalties_see_drafted_tokens(model: Any) -> None:
    """A repeated token is penalized within a round as well."""
    sampling = SamplingOptions(temperature=0, repetition_penalty=1.4)
    alone, *_ = Bench(CpuDecoder, model, sampling, 30, k_chunk=1024).run(0, 300)
    tokens, *_ = Bench(CpuDecoder, model, sampling, 30, k_chunk=1024).run(6, 300)
    assert tokens == alone
    assert tokens != Bench(CpuDecoder, model, GREEDY, 30, k_chunk=1024).run(6, 300)[0]


def test_a_seed_gives_the_same_tokens_again(model: Any) -> None:
    sampling = SamplingOptions(temperature=1, top_p=0.9, seed=5)
    first, second = (Bench(CpuDecoder, model, sampling, 30, k_chunk=64).run(4, 200)[0] for _ in range(2))
    assert first == second


def test_nothing_is_drafted_beyond_what_is_wanted_or_behind_an_end(model: Any) -> None:
    bench = Bench(CpuDecoder, model, GREEDY, 30)
    steps: list[Step] = []
    forward = bench.decoder.forward

    def noted(step: Step) -> Any:
        steps.append(step)
        return forward(step)

    bench.decoder.forward = noted
    tokens, _, rounds = bench.run(4, 8)
    # the first token comes of the prompt; then a round of 5, then one of the 2 that are missing
    assert [(step.draft, step.tokens.size) for step in steps if not step.prefill] == [
        *[(True, 1)] * 4,
        (False, 5),
        (True, 1),
        (False, 2),
    ]
    assert (rounds.counts.drafted, rounds.counts.accepted) == (5, 5)
    steps.clear()
    ended, *_ = bench.run(4, 8, ends=(tokens[2],))
    assert ended == tokens
    sizes = [step.tokens.size for step in steps if not step.prefill and not step.draft]
    assert sizes[0] == 3


@pytest.mark.parametrize("after", [1, 3, 4, 5, 6])
def test_an_interrupted_round_leaves_what_was_known(model: Any, after: int) -> None:
    """Wherever in a round the end comes, the conversation goes on as if it had been decoded one by one."""
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Cancelled("stop")

    alone, *_ = Bench(CpuDecoder, model, GREEDY, 250, k_chunk=1024).run(0, 30)
    bench = Bench(CpuDecoder, model, GREEDY, 250, k_chunk=1024)
    with pytest.raises(Cancelled):
        bench.run(3, 30, check=check)
    held = list(bench.conversations.tokens(0))
    assert held == [*bench.prompt, *alone][: len(held)]
    slot, shared = bench.conversations.begin([*held, 7])
    assert (slot, shared) == (0, len(held))
    assert bench.decoder.cache.length(0) == len(held)
    bench.conversations.release(0)
    bench.prompt = PROMPT[:250]
    assert bench.run(3, 30)[0] == alone


class OnDevice:
    """A decoder that keeps its logits, and draws from them as whoever has them would."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.drawn = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draw(self, step: Step, draws: Sequence[Draw]) -> list[Drawn]:
        self.drawn += 1
        (draw,), (logits,) = draws, self._inner.forward(step)
        kept = np.array(logits)
        sampler = Sampler(draw.options, draw.seen.tolist())
        sampler.uniform = lambda: draw.uniform
        token = sampler.draw(kept)
        return [Drawn(token, *log_probabilities(kept, token, 2))]


class Odd:
    """A constraint to odd tokens."""

    def masked(self, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(np.arange(V) % 2 == 1, logits, -np.inf)

    def take(self, token: int) -> None: ...


def taken(bench: Bench, rounds: Rounds, count: int) -> list[tuple[int, Any]]:
    """So many tokens, and what came with each."""
    given: list[tuple[int, Any]] = []

    def take(token: int, own: Any) -> bool:
        given.append((token, own))
        return len(given) < count

    run_alone(bench.decoder, rounds.decode(bench.logits(), take, lambda: count - len(given)))
    return given


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decoder_that_draws_is_asked_for_tokens_alone(model: Any, temperature: float) -> None:
    """The same tokens from the same stream, penalties included; logits stay where they are."""
    sampling = SamplingOptions(temperature=temperature, repetition_penalty=1.1, seed=5)
    place = []
    for wrap in (lambda decoder: decoder, OnDevice):
        bench = Bench(CpuDecoder, model, sampling, 30)
        bench.decoder = wrap(bench.decoder)
        rounds = Rounds(
            DecodeContext(decoder=bench.decoder, conversations=bench.conversations, slot=0),
            Sampler(sampling, bench.prompt), FixedGamma(0), ends=(),
        )  # fmt: skip
        given = taken(bench, rounds, 60)
        place.append([token for token, _ in given])
    assert place[0] == place[1]
    assert bench.decoder.drawn == 59
    assert all(isinstance(own, Drawn) and own.token == token for token, own in given[1:])


def test_a_grammar_decides_on_the_host(model: Any) -> None:
    bench = Bench(CpuDecoder, model, GREEDY, 30)
    decoder = OnDevice(bench.decoder)
    sampler = Sampler(GREEDY, (), Odd())
    rounds = Rounds(
        DecodeContext(decoder=decoder, conversations=bench.conversations, slot=0),
        sampler, FixedGamma(0), ends=(),
    )  # fmt: skip
    bench.decoder = decoder
    tokens = [token for token, _ in taken(bench, rounds, 10)]
    assert decoder.drawn == 0
    assert all(token % 2 for token in tokens)
