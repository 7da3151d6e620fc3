"""The number of decoding threads, chosen by token times under a simulated clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.backends.cpu.pool import ThreadTuner


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def decode(thread_tuner: ThreadTuner, clock: Clock, cost: Callable[[int], float], seconds: float) -> dict[int, float]:
    """Decode for so long; seconds spent with each number of threads."""
    spent: dict[int, float] = {}
    end = clock.now + seconds
    while clock.now < end:
        size, took = thread_tuner.size, cost(thread_tuner.size)
        clock.now += took
        spent[size] = spent.get(size, 0.0) + took
        thread_tuner.token(took)
    return spent


def test_one_thread_has_nothing_to_choose() -> None:
    thread_tuner = ThreadTuner(1)
    for _ in range(1000):
        thread_tuner.token(1.0)
    assert thread_tuner.size == 1


@pytest.mark.parametrize("token_s", [5e-5, 0.002, 0.08])
def test_on_a_quiet_machine_all_work_and_trials_cost_little(token_s: float) -> None:
    clock = Clock()
    thread_tuner = ThreadTuner(4, clock)
    spent = decode(thread_tuner, clock, lambda threads: token_s * 4 / threads, 60.0)
    assert spent[4] > 0.9 * sum(spent.values())


@pytest.mark.parametrize("free", [1, 2, 3])
def test_threads_that_hold_the_others_up_are_left_out(free: int) -> None:
    clock = Clock()
    thread_tuner = ThreadTuner(4, clock)
    spent = decode(thread_tuner, clock, lambda threads: 0.008 / threads if threads <= free else 0.016, 10.0)
    assert spent[free] > 0.7 * sum(spent.values())


def test_what_begins_is_noticed_at_once_and_what_ends_before_long() -> None:
    clock = Clock()
    thread_tuner = ThreadTuner(2, clock)

    def free(threads: int) -> float:
        return 0.004 / threads

    def shared(threads: int) -> float:
        return 0.004 if threads == 1 else 0.012

    decode(thread_tuner, clock, free, 30.0)
    spent = decode(thread_tuner, clock, shared, 1.0)
    assert spent[1] > 0.7
    decode(thread_tuner, clock, shared, 30.0)
    decode(thread_tuner, clock, free, 5.0)
    assert decode(thread_tuner, clock, free, 1.0)[2] > 0.8


def test_noise_moves_nothing_for_long() -> None:
    clock, turn = Clock(), 0
    thread_tuner = ThreadTuner(2, clock)

    def noisy(threads: int) -> float:
        nonlocal turn
        turn += 1
        return (0.004 / threads) * (1.0 + 0.3 * ((turn * 7919) % 11) / 11)

    spent = decode(thread_tuner, clock, noisy, 30.0)
    assert spent[2] > 0.85 * sum(spent.values())
