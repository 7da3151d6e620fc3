"""Rounds give tokens distributed as the target's own, by rejection sampling; a broken one is detected."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.backends.decoder import Step
from runtime.engine.conversations.conversations import Conversations
from runtime.engine.rows import run_alone
from runtime.engine.speculation import acceptance
from runtime.engine.speculation.acceptance import Proposal, accept, beyond
from runtime.engine.speculation.copying import StepTimes
from runtime.engine.speculation.gamma import FixedGamma
from runtime.engine.speculation.rounds import DecodeContext, Rounds
from runtime.text.sampling import Distribution, Sampler, SamplingOptions

V = 12
SAMPLES = 2000
UNLIKELY = 1e-4
"""A right sampler fails one check in so many; a seed is fixed, so it either always does or never."""
FIRST = 5
"""The token before the drawn ones, always the same."""


def logits_of(seed: int) -> np.ndarray:
    """Logits [4, V], alike from row to row, so that tokens like to come again."""
    random = np.random.default_rng(seed)
    return (2 * random.standard_normal(V) + 0.5 * random.standard_normal((4, V))).astype(np.float32)


class Table:
    """A decoder whose logits hang on the position behind the prompt alone, whatever token came before."""

    cache = None
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
    sampler, counts = Sampler(options), np.zeros((V, V))
    decoder: Any = Table(target, draft, len(prompt))
    certain = np.where(np.arange(V) == FIRST, 100, 0).astype(np.float32)
    for _ in range(SAMPLES):
        sampler._seen, sampler._known = sampler._seen[:0], set()
        context = DecodeContext(decoder=decoder, conversations=Conversations(None, slots=1, context=16), slot=0)
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
    """Probabilities [V, V] of the target's own two tokens after `FIRST`."""
    sampler, wanted = Sampler(options), np.zeros((V, V))
    first = sampler.distribution(target[0], [FIRST])
    for token in range(V):
        second = sampler.distribution(target[1], [FIRST, token])
        own = first.probability(token)
        wanted[token] = [own * second.probability(other) for other in range(V)]
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
    "not-corrected-at-all": lambda p, q: Distribution(np.arange(V), np.ones(V)),
}


@pytest.mark.parametrize("instead", BROKEN.values(), ids=BROKEN)
def test_a_broken_correction_is_noticed(monkeypatch: pytest.MonkeyPatch, instead: Callable[..., Distribution]) -> None:
    monkeypatch.setattr(acceptance, "beyond", instead)
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
    target = np.eye(V, dtype=np.float32)[[3, 5, 7, 9]]
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
