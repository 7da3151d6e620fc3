"""What is measured: points of the report's pictures and tables, each a recipe and a way to run it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models.recipe import METHODS, Recipe
from runtime.decoder import Selector

BITS: tuple[float, ...] = (3, 3.5, 4)
"""Bits of the blocks' weights."""
CURVE = (0, 8, 16, 32, 64, 128)
"""k_chunk of the curves (QDEC Fig. 12)."""
SELECTED = (8, 16, 32, 64, 128, 256)
"""k_chunk of the comparison of selectors (QDEC Fig. 16)."""
REFERENCE_K = 64
"""k_chunk at which single numbers are quoted."""
RESIDUALS: dict[int, tuple[int, ...]] = {
    2: (32, 64, 128, 256),
    4: (16, 32, 64, 128),
    8: (8, 16, 32, 64),
    16: (4, 8, 16, 32),
}
"""k_chunk by bits of the residuals; numbers in the same place fetch the same bytes of rows (QDEC Table 1)."""
NARROW_GROUP = 32
"""Group size of the 3-bit models that spend more bytes on scales, for comparisons at equal bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of the report: a model made by a recipe, run in one way."""

    model: str
    """Name of a `Case`."""
    method: str
    """Base quantizer."""
    bits: float
    """3, 3.5 or 4."""
    group_size: int
    """Input channels that share a scale."""
    residual_bits: int = 4
    """2, 4, 8 or 16."""
    select: Selector = "approx"
    """How salient channels are chosen."""
    k_chunk: int = 0
    """Compensated channels per 1024."""

    @property
    def recipe(self) -> Recipe:
        """How its model is made."""
        return Recipe(method=self.method, bits=self.bits, group_size=self.group_size, residual_bits=self.residual_bits)

    @property
    def measures_recall(self) -> bool:
        """Whether the selection is compared with exact top-k."""
        return self.select == "approx" and self.k_chunk > 0 and self.bits == 3 and self.residual_bits == 4

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the same fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured."""

    methods: Sequence[str] = METHODS
    """Base quantizers."""
    bits: Sequence[float] = BITS
    """Bits of the blocks' weights."""
    curve: Sequence[int] = CURVE
    """k_chunk of the curves."""
    selected: Sequence[int] = SELECTED
    """k_chunk of the comparison of selectors."""
    places: Sequence[int] = (0, 1, 2, 3)
    """Places in `RESIDUALS`."""
    tokens: int | None = None
    """Most tokens of each text; None for the case's own number."""


QUICK = Extent(methods=("rtn", "gptq"), bits=(3, 4), curve=(0, 16, 64), selected=(16, 64), places=(2,), tokens=1300)
"""Enough to see that everything works; the numbers are noisy."""


def points(model: str, group_size: int, closer: Sequence[str], extent: Extent) -> list[Point]:
    """All points of a model, each once, those of one stored model together.

    Args:
        model: Name of a `Case`.
        group_size: Its group size.
        closer: Methods whose selectors and residuals are compared.
        extent: How much is measured.
    """
    found = dict.fromkeys(_points(model, group_size, closer, extent))
    return sorted(found, key=lambda point: (point.method, point.bits, point.group_size, point.residual_bits))


def _points(model: str, group_size: int, closer: Sequence[str], extent: Extent) -> Iterator[Point]:
    for method in extent.methods:
        for bits in extent.bits:
            for k_chunk in extent.curve:
                yield Point(model=model, method=method, bits=bits, group_size=group_size, k_chunk=k_chunk)
        if group_size > NARROW_GROUP:
            for k_chunk in _within(extent.curve, (0, REFERENCE_K, 128)):
                yield Point(model=model, method=method, bits=3, group_size=NARROW_GROUP, k_chunk=k_chunk)
    selectors: tuple[Selector, ...] = ("approx", "exact", "static", "random")
    for method in [method for method in closer if method in extent.methods]:
        for k_chunk in extent.selected:
            for select in selectors:
                yield Point(model=model, method=method, bits=3, group_size=group_size, select=select, k_chunk=k_chunk)
        for residual_bits, numbers in RESIDUALS.items():
            for place in extent.places:
                yield Point(
                    model=model,
                    method=method,
                    bits=3,
                    group_size=group_size,
                    residual_bits=residual_bits,
                    k_chunk=numbers[place],
                )


def _within(some: Iterable[int], others: Iterable[int]) -> list[int]:
    return [number for number in others if number in set(some)]
