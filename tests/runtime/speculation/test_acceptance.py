"""Rejection sampling gives the target's own distribution; a broken one is noticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from runtime.sampling import Distribution, Sampler, SamplingOptions
from runtime.speculation import acceptance
from runtime.speculation.acceptance import Proposal, accept, beyond

V = 12
SAMPLES = 20_000
UNLIKELY = 1e-4
"""A right sampler fails one check in so many; a seed is fixed, so it either always does or never."""


def logits_of(seed: int, rows: int) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal((rows, V))).astype(np.float32)


def draw_pairs(options: SamplingOptions, target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """Counts [V, V] of the first two tokens of rounds; logits are the same whatever token came before."""
    sampler, counts = Sampler(options), np.zeros((V, V))
    for _ in range(SAMPLES):
        drawn_from, tokens = [], []
        for row in draft:
            drawn_from.append(sampler.distribution(row, tokens))
            tokens.append(sampler.pick(drawn_from[-1]))
        given = accept(Proposal(tokens=tokens, drawn_from=drawn_from), target, sampler)
        if len(given) == 1:  # the next round would begin here
            given.append(sampler.pick(sampler.distribution(target[1], given)))
        counts[given[0], given[1]] += 1
    return counts


def expected_pairs(options: SamplingOptions, target: np.ndarray) -> np.ndarray:
    """Probabilities [V, V] of the target's own first two tokens."""
    sampler, wanted = Sampler(options), np.zeros((V, V))
    first = sampler.distribution(target[0])
    for token in range(V):
        second = sampler.distribution(target[1], [token])
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
    target = logits_of(0, 3)
    draft = alike * target[:2] + (1 - alike) * logits_of(1, 2)
    counts = draw_pairs(options, target, draft.astype(np.float32))
    assert p_value(counts, expected_pairs(options, target)) > UNLIKELY


BROKEN: dict[str, Callable[..., Distribution]] = {
    "corrected-from-the-target": lambda p, q: p,
    "corrected-from-the-draft": lambda p, q: q,
    "not-corrected-at-all": lambda p, q: Distribution(np.arange(V), np.ones(V)),
}


@pytest.mark.parametrize("instead", BROKEN.values(), ids=BROKEN)
def test_a_broken_correction_is_noticed(monkeypatch: pytest.MonkeyPatch, instead: Callable[..., Distribution]) -> None:
    monkeypatch.setattr(acceptance, "beyond", instead)
    options, target = WAYS["top-p"], logits_of(0, 3)
    draft = (0.3 * target[:2] + 0.7 * logits_of(1, 2)).astype(np.float32)
    assert p_value(draw_pairs(options, target, draft), expected_pairs(options, target)) < UNLIKELY


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
