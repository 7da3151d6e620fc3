"""Outlines of next-token distributions, beside the whole ones."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.text.divergence import Outline

ROWS, VOCABULARY = 19, 300


def drawn(seed: int, scale: float = 3.0) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, scale, (ROWS, VOCABULARY)).astype(np.float32)


def whole(reference: np.ndarray, logits: np.ndarray) -> float:  # type: ignore[type-arg]
    """The divergence of all tokens, in double precision."""
    logs = [np.log(np.exp(x) / np.exp(x).sum(1, keepdims=True)) for x in (reference.astype(float), logits)]
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())


@pytest.mark.parametrize("most", [VOCABULARY - 1, VOCABULARY, 10_000])
def test_an_outline_of_all_tokens_is_the_distribution(most: int) -> None:
    reference, logits = drawn(0), drawn(1)
    assert Outline.of(reference, most).divergence(logits) == pytest.approx(whole(reference, logits), rel=1e-5)
    assert Outline.of(reference, most).divergence(reference) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("most", [1, 20])
def test_an_outline_of_few_tokens_bounds_the_divergence(most: int) -> None:
    reference, logits = drawn(0), drawn(1)
    found = Outline.of(reference, most)
    assert found.probabilities.shape == (ROWS, most + 1)
    assert np.allclose(found.probabilities.sum(1), 1, atol=1e-6)
    assert (
        found.probabilities[:, :-1].min(1) >= np.sort(np.exp(reference), 1)[:, -most] / np.exp(reference).sum(1) * 0.999
    ).all()
    assert 0 < found.divergence(logits) < whole(reference, logits)


def test_small_changes_are_seen_as_in_the_whole() -> None:
    reference = drawn(0)
    logits = reference + 0.2 * drawn(1, 1.0)
    assert Outline.of(reference, 60).divergence(logits) == pytest.approx(whole(reference, logits), rel=0.1)


def test_rows_add_up_and_join() -> None:
    reference, logits = drawn(0), drawn(1)
    found = Outline.of(reference, 20)
    parts = [found.rows(0, 2), found.rows(2, ROWS)]
    assert sum(part.divergence(logits[at : at + len(part.tokens)]) for part, at in zip(parts, (0, 2), strict=True)) == (
        pytest.approx(found.divergence(logits), rel=1e-6)
    )
    assert np.array_equal(Outline.joined(parts).tokens, found.tokens)


def test_certainty_and_ruled_out_tokens_stay_finite() -> None:
    """Probability 1 on one side, next to 0 on the other."""
    sure = np.full((1, VOCABULARY), -200, np.float32)
    sure[0, 7] = 200
    other = np.roll(sure, 1, axis=1)
    assert Outline.of(sure, 10).divergence(sure) == pytest.approx(0, abs=1e-5)
    assert 50 < Outline.of(sure, 10).divergence(other) < 1000
