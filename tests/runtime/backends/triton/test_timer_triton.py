"""The GPU's timer without a card: warmed up after a rest, and in turns."""

from __future__ import annotations

import pytest

from runtime.backends.triton.timer import WARM_S, Pace, in_turns


class Clock:
    """A card whose replays take a while."""

    def __init__(self) -> None:
        self.now, self.replays = 100.0, 0

    def replay(self) -> float:
        self.now += 0.004
        self.replays += 1
        return 0.004


def test_a_card_that_rested_is_warmed_up_first() -> None:
    clock = Clock()
    pace = Pace(lambda: clock.now)
    pace.warm(clock.replay)
    assert clock.now - 100 >= WARM_S >= 0.3
    pace.worked()
    before = clock.replays
    clock.now += 0.05
    pace.warm(clock.replay)
    assert clock.replays == before
    clock.now += 1.0
    pace.warm(clock.replay)
    assert clock.replays > before


def test_graphs_take_turns_so_that_a_slowing_clock_meets_them_alike() -> None:
    order: list[str] = []

    def graph(name: str, seconds: float) -> float:
        order.append(name)
        return seconds * (1 + 0.01 * len(order))

    plain, both = in_turns([lambda: graph("plain", 1.0), lambda: graph("both", 1.1)], 50)
    assert order == ["plain", "both"] * 50
    ratios = sorted(b / a for a, b in zip(plain, both, strict=True))
    assert ratios[25] == pytest.approx(1.1, rel=0.02)
    assert plain[-1] > 1.9 * plain[0]
