"""Measured numbers by what they are of, and how sure a difference of two of them is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tests.bench.quality.cases import CASES, Case
from tests.bench.quality.points import Point
from tests.bench.quality.results import Entry, Results

SURE = 2.0
"""Standard errors from which a difference counts."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How much worse one model is than another on the same tokens."""

    nats: float
    """Mean difference of the loss, in nats a token; positive: the first is worse."""
    error: float
    """Its standard error, from the differences of the text's pieces."""

    @property
    def worse(self) -> bool:
        """Whether the first is worse beyond noise."""
        return self.nats > SURE * self.error

    @property
    def better(self) -> bool:
        """Whether the first is better beyond noise."""
        return self.nats < -SURE * self.error

    def __str__(self) -> str:
        return f"{self.nats:+.4f} ± {self.error:.4f}"


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


def difference(one: Entry, other: Entry) -> Difference:
    """Of two entries with the losses of the same pieces of text."""
    apart = _pieces(one) - _pieces(other)
    tokens = int(one["tokens"])
    error = math.sqrt(apart.size * float(apart.var(ddof=1))) / tokens if apart.size > 1 else math.inf
    return Difference(float(apart.sum()) / tokens, error)


def closed(none: Entry, some: Entry, full: Entry) -> Part:
    """The share of the loss between `none` and `full` that `some` has back, with a jackknife's standard error."""
    gained, gap = _pieces(none) - _pieces(some), _pieces(none) - _pieces(full)
    left_out = (gained.sum() - gained) / (gap.sum() - gap)
    count = gained.size
    error = math.sqrt((count - 1) / count * float(np.square(left_out - left_out.mean()).sum()))
    return Part(float(gained.sum() / gap.sum()), error)


def percent(one: Entry, other: Entry) -> float:
    """How much larger one perplexity is than another, in percent."""
    return 100 * (float(one["perplexity"]) / float(other["perplexity"]) - 1)


def _pieces(entry: Entry) -> npt.NDArray[np.float64]:
    values: Sequence[float] = entry["pieces"]
    return np.asarray(values, np.float64)
