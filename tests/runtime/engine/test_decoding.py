"""Rounds of speculation against decoding one by one: the same tokens, or tokens distributed as the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.engine import decoding
from runtime.engine.conversations import Conversations
from runtime.engine.copying import StepTimes
from runtime.engine.decoding import DecodeContext, Proposal, Rounds, accept, beyond
from runtime.engine.gamma import FixedGamma
from runtime.engine.scheduler import run_alone
from runtime.errors import Cancelled
from runtime.kv.kinds import KVKind
from runtime.text.sampling import Distribution, Draw, Drawn, Sampler, SamplingOptions, log_probabilities
from tests.grid import grid
from tests.runtime.backends.cpu.test_cpu_exact import Source
from tests.runtime.conftest import make_model, make_spec

V = 96
PROMPT = np.random.default_rng(3).integers(0, V, 300).tolist()
GREEDY = SamplingOptions(temperature=0)


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
def model() -> Any:
    return make_model(make_spec(max_context=2048), bits=3, residual_bits=4)


@pytest.fixture(scope="module")
def sliding() -> Any:
    return make_model(make_spec(max_context=2048, windows=(150, None)), bits=3, residual_bits=4)


@pytest.mark.parametrize(
    ("backend", "gamma", "count"),
    [
        (CpuDecoder, 3, 400),
        *(pytest.param(CpuDecoder, gamma, 400, marks=pytest.mark.slow) for gamma in (1, 11)),
        pytest.param(ReferenceDecoder, 6, 300, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("k_chunk", "draft_k_chunk"), [(1024, 0), (200, 16), (0, 0)], ids=["residual", "some", "base"])
def test_greedy_tokens_are_the_targets_own(
    model: Any, backend: type, gamma: int, count: int, k_chunk: int, draft_k_chunk: int
) -> None:
    """Over several pages, with weights so coarse that many drafts are refused."""
    options = {"k_chunk": k_chunk, "draft_k_chunk": draft_k_chunk}
    alone, own, _ = Bench(backend, model, GREEDY, 30, **options).run(0, count)
    bench = Bench(backend, model, GREEDY, 30, **options)
    tokens, logits, rounds = bench.run(gamma, count)
    assert tokens == alone
    assert all(np.array_equal(a, b) for a, b in zip(own, logits, strict=True))
    assert bench.decoder.cache.paged_length(0) >= 128
    counts = rounds.counts
    assert counts.rounds + counts.accepted + counts.plain == pytest.approx(count - 1, abs=gamma)
    if k_chunk == 1024:
        assert 0.05 < counts.accepted / counts.drafted < 0.95


@pytest.mark.parametrize("kv", grid(["fp16", "int8", "int4", "kivi2", "gear4"], {"int4"}))
def test_every_kind_of_cache_can_be_drafted_on(model: Any, kv: KVKind) -> None:
    options = {"k_chunk": 1024, "kv": kv}
    alone, own, _ = Bench(CpuDecoder, model, GREEDY, 30, **options).run(0, 500)
    tokens, logits, rounds = Bench(CpuDecoder, model, GREEDY, 30, **options).run(5, 500)
    assert tokens == alone
    assert all(np.array_equal(a, b) for a, b in zip(own, logits, strict=True))
    assert rounds.counts.rounds > 50


@pytest.mark.parametrize("gamma", [3, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv", ["fp16", "int4"])
def test_the_sources_own_weights_verify(model: Any, kv: KVKind, gamma: int) -> None:
    options = {"exact": Source(model, "bf16"), "kv": kv}
    alone, own, _ = Bench(CpuDecoder, model, GREEDY, 30, **options).run(0, 400)
    tokens, logits, rounds = Bench(CpuDecoder, model, GREEDY, 30, **options).run(gamma, 400)
    assert tokens == alone
    assert all(np.array_equal(a, b) for a, b in zip(own, logits, strict=True))
    assert 0.05 < rounds.counts.accepted / rounds.counts.drafted < 0.95


class Planted:
    """Drafts of every length from an answer that is known, many with a wrong token in it. In the place of `Copies`."""

    def __init__(self, answer: list[int]) -> None:
        self._answer, self._said = answer, 1
        self._random = np.random.default_rng(0)

    possible = True

    def note(self, token: int) -> None:
        assert token == self._answer[self._said]
        self._said += 1

    def draft(self, most: int, _company: int, _others: float) -> list[int]:
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
    monkeypatch.setattr(decoding, "Copies", lambda *_: Planted(alone))
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


TOY_V = 12
SAMPLES = 2000
UNLIKELY = 1e-4
"""A right sampler fails one check in so many; a seed is fixed, so it either always does or never."""
FIRST = 5
"""The token before the drawn ones, always the same."""


def logits_of(seed: int) -> np.ndarray:
    """Logits [4, TOY_V], alike from row to row, so that tokens like to come again."""
    random = np.random.default_rng(seed)
    return (2 * random.standard_normal(TOY_V) + 0.5 * random.standard_normal((4, TOY_V))).astype(np.float32)


class Table:
    """A decoder whose logits hang on the position behind the prompt alone, whatever token came before."""

    cache: Any = SimpleNamespace(length=lambda slot: 0, batch_invariant_rows=lambda slot: 16)
    options = SimpleNamespace(max_rows=16)

    def __init__(self, target: np.ndarray, draft: np.ndarray, prompt: int = 0) -> None:
        self._target, self._draft, self._prompt = target, draft, prompt

    def forward(self, step: Step) -> Any:
        return (self._draft if step.draft else self._target)[step.positions - self._prompt]


def draw_pairs(
    options: SamplingOptions, target: np.ndarray, draft: np.ndarray, copied: tuple[int, ...] = ()
) -> np.ndarray:
    """Counts [V, V] of the first two tokens that rounds of two drafts give after `FIRST`, by the model or copied."""
    prompt = [1, 2, FIRST, *copied, 1, 2] if copied else []
    sampler, counts = Sampler(options), np.zeros((TOY_V, TOY_V))
    decoder: Any = Table(target, draft, len(prompt))
    certain = np.where(np.arange(TOY_V) == FIRST, 100, 0).astype(np.float32)
    for _ in range(SAMPLES):
        sampler._seen, sampler._times = sampler._seen[:0], {}
        context = DecodeContext(
            decoder=decoder, conversations=Conversations(decoder.cache, slots=1, context=16), slot=0
        )
        context.conversations.tokens(0).extend(prompt)
        tokens: list[int] = []

        def take(token: int, _own: object, tokens: list[int] = tokens) -> bool:
            tokens.append(token)
            return len(tokens) < 3

        rounds = Rounds(context, sampler, FixedGamma(0 if copied else 2), ends=(), times=CHEAP if copied else None)
        run_alone(decoder, rounds.decode(certain, take, lambda: 3))
        assert tokens[0] == FIRST
        assert rounds.counts.plain <= bool(copied)  # a copied draft may have said the first token alone
        assert rounds.counts.rounds
        counts[tokens[1], tokens[2]] += 1
    return counts


class Cheap(StepTimes):
    """Steps of several rows that take as long as one of a single row: every match is worth a draft."""

    @property
    def short(self) -> bool:
        """Never, however fast the table answers."""
        return False

    def ratio(self, rows: int) -> float:
        """Always the same."""
        return 1.0


CHEAP = Cheap()


def expected_pairs(options: SamplingOptions, target: np.ndarray) -> np.ndarray:
    """Probabilities [TOY_V, TOY_V] of the target's own two tokens after `FIRST`."""
    sampler, wanted = Sampler(options), np.zeros((TOY_V, TOY_V))
    first = sampler.distribution(target[0], [FIRST])
    for token in range(TOY_V):
        second = sampler.distribution(target[1], [FIRST, token])
        own = first.probability(token)
        wanted[token] = [own * second.probability(other) for other in range(TOY_V)]
    return wanted


def p_value(counts: np.ndarray, wanted: np.ndarray) -> float:
    """Of Pearson's chi-squared test; 0 where something came that cannot."""
    possible = wanted > 0
    if counts[~possible].any():
        return 0.0
    often = possible & (wanted * counts.sum() >= 5)
    expected, found = list(wanted[often] * counts.sum()), list(counts[often])
    rest = possible & ~often
    if rest.any():
        expected.append(wanted[rest].sum() * counts.sum())
        found.append(counts[rest].sum())
    statistic = sum((o - e) ** 2 / e for o, e in zip(found, expected, strict=True))
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


WAYS = {
    "plain": SamplingOptions(temperature=1, top_p=1, seed=1),
    "top-p": SamplingOptions(temperature=1, top_p=0.8, seed=2),
    "top-k-cold": SamplingOptions(temperature=0.6, top_p=1, top_k=4, seed=3),
    "min-p-penalty": SamplingOptions(temperature=1.2, top_p=1, min_p=0.1, repetition_penalty=1.5, seed=4),
    "counts": SamplingOptions(temperature=1, top_p=1, presence_penalty=1.5, frequency_penalty=0.7, seed=5),
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("alike", [0.9, 0.3], ids=["near", "far"])
def test_tokens_are_distributed_as_the_targets_own(options: SamplingOptions, alike: float) -> None:
    target, other = logits_of(0), logits_of(1)
    counts = draw_pairs(options, target, alike * target + (1 - alike) * other)
    assert p_value(counts, expected_pairs(options, target)) > UNLIKELY


BROKEN: dict[str, Callable[..., Distribution]] = {
    "corrected-from-the-target": lambda p, q: p,
    "corrected-from-the-draft": lambda p, q: q,
    "not-corrected-at-all": lambda p, q: Distribution(np.arange(TOY_V), np.ones(TOY_V)),
}


@pytest.mark.parametrize("instead", BROKEN.values(), ids=BROKEN)
def test_a_broken_correction_is_noticed(monkeypatch: pytest.MonkeyPatch, instead: Callable[..., Distribution]) -> None:
    monkeypatch.setattr(decoding, "beyond", instead)
    options, target, other = WAYS["top-p"], logits_of(0), logits_of(1)
    counts = draw_pairs(options, target, 0.3 * target + 0.7 * other)
    assert p_value(counts, expected_pairs(options, target)) < UNLIKELY


COPIED = {"likely": (int(logits_of(0)[0].argmax()), int(logits_of(0)[1].argmax())), "any": (7, 3)}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("copied", COPIED.values(), ids=COPIED)
def test_behind_copied_drafts_too(options: SamplingOptions, copied: tuple[int, int]) -> None:
    target = logits_of(0)
    assert p_value(draw_pairs(options, target, target, copied), expected_pairs(options, target)) > UNLIKELY


def test_a_refused_copy_that_is_drawn_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept with its probability, but in its place one from the whole distribution and not from what is left of it."""

    def broken(self: Rounds, token: int, start: int, copied: list[int]) -> Any:
        logits, given = (yield self._rows([token, *copied], start)), []
        for row, expected in zip(logits, [*copied, None], strict=True):
            p = self._sampler.distribution(row, [each for each, _ in given])
            keep = expected is not None and self._sampler.uniform() < p.probability(expected)
            given.append((expected if keep else self._sampler.pick(p), row))
            if not keep:
                return given
        return given

    monkeypatch.setattr(Rounds, "_verified", broken)
    options, target = WAYS["top-p"], logits_of(0)
    counts = draw_pairs(options, target, target, COPIED["likely"])
    assert p_value(counts, expected_pairs(options, target)) < UNLIKELY


def test_greedy_tokens_stay_up_to_the_first_that_differs() -> None:
    sampler = Sampler(SamplingOptions(temperature=0))
    target = np.eye(TOY_V, dtype=np.float32)[[3, 5, 7, 9]]
    for tokens, wanted in (([3, 5, 7], [3, 5, 7, 9]), ([3, 4, 7], [3, 5]), ([1, 5, 7], [3]), ([], [3])):
        drawn_from = [Distribution(np.array([token]), np.ones(1)) for token in tokens]
        assert accept(Proposal(tokens=tokens, drawn_from=drawn_from), target, sampler) == wanted


def test_what_one_distribution_has_beyond_another() -> None:
    p = Distribution(np.array([1, 4, 6]), np.array([2.0, 1.0, 1.0]))
    q = Distribution(np.array([0, 4, 7]), np.array([1.0, 3.0, 0.0]))
    found = beyond(p, q)
    assert found.tokens.tolist() == [1, 6]
    assert found.weights.tolist() == [0.5, 0.25]
    assert beyond(p, p) is p


def test_probabilities_of_single_tokens() -> None:
    p = Distribution(np.array([1, 4, 6]), np.array([2.0, 1.0, 1.0]))
    assert [p.probability(token) for token in (0, 1, 4, 5, 6, 7)] == [0, 0.5, 0.25, 0, 0.25, 0]
