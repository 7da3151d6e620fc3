"""Measured numbers by what they are of."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from tests.bench.quality.points import Point
from tests.bench.reporting.cases import CASES, Case
from tests.bench.reporting.losses import piece_losses
from tests.bench.reporting.results import Entry, Results


@dataclass(frozen=True, slots=True)
class Part:
    """A share of something, estimated."""

    share: float
    error: float


class View:
    """The results of a run, read-only.

    Args:
        results: What was measured.
    """

    def __init__(self, results: Results) -> None:
        names = {field.name for field in fields(Point)}
        self.results = results
        self.points = {
            Point(**{name: entry[name] for name in names}): entry
            for entry in results.sections.get("points", {}).values()
        }
        self.full = {entry["model"]: entry for entry in results.all("full")}
        self.stored = {
            (entry["model"], entry["method"], entry["bits"], entry["group_size"], entry["residual_bits"]): entry
            for entry in results.all("stored")
        }
        self.peers = {entry["model"]: entry for entry in results.all("peers")}
        self.outliers = {entry["model"]: entry for entry in results.all("outliers")}
        self.models: list[Case] = [case for case in CASES if case.name in self.full]

    def get(self, case: Case, method: str, bits: float, k_chunk: int, **others: object) -> Entry | None:
        """A point's numbers, by default with 4-bit residuals, approximate selection and the model's group size."""
        about = {"group_size": case.group_size, **others}
        return self.points.get(Point(model=case.name, method=method, bits=bits, k_chunk=k_chunk, **about))  # type: ignore[arg-type]

    def gpu_bytes(self, case: Case, method: str, bits: float, group_size: int | None = None) -> int | None:
        """Bytes that stay on the device."""
        entry = self.stored.get((case.name, method, bits, group_size or case.group_size, 4))
        return None if entry is None else int(entry["gpu_bytes"])

    def methods(self) -> list[str]:
        """Methods that any point is of, in the program's order."""
        from models.recipe import METHODS

        there = {point.method for point in self.points}
        return [method for method in METHODS if method in there]

    def bits(self) -> list[float]:
        """Bits that any point is of."""
        return sorted({point.bits for point in self.points})

    def curve(self, case: Case, method: str, bits: float, **others: object) -> list[tuple[int, Entry]]:
        """k_chunk and numbers of the points that differ in k_chunk alone, ascending."""
        numbers = sorted({point.k_chunk for point in self.points if point.model == case.name})
        found = [(k_chunk, self.get(case, method, bits, k_chunk, **others)) for k_chunk in numbers]
        return [(k_chunk, entry) for k_chunk, entry in found if entry is not None]


def closed(none: Entry, some: Entry, full: Entry) -> Part:
    """The share of the loss between `none` and `full` that `some` has back, with a jackknife's standard error."""
    gained, gap = piece_losses(none) - piece_losses(some), piece_losses(none) - piece_losses(full)
    left_out = (gained.sum() - gained) / (gap.sum() - gap)
    count = gained.size
    error = math.sqrt((count - 1) / count * float(np.square(left_out - left_out.mean()).sum()))
    return Part(float(gained.sum() / gap.sum()), error)
