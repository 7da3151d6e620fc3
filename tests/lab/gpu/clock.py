"""Times of GPU work: captured in graphs, replayed in turns, taken from events on the device."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], None]
REPLAY_SECONDS = 2e-3
"""What a replay should last at least, so that the microseconds before its first kernel starts do not matter."""
MOST_COPIES = 64
"""Copies of an operand at most."""
MOST_REPEATS = 400
"""Times that a graph holds the same launch at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one launch: quantiles over the replays."""

    p20: float
    p50: float
    p80: float
    replays: int

    def microseconds(self) -> dict[str, float]:
        """The quantiles as columns of a result row."""
        return {"p20_us": _micro(self.p20), "p50_us": _micro(self.p50), "p80_us": _micro(self.p80)}


def race(
    contestants: Mapping[str, Sequence[Launch]], device: torch.device, *, rounds: int, warm_rounds: int = 3
) -> dict[str, Times]:
    """Time several ways of doing something against each other: in every round each of them once, in changing order.

    Args:
        contestants: For each its launches. They differ in the operands only, so that caches don't hold these.
        device: A CUDA device, where launches are captured and events time them; or the CPU, where a clock does.
        rounds: Replays of each.
        warm_rounds: Replays before those that count.

    Returns:
        For each contestant the seconds of one launch.
    """
    rng = random.Random(0)
    runs = {name: _captured(launches, device) for name, launches in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    warm_rounds = warm_rounds if device.type == "cuda" else 0
    for turn in range(warm_rounds + rounds):
        order = list(runs)
        rng.shuffle(order)
        measured = {name: runs[name].replay() for name in order}
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= warm_rounds:
            for name, read in measured.items():
                seconds[name].append(read())
    return {name: _quantiles(values) for name, values in seconds.items()}


class _Captured:
    """A CUDA graph of all launches of one contestant, as often as it takes to fill REPLAY_SECONDS."""

    def __init__(self, launches: Sequence[Launch], device: torch.device) -> None:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for launch in launches:
                launch()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self._capture(launches, 1)
        reads = [self.replay() for _ in range(2)]
        torch.cuda.synchronize(device)
        seconds = reads[-1]() * len(launches)
        if seconds < REPLAY_SECONDS:
            self._capture(launches, min(MOST_REPEATS, round(REPLAY_SECONDS / seconds + 0.5)))

    def _capture(self, launches: Sequence[Launch], repeats: int) -> None:
        self._count = repeats * len(launches)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(repeats):
                for launch in launches:
                    launch()

    def replay(self) -> Callable[[], float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._graph.replay()
        end.record()
        return lambda: begin.elapsed_time(end) / 1e3 / self._count


class _Called:
    """The launches of one contestant, called one after another; on the CPU, where no one looks at the times."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches

    def replay(self) -> Callable[[], float]:
        begin = time.perf_counter()
        for launch in self._launches:
            launch()
        seconds = (time.perf_counter() - begin) / len(self._launches)
        return lambda: seconds


def _captured(launches: Sequence[Launch], device: torch.device) -> _Captured | _Called:
    return _Captured(launches, device) if device.type == "cuda" else _Called(launches)


def copies_past_cache(nbytes: int, rotated_bytes: int) -> int:
    """How many copies of an operand of `nbytes` to rotate so that `rotated_bytes` pass before one is met again."""
    return min(MOST_COPIES, -(-rotated_bytes // nbytes))


def _quantiles(values: Sequence[float]) -> Times:
    if len(values) == 1:
        return Times(p20=values[0], p50=values[0], p80=values[0], replays=1)
    fifths = statistics.quantiles(values, n=5)
    return Times(p20=fifths[0], p50=statistics.median(values), p80=fifths[3], replays=len(values))


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 2)
