"""The number of drafted tokens follows from costs and acceptance."""

from __future__ import annotations

import pytest

from runtime.engine.gamma import (
    AdaptiveGamma,
    Costs,
    best_gamma,
    break_even,
    expected_tokens,
    gamma_of,
    speedup,
)
from runtime.errors import RequestError

CHEAP = Costs(plain=10.0, draft=2.0, verify=[10.5, 11, 11.5, 14, 15, 16, 17])
DEAR = Costs(plain=4.0, draft=3.9, verify=[4.6, 4.8, 5.0])


def test_expected_tokens() -> None:
    assert expected_tokens(3, 0) == 1
    assert expected_tokens(3, 1) == 4
    assert expected_tokens(3, 0.5) == pytest.approx((1 - 0.5**4) / (1 - 0.5))


def test_more_acceptance_drafts_more_and_none_where_it_does_not_pay() -> None:
    found = [best_gamma(CHEAP, acceptance) for acceptance in (0, 0.3, 0.6, 0.9, 1)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 7)
    assert best_gamma(DEAR, 1.0) == 0
    assert break_even(DEAR) is None
    edge = break_even(CHEAP)
    assert edge is not None
    assert best_gamma(CHEAP, edge)
    assert not best_gamma(CHEAP, edge - 0.01)
    assert speedup(CHEAP, 3, 1) == pytest.approx(4 * 10 / 17.5)


def run(gamma: AdaptiveGamma, costs: Costs, stays: float, tokens: int) -> list[int]:
    """What is drafted while a fixed part of each round stays and steps take what they cost."""
    drafted = []
    for _ in range(tokens):
        drafted.append(gamma.next())
        accepted = round(stays * drafted[-1])
        gamma.note(drafted[-1], accepted, costs.round_s(drafted[-1]))
    return drafted


def test_it_learns_that_nothing_stays_and_tries_again_ever_more_rarely() -> None:
    gamma = AdaptiveGamma(CHEAP)
    assert gamma.current > 0
    drafted = run(gamma, CHEAP, 0.0, 2000)
    assert gamma.current == 0
    tries = [at for at, each in enumerate(drafted) if each and at > 100]
    assert 8 <= len(tries) <= 32
    assert max(drafted[at] for at in tries) == 1
    drafted = run(gamma, CHEAP, 1.0, 20_000)
    assert gamma.current == 7
    assert sum(each > 0 for each in drafted[-1000:]) > 900


def test_drafts_behind_a_refused_one_were_not_tried() -> None:
    """Of seven drafts the third is refused every time: two of three that were tried stay."""
    gamma = AdaptiveGamma(CHEAP)
    for _ in range(400):
        gamma.note(7, 2, CHEAP.round_s(7))
    assert gamma.acceptance == pytest.approx(2 / 3, abs=1e-3)


def test_it_learns_that_rounds_cost_more_than_they_did() -> None:
    gamma = AdaptiveGamma(CHEAP)
    slow = Costs(plain=10.0, draft=9.0, verify=[3 * each for each in CHEAP.verify])
    run(gamma, slow, 1.0, 400)
    assert gamma.current == 0


def test_plain_steps_between_keep_their_time_known() -> None:
    """With a long context all steps become slower; the plain ones most, so that drafting more pays."""
    gamma = AdaptiveGamma(CHEAP)
    long = Costs(plain=30.0, draft=CHEAP.draft, verify=CHEAP.verify)
    drafted = run(gamma, long, 1.0, 2000)
    assert 20 <= drafted.count(0) <= 40
    assert 0 not in drafted[:16]
    assert gamma._now().plain > 2 * CHEAP.plain


@pytest.mark.parametrize("wrong", [{"plain": 0.0}, {"draft": -1.0}, {"verify": []}, {"verify": [1.0, 0.0]}])
def test_costs_are_positive(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="positive"):
        Costs(**{"plain": 1.0, "draft": 1.0, "verify": [1.0], **wrong})  # type: ignore[arg-type]


def test_what_is_asked_for() -> None:
    assert isinstance(gamma_of(CHEAP), AdaptiveGamma)
    assert gamma_of(4).next() == 4
    for wrong in (0, 16):
        with pytest.raises(RequestError, match="from 1 to 15"):
            gamma_of(wrong)


def test_what_drawing_takes_beside_a_step_does_not_speak_against_rounds() -> None:
    """All steps take a third longer than they were measured, and nothing was decoded plainly yet."""
    gamma = AdaptiveGamma(CHEAP)
    edge = gamma.current
    for _ in range(16):
        drafted = gamma.next()
        assert drafted >= edge
        gamma.note(drafted, drafted, 1.33 * CHEAP.round_s(drafted))


def test_a_useless_head_costs_little_and_another_answer_tries_it_again() -> None:
    costs = Costs(plain=10.0, draft=1.0, verify=[10.5, 11, 11.5, 12, 13, 14, 15])
    gamma = AdaptiveGamma(costs, by_head=True)
    for answer in range(3):
        gamma.begin()
        drafted = run(gamma, costs, 0.0, 512)
        took = sum(costs.round_s(each) for each in drafted)
        assert took < 512 * costs.plain / (0.985 if answer == 0 else 0.99)
    assert gamma.resting > 0
    gamma.begin()
    assert sum(each > 0 for each in run(gamma, costs, 1.0, 64)) > 50
    gamma.begin()
    took = sum(costs.round_s(each) for each in run(gamma, costs, 0.0, 150))
    assert took < 150 * costs.plain / 0.96, "all of one answer's drafts were right, and none of the next one's"
