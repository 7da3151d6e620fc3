"""Measured numbers of the caches, by subject."""

from __future__ import annotations

from typing import Any

from tests.bench.caches.extent import ORDER, known_cases, window
from tests.bench.caches.laboratory import is_old
from tests.bench.caches.perplexity import EXACT, FULL, WAYS
from tests.bench.caches.smooth import PLANTED
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import Difference, difference
from tests.bench.reporting.page import Measured
from tests.bench.reporting.results import Entry, Results

BACKENDS = ("reference", "cpu")


class View(Measured):
    """The results of a run, read-only.

    Args:
        results: What was measured.
    """

    def __init__(self, results: Results) -> None:
        super().__init__(results)
        self.losses = {
            (entry["model"], entry["weights"], entry["backend"], entry["kind"], entry["smooth"]): entry
            for entry in results.all("perplexity")
            if entry["window"] == window(entry["model"], entry["window"])[0]  # not a leftover of other windows
        }
        self.gear = {entry["model"]: entry for entry in results.all("gear")}
        self.corrected = results.all("corrected")
        self.memory = results.all("memory")
        self.size = {(entry["kind"], entry["head_dim"]): entry for entry in results.all("size")}
        self.drift = {(entry["model"], entry["way"], entry["kind"]): entry for entry in results.all("drift")}
        self.channels = {entry["model"]: entry for entry in results.all("channels")}
        self.attention = {int(entry["tokens"]): entry for entry in results.all("attention")}
        self.speed = {int(entry["tokens"]): entry for entry in results.all("speed")}
        models = {model for model, *_ in self.losses} | set(self.gear)
        self.models: list[Case] = [case for case in known_cases() if case.name in models]

    def is_old(self, section: str, entry: Entry) -> bool:
        """See `Measured`."""
        return is_old(entry)

    @property
    def smoothed(self) -> list[str]:
        """Models on which SmoothAttention was tried, the planted one last."""
        names = [case.name for case in self.models if case.name in self.channels]
        return names + [PLANTED] * (PLANTED in self.channels)

    def loss(self, model: str, weights: str, backend: str, kind: str, *, smooth: bool = False) -> Entry | None:
        """Losses of one evaluation."""
        return self.losses.get((model, weights, backend, kind, smooth))

    def exact(self, model: str) -> Entry | None:
        """Losses in full precision without a cache."""
        return self.loss(model, FULL, "oracle", EXACT)

    def costs(self, model: str, kind: str, other: str = "fp16") -> dict[str, Difference]:
        """What one kind costs over another, by weights and backend in words."""
        found = {}
        for weights, backend in WAYS:
            one, base = self.loss(model, weights, backend, kind), self.loss(model, weights, backend, other)
            if one is not None and base is not None:
                found[way_name(weights, backend)] = difference(one, base)
        return found

    def kinds(self) -> list[str]:
        """Kinds that any loss is of, in the order of tables."""
        there = {kind for _, _, _, kind, _ in self.losses}
        return [kind for kind in ORDER if kind in there]

    def attention_row(self, tokens: int, kind: str) -> Entry | None:
        """Seconds of attention alone."""
        return _row(self.attention.get(tokens), kind)

    def speed_row(self, tokens: int, kind: str) -> Entry | None:
        """Seconds of a decoded token; llama.cpp's kinds are named `llama.cpp f16`."""
        return _row(self.speed.get(tokens), kind)


def way_name(weights: str, backend: str) -> str:
    """Weights and backend as the report names them."""
    return f"{weights} weights" + (" on the CPU" if backend == "cpu" else "")


def _row(entry: Entry | None, kind: str) -> dict[str, Any] | None:
    return None if entry is None else next((row for row in entry["rows"] if row["kind"] == kind), None)
