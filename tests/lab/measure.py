"""How things are timed: in turns, and programs in processes of their own that answer jobs line by line."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil

from tests.lab.store import ROOT

K, T = TypeVar("K"), TypeVar("T")


def in_turns(ways: Mapping[K, Callable[[], T]], rounds: int, *, warm: int = 1) -> dict[K, list[T]]:
    """Results of every way, once a round in an order drawn anew; what else a machine does hits all alike.

    Args:
        ways: What is measured, by name.
        rounds: Those that count.
        warm: Rounds before, which do not.
    """
    found: dict[K, list[T]] = {name: [] for name in ways}
    order, rng = list(ways), random.Random(0)
    for turn in range(warm + rounds):
        rng.shuffle(order)
        for name in order:
            result = ways[name]()
            if turn >= warm:
                found[name].append(result)
    return found


def longer(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """What one takes longer than the other, of neighbours in time: quartile, median and quartile in percent."""
    percent = [100 * (a / b - 1) for a, b in zip(own, other, strict=True)]
    if len(percent) == 1:
        return [round(percent[0], 1)] * 3
    return [round(value, 1) for value in statistics.quantiles(percent, n=4, method="inclusive")]


class Worker:
    """A program in a process of its own that answers each line with a line of JSON, the first one unasked.

    Args:
        command: Program and arguments.
        options: As `subprocess.Popen` takes them.
    """

    def __init__(self, *command: str, **options: Any) -> None:
        options = {"cwd": ROOT, "stderr": subprocess.DEVNULL, **options}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        self.about = self._answer()

    def ask(self, *words: object) -> Any:
        """The answer to a line."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._answer()

    @property
    def processor_s(self) -> float:
        """Seconds that processors have spent on it."""
        used = psutil.Process(self._process.pid).cpu_times()
        return float(used.user + used.system)

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=120)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a program that is compared ended early: {self._process.args!r}")
        return json.loads(line)


@contextmanager
def closing_all(workers: Mapping[str, Worker]) -> Iterator[Mapping[str, Worker]]:
    """Workers, ended at the end."""
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()
