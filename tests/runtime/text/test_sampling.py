"""Samplers against plain definitions over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import RequestError
from runtime.text.sampling import Sampler, SamplingOptions, filtered, log_probabilities
from tests.close import Tolerance, assert_close

V = 200


def logits(seed: int = 0, size: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def options(**changes: Any) -> SamplingOptions:
    return SamplingOptions(**{"temperature": 1.0, "top_p": 1.0, **changes})


def slow(x: np.ndarray, chosen: SamplingOptions) -> dict[int, float]:
    """The filters by full sorts and loops."""
    weights = np.exp((x.astype(np.float64) - x.max()) / chosen.temperature)
    kept = sorted((i for i in range(x.size) if weights[i] > np.exp(-30)), key=lambda i: (-weights[i], i))
    if chosen.top_k:
        kept = kept[: chosen.top_k]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += weights[i]
        if mass >= chosen.top_p * total and chosen.top_p < 1:
            break
    kept = [i for i in nucleus if weights[i] >= chosen.min_p * weights.max()]
    return {i: weights[i] for i in kept}


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 2, 17, V]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 500]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_filters_keep_what_the_definitions_keep(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    chosen = options(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    x = logits(seed, size)
    tokens, weights = filtered(x, chosen)
    expected = slow(x, chosen)
    assert tokens.tolist() == sorted(expected)
    assert_close(weights, [expected[i] for i in tokens.tolist()], "relative")


def test_draws_follow_the_distribution() -> None:
    x = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(options(seed=1))
    counts = np.bincount([sampler.draw(x) for _ in range(20000)], minlength=4) / 20000
    assert_close(counts, [0.5, 0.3, 0.15, 0.05], Tolerance(atol=0.015, why="four deviations of so many draws"))


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}]
)
def test_greedy_in_all_its_spellings(changes: dict[str, float]) -> None:
    for seed in range(20):
        assert Sampler(options(**changes)).draw(logits(seed)) == int(logits(seed).argmax())


def test_the_same_seed_draws_the_same() -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(options(seed=seed))
        return [sampler.draw(logits(i)) for i in range(30)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)
    assert draws(-1) == draws(2**64 - 1)


def test_repetition_penalty_weakens_what_was_seen() -> None:
    x = np.array([2.0, 1.9, -1.0], np.float32)
    sampler = Sampler(options(temperature=0.0, repetition_penalty=1.5), seen=[2])
    assert [sampler.draw(x), sampler.draw(x), sampler.draw(x)] == [0, 1, 0]
    assert x.tolist() == np.array([2.0, 1.9, -1.0], np.float32).tolist()
    only_negative = Sampler(options(temperature=0.0, repetition_penalty=2.0), seen=[0])
    assert only_negative.draw(np.array([-1.0, -1.5], np.float32)) == 1


def test_penalties_on_counts_are_those_of_openais_formula() -> None:
    """logits[j] -= count[j] * frequency + (count[j] > 0) * presence, with those of a draft counted too."""
    x, seen, draft = logits(5), [3, 3, 7], [7, 9, 9]
    own = options(presence_penalty=0.4, frequency_penalty=-0.3, repetition_penalty=1.2, temperature=1.0)
    counts = np.bincount([*seen, *draft], minlength=x.size)
    expected = np.where(counts > 0, np.where(x > 0, x / 1.2, x * 1.2), x) - 0.4 * (counts > 0) + 0.3 * counts
    for noted in (0, len(draft)):
        sampler = Sampler(own, seen)
        for token in draft[:noted]:
            sampler.note(token)
        found = sampler.distribution(x, draft[noted:])
        assert_close(np.log(found.weights / found.weights.max()), expected - expected.max(), "rounding")
        assert sampler.needs_logits


def test_biases_are_added_before_the_penalties() -> None:
    x = np.array([2.0, 1.5, -1.0, 1.4], np.float32)
    own = options(temperature=0.0, logit_bias=((1, 1.0), (0, -100.0)), repetition_penalty=2.0)
    sampler = Sampler(own)
    assert [sampler.draw(x), sampler.draw(x), sampler.draw(x)] == [1, 3, 1]
    found = Sampler(options(temperature=1.0, logit_bias=((0, -0.5), (2, 2.5)))).distribution(x)
    assert_close(np.log(found.weights / found.weights.max()), np.array([0.0, 0.0, 0.0, -0.1]), "rounding")
    assert x.tolist() == np.array([2.0, 1.5, -1.0, 1.4], np.float32).tolist()
    assert sampler.needs_logits


def test_log_probabilities_are_the_softmax() -> None:
    x = logits(3)
    expected = x - np.log(np.exp(x.astype(np.float64)).sum())
    value, top = log_probabilities(x, 11, 5)
    assert value == pytest.approx(expected[11], abs=1e-6)
    assert [token for token, _ in top] == np.argsort(-x)[:5].tolist()
    assert_close([p for _, p in top], np.sort(expected)[::-1][:5], "rounding")
    assert log_probabilities(x, 11, 0)[1] == []
    assert len(log_probabilities(x[:3], 1, 20)[1]) == 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": ((3, 100.5),)}, "logit_bias"),
        ({"logit_bias": ((3, -100.5),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        options(**changes)
