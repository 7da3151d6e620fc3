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

_GENTLEST, _STRONGEST = 0.9, 0.5
"""One step back leaves at most and at least this part of `k_chunk`."""


def hold(
    configuration: Configuration,
    slowdown: Slowdown,
    budget_percent: float,
    *,
    readings: int = 3,
    progress: Progress = silent,
    cancelled: Cancel = never,
) -> tuple[Configuration, float]:
    """Scale `k_chunk` down until the measured slowdown is within the budget.

    Args:
        configuration: What the search found.
        slowdown: Measures decoding with it.
        budget_percent: The promise, above 0 and at most 100 percent.
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
    share, tries = 1.0, 0
    k_chunk = dict(configuration.k_chunk)
    while any(k_chunk.values()):
        progress(Report(done=tries, total=None, message=f"decoding with {share:.0%} of the k_chunk found"))
        measured = _median(slowdown, k_chunk, configuration.n_tb, readings, cancelled)
        if measured <= budget_percent:
            return replace(configuration, k_chunk=k_chunk), measured
        share *= min(_GENTLEST, max(_STRONGEST, budget_percent / measured))
        k_chunk = {kind: math.floor(share * found) for kind, found in configuration.k_chunk.items()}
        tries += 1
    return replace(configuration, k_chunk=dict.fromkeys(k_chunk, 0), predicted_slowdown_percent=0.0), 0.0


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
