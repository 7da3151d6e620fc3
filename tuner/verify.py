"""The promise: measured from end to end, decoding with compensation is at most the budget slower than without.

The search times linear layers one type at a time; the token as a whole may behave differently (caches, clocks, two
streams). So a configuration is tried on real decoding, and gives way until it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from tuner.errors import TimerError
from tuner.progress import Cancel, Progress, Report, check, never, silent
from tuner.search import Configuration, check_budget

Slowdown = Callable[[Mapping[str, int], Mapping[str, int]], float]
"""Percent by which decoding with this `k_chunk` and `n_tb` by layer type is slower than without; noise goes below 0."""

Smaller = Callable[[Configuration, float], Configuration]
"""Makes a smaller configuration of what the search found, for a share of what it costs. The smaller the share, the less
is left, at last nothing."""

_GENTLEST, _STRONGEST = 0.9, 0.5
"""One step back leaves at most and at least this part of the compensation."""


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
    """Take compensation back until the measured slowdown is within the budget.

    Args:
        configuration: What the search found.
        slowdown: Measures decoding with it.
        budget_percent: The promise, above 0 and at most 100 percent.
        smaller: Makes a smaller configuration of what the search found (`Search.smaller`).
        readings: Measurements of which the median counts; odd.
        progress: Told before every try.
        cancelled: Asked before every measurement.

    Returns:
        The configuration that holds and its measured slowdown in percent. If nothing else holds, `k_chunk` is 0
        everywhere: decoding as without compensation, and a slowdown of 0.

    Raises:
        BudgetError: the budget is out of range.
        TimerError: decoding could not be timed.
        Cancelled: `cancelled` said so.
    """
    check_budget(budget_percent)
    if readings < 1 or readings % 2 == 0:
        raise ValueError(f"a median needs an odd number of readings, not {readings}")
    share, tries, tried = 1.0, 0, configuration
    while any(tried.k_chunk.values()):
        progress(Report(done=tries, total=None, message=f"decoding with {share:.0%} of the compensation found"))
        measured = _median(slowdown, tried.k_chunk, tried.n_tb, readings, cancelled)
        if measured <= budget_percent:
            return tried, measured
        share *= min(_GENTLEST, max(_STRONGEST, budget_percent / measured))
        tried = smaller(configuration, share)
        tries += 1
    nothing = None if tried.predicted_loss_won is None else 0.0
    return replace(tried, predicted_slowdown_percent=0.0, predicted_loss_won=nothing), 0.0


def _median(
    slowdown: Slowdown, k_chunk: Mapping[str, int], n_tb: Mapping[str, int], readings: int, cancelled: Cancel
) -> float:
    found = []
    for _ in range(readings):
        check(cancelled)
        found.append(slowdown(k_chunk, n_tb))
    if not all(math.isfinite(percent) for percent in found):
        raise TimerError(f"decoding was measured to be {found} percent slower; tune again")
    return sorted(found)[readings // 2]
