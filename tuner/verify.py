"""End-to-end verification that compensation keeps decoding within the slowdown budget.

The search times linear layers one type at a time, but a whole token may behave differently (caches, clocks, two
streams). So a configuration is tested on real decoding and reduced until it keeps within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from tuner.errors import TimerError
from tuner.progress import Cancel, Progress, Report, check, never, silent
from tuner.search import Configuration, check_budget

Slowdown = Callable[[Mapping[str, int], Mapping[str, int]], float]
"""Slowdown of decoding in percent with a `k_chunk` and `n_tb` by layer type; noise can make it negative."""

Smaller = Callable[[Configuration, float], Configuration]
"""Reduces a configuration to a share of its cost. Small shares leave no compensation."""

_GENTLEST, _STRONGEST = 0.9, 0.5
"""Largest and smallest share of the compensation that remains after one reduction."""


def hold(
    configuration: Configuration,
    slowdown: Slowdown,
    budget_percent: float,
    smaller: Smaller,
    *,
    readings: int = 3,
    progress: Progress = silent,
    cancelled: Cancel = never,
) -> tuple[Configuration, float]:
    """Reduce compensation until the measured slowdown is within the budget.

    Args:
        configuration: The configuration that the search found.
        slowdown: Measures decoding with it.
        budget_percent: The budget, above 0 and at most 100 percent.
        smaller: Makes a smaller configuration (`Search.smaller`).
        readings: Number of measurements, of which the median counts; odd. Fewer, if those decide.
        progress: Called before every attempt.
        cancelled: Called before every measurement.

    Returns:
        The verified configuration and its measured slowdown in percent. In the worst case `k_chunk` is 0 everywhere,
        with a slowdown of 0.

    Raises:
        BudgetError: the budget is out of range.
        TimerError: decoding could not be timed.
        Cancelled: `cancelled` returned True.
    """
    check_budget(budget_percent)
    if readings < 1 or readings % 2 == 0:
        raise ValueError(f"a median needs an odd number of readings, not {readings}")
    share, tries, tried = 1.0, 0, configuration
    while any(tried.k_chunk.values()):
        progress(Report(done=tries, total=None, message=f"decoding with {share:.0%} of the compensation found"))
        measured = _median(slowdown, tried.k_chunk, tried.n_tb, readings, budget_percent, cancelled)
        if measured <= budget_percent:
            return tried, measured
        share *= min(_GENTLEST, max(_STRONGEST, budget_percent / measured))
        tried = smaller(configuration, share)
        tries += 1
    nothing = None if tried.predicted_loss_won is None else 0.0
    return replace(tried, predicted_slowdown_percent=0.0, predicted_loss_won=nothing), 0.0


def _median(
    slowdown: Slowdown,
    k_chunk: Mapping[str, int],
    n_tb: Mapping[str, int],
    readings: int,
    budget_percent: float,
    cancelled: Cancel,
) -> float:
    """Median of the readings; the last ones are left out once the others say on which side of the budget it lies."""
    found: list[float] = []
    within = 0
    while max(within, len(found) - within) <= readings // 2:
        check(cancelled)
        found.append(slowdown(k_chunk, n_tb))
        if not math.isfinite(found[-1]):
            raise TimerError(f"the measured slowdown of decoding is {found} percent; tune again")
        within += found[-1] <= budget_percent
    return sorted(found)[len(found) // 2]
