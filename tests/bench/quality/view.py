"""Measured numbers by subject, with whether they belong to the current code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from models.recipe import DEFAULT_METHOD
from models.recipe import WEIGHT_ONLY_METHODS as METHODS
from tests.bench.quality import measure, peers
from tests.bench.quality.points import REAL, Point, chat
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import piece_losses
from tests.bench.reporting.markdown import number
from tests.bench.reporting.origin import OLD, line
from tests.bench.reporting.results import Entry, Results, digest


@dataclass(frozen=True, slots=True)
class Part:
    """A share of something, estimated."""

    share: float
    error: float


class View:
    """The results of a run, read-only.

    Args:
        results: What was measured.
        cases: The models of the report, in its order.
    """

    def __init__(self, results: Results, cases: Sequence[Case]) -> None:
        names = {field.name for field in fields(Point)}
        self.results = results
        self.points = {Point(**{name: entry[name] for name in names}): entry for entry in results.all("points")}
        self.full = {entry["model"]: entry for entry in results.all("full") if not entry["as_chat"]}
        self.chat_full = {entry["model"]: entry for entry in results.all("full") if entry["as_chat"]}
        self.stored = {
            (entry["model"], entry["method"], entry["bits"], entry["group_size"], entry["residual_bits"]): entry
            for entry in results.all("stored")
        }
        self.budgets = {
            (entry["model"], entry["bits"], entry["budget_percent"]): entry
            for entry in results.all("budgets")
            if entry["method"] == DEFAULT_METHOD
        }
        self.peers = {entry["model"]: entry for entry in results.all("peers")}
        self.outliers = {entry["model"]: entry for entry in results.all("outliers")}
        self.massive = {entry["model"]: entry for entry in results.all("massive")}
        self.models: list[Case] = [case for case in cases if case.name in self.full]

    @property
    def real(self) -> Case | None:
        """The model that decides; None where nothing of it was measured."""
        return next((case for case in self.models if case.name == REAL), None)

    def get(self, case: Case, method: str, bits: float, k_chunk: int, **others: object) -> Entry | None:
        """A point's numbers, by default plain, with 4-bit residuals and approximate selection."""
        about = {"group_size": case.group_size, **others}
        return self.points.get(Point(model=case.name, method=method, bits=bits, k_chunk=k_chunk, **about))  # type: ignore[arg-type]

    def chat(self, case: Case, method: str, bits: float, k_chunk: int) -> Entry | None:
        """A point's numbers as a chat gets it by default."""
        point = Point(model=case.name, method=method, bits=bits, k_chunk=k_chunk, group_size=case.group_size)
        return self.points.get(chat(point))

    def gpu_bytes(self, case: Case, method: str, bits: float) -> int | None:
        """Bytes that stay on the device."""
        entry = self.stored.get((case.name, method, bits, case.group_size, 4))
        return None if entry is None else int(entry["gpu_bytes"])

    def methods(self) -> list[str]:
        """Methods that any point is of, in the program's order."""
        there = {point.method for point in self.points}
        return [method for method in METHODS if method in there]

    def bits(self) -> list[float]:
        """Bits that any point is of."""
        return sorted({point.bits for point in self.points})

    def numbers(self) -> list[int]:
        """k_chunk of the curves."""
        plain = [point for point in self.points if point.select == "approx" and point.residual_bits == 4]
        return sorted({point.k_chunk for point in plain})

    def curve(self, case: Case, method: str, bits: float, **others: object) -> list[tuple[int, Entry]]:
        """k_chunk and numbers of the points that differ in k_chunk alone, ascending."""
        found = [(k_chunk, self.get(case, method, bits, k_chunk, **others)) for k_chunk in self.numbers()]
        return [(k_chunk, entry) for k_chunk, entry in found if entry is not None]

    def chat_curve(self, case: Case, method: str, bits: float) -> list[tuple[int, Entry]]:
        """The same as a chat gets them by default."""
        found = [(k_chunk, self.chat(case, method, bits, k_chunk)) for k_chunk in self.numbers()]
        return [(k_chunk, entry) for k_chunk, entry in found if entry is not None]

    @cached_property
    def stale(self) -> set[str]:
        """Keys of all entries that are of another version of the code than this one."""
        making, running, tuning = measure.making_code(), measure.running_code(), measure.tuning_code()
        codes = {"full": measure.oracle_code(), "stored": making, "same": making, "peers": peers.code()}
        codes |= {"outliers": measure.oracle_code(), "massive": measure.oracle_code()}
        found = {
            entry["key"]
            for section, code in codes.items()
            for entry in self.results.all(section)
            if entry["code"] != code
        }
        weights = {key: entry["weights"] for key, entry in self.stored.items() if entry["code"] == making}
        for point, entry in self.points.items():
            own = weights.get((point.model, point.method, point.bits, point.group_size, point.residual_bits))
            if own is None or entry["code"] != measure.point_code(own, running):
                found.add(entry["key"])
        for entry in self.results.all("answers"):
            own = weights.get((entry["model"], entry["method"], entry["bits"], entry["group_size"], 4))
            if own is None or entry["code"] != digest([measure.point_code(own, running), measure.oracle_code()]):
                found.add(entry["key"])
        for entry in self.budgets.values():
            own = weights.get((entry["model"], entry["method"], entry["bits"], entry["group_size"], 4))
            if own is None or entry["code"] != measure.point_code(own, tuning):
                found.add(entry["key"])
        return found

    def shown(self, entry: Entry | None) -> str:
        """A perplexity with its mark; empty where it was not measured."""
        return "" if entry is None else number(entry["perplexity"]) + self.mark(entry)

    def mark(self, entry: Entry) -> str:
        """What stands behind the numbers of an entry: a sign where it is older than the code and others are not."""
        return OLD if entry["key"] in self.stale and self.old() < self.count() else ""

    def origin(self, *sections: str) -> str:
        """The line under a table of numbers from these sections: of which code they are."""
        entries = [entry for section in sections for entry in self.results.all(section)]
        old = sum(entry["key"] in self.stale for entry in entries)
        return line(entries, old, self.results.about["date"])

    def old(self) -> int:
        """Entries that are older than the code."""
        return sum(
            entry["key"] in self.stale for section in self.results.sections for entry in self.results.all(section)
        )

    def count(self) -> int:
        """All entries."""
        return sum(len(entries) for entries in self.results.sections.values())


def closed(none: Entry, some: Entry, full: Entry) -> Part:
    """The share of the loss between `none` and `full` that `some` has back, with a jackknife's standard error."""
    gained, gap = piece_losses(none) - piece_losses(some), piece_losses(none) - piece_losses(full)
    left_out = (gained.sum() - gained) / (gap.sum() - gap)
    count = gained.size
    error = math.sqrt((count - 1) / count * float(np.square(left_out - left_out.mean()).sum()))
    return Part(float(gained.sum() / gap.sum()), error)
