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
from tests.bench.quality.points import REAL, Point, chat, one_sided
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import piece_losses
from tests.bench.reporting.page import Measured
from tests.bench.reporting.results import Entry, Results, digest


@dataclass(frozen=True, slots=True)
class Part:
    """A share of something, estimated."""

    share: float
    error: float


class View(Measured):
    """The results of a run, read-only.

    Args:
        results: What was measured.
        cases: The models of the report, in its order.
    """

    def __init__(self, results: Results, cases: Sequence[Case]) -> None:
        names = {field.name for field in fields(Point)}
        super().__init__(results)
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

    def one_sided(self, case: Case, method: str, bits: float, k_chunk: int) -> Entry | None:
        """A point's numbers as a chat gets it where only decoding is compensated; with k_chunk 0, only prompts."""
        point = Point(model=case.name, method=method, bits=bits, k_chunk=k_chunk, group_size=case.group_size)
        return self.points.get(one_sided(point))

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

    def is_old(self, section: str, entry: Entry) -> bool:
        """See `Measured`; low-bit models that are old make their points so."""
        codes = self._codes
        if section in codes:
            return bool(entry["code"] != codes[section])
        about = (entry["model"], entry["method"], entry["bits"], entry["group_size"], entry.get("residual_bits", 4))
        stored = self.stored.get(about)
        if stored is None or stored["code"] != codes["stored"]:
            return True
        own = measure.point_code(stored["weights"], codes["tuning" if section == "budgets" else "running"])
        return bool(entry["code"] != (digest([own, codes["full"]]) if section == "answers" else own))

    @cached_property
    def _codes(self) -> dict[str, str]:
        """Digests of the code as it is: by section, and what points are measured by."""
        making, oracle = measure.making_code(), measure.oracle_code()
        codes = {"stored": making, "same": making, "peers": peers.code()}
        codes |= dict.fromkeys(("full", "outliers", "massive"), oracle)
        return {**codes, "running": measure.running_code(), "tuning": measure.tuning_code()}


def closed(none: Entry, some: Entry, full: Entry) -> Part:
    """The share of the loss between `none` and `full` that `some` has back, with a jackknife's standard error."""
    gained, gap = piece_losses(none) - piece_losses(some), piece_losses(none) - piece_losses(full)
    left_out = (gained.sum() - gained) / (gap.sum() - gap)
    count = gained.size
    error = math.sqrt((count - 1) / count * float(np.square(left_out - left_out.mean()).sum()))
    return Part(float(gained.sum() / gap.sum()), error)
