"""Measured points of the report's pictures and tables: each a recipe and a way to run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from models.recipe import DEFAULT_GROUP_SIZE, DEFAULT_METHOD, Recipe
from models.recipe import WEIGHT_ONLY_METHODS as METHODS
from runtime.backends.cpu.backend import CpuBackend
from runtime.backends.decoder import Selector
from tests.bench.reporting.cases import CASES, SMOLLM2, Case
from tests.bench.reporting.cases import smollm2 as real_model

REAL = "smollm2"
"""Name of the case that decides."""
SMALL = "english3m"
"""Name of the case beside it."""
BITS: tuple[float, ...] = (3, 4, 3.5)
"""Bits of the blocks' weights, in the order in which they are measured."""
CURVE, FINE = (0, 16, 64), (0, 8, 16, 32, 64, 128)
"""k_chunk of the curves (QDEC Fig. 12): of all methods, and of the detailed ones."""
DETAILED = (DEFAULT_METHOD, "rtn")
"""Methods whose curves are finer, and of which compensated prompts and compensated decoding are told apart."""
REFERENCE_K = 64
"""k_chunk at which single numbers are quoted."""
BUDGETS = (5.0, 10.0)
"""Slowdowns in percent that the default recipe is tuned for: the program's default, and what the limits are for."""
BUDGET = BUDGETS[-1]
"""The slowdown that has a limit."""
SELECTORS: tuple[Selector, ...] = ("approx", "exact", "static", "random")
"""How salient channels are chosen (QDEC Fig. 15 and 16)."""
RESIDUALS: dict[int, tuple[int, ...]] = {2: (32, 128), 4: (16, 64), 8: (8, 32), 16: (4, 16)}
"""k_chunk by bits of the residuals; numbers in the same place fetch the same bytes of rows (QDEC Table 1)."""
ALL_RESIDUALS = CpuBackend.prompt_levels[0]
"""Channels of 1024 that the rows of a prompt share: what the default budget of prompts buys on a CPU, if anything."""


def cases(smollm2: Path = SMOLLM2) -> list[Case]:
    """The models of the report, the real one first.

    Args:
        smollm2: Checkpoint of SmolLM2-135M-Instruct.
    """
    small = next(case for case in CASES if case.name == SMALL)
    return [real_model(smollm2), replace(small, group_size=DEFAULT_GROUP_SIZE, closer=("rtn",))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of the report: a model made by a recipe, run in one way."""

    model: str
    """Name of a `Case`."""
    method: str
    """Base quantizer."""
    bits: float
    """3, 3.5 or 4."""
    group_size: int = DEFAULT_GROUP_SIZE
    """Input channels that share a scale."""
    residual_bits: int = 4
    """2, 4, 8 or 16."""
    select: Selector = "approx"
    """How salient channels are chosen."""
    k_chunk: int = 0
    """Compensated channels per 1024."""
    as_chat: bool = False
    """Whether the first half of each window is prefilled as a prompt and the second half decoded."""
    prompt_k_chunk: int = 0
    """Channels per 1024 that the rows of a prompt share."""

    @property
    def recipe(self) -> Recipe:
        """How its model is made."""
        return Recipe(method=self.method, bits=self.bits, group_size=self.group_size, residual_bits=self.residual_bits)

    @property
    def measures_recall(self) -> bool:
        """Whether the selection is compared with exact top-k."""
        return self.select == "approx" and self.k_chunk > 0 and self.bits == 3 and not self.as_chat

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the same fields."""
        return asdict(self)

    def __str__(self) -> str:
        """In a few words."""
        way = f"as a chat, prompts {self.prompt_k_chunk}" if self.as_chat else "plain"
        what = f"{self.model} {self.method} {self.bits:g} bits g{self.group_size} residual {self.residual_bits}"
        return f"{what}, {self.select} k_chunk {self.k_chunk}, {way}"


def chat(point: Point) -> Point:
    """The same model as a chat gets it by default: its prompts are compensated where decoding is."""
    return replace(point, as_chat=True, prompt_k_chunk=ALL_RESIDUALS if point.k_chunk else 0)


def one_sided(point: Point) -> Point:
    """The same model as a chat gets it where only decoding is compensated; with k_chunk 0, where only prompts are."""
    return replace(point, as_chat=True, prompt_k_chunk=0 if point.k_chunk else ALL_RESIDUALS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured of a model."""

    methods: Sequence[str] = (DEFAULT_METHOD, *(method for method in METHODS if method != DEFAULT_METHOD))
    """Base quantizers, in the order in which they are measured."""
    bits: Sequence[float] = BITS
    """Bits of the blocks' weights."""
    curve: Sequence[int] = CURVE
    """k_chunk of the curves."""
    fine: Sequence[int] = FINE
    """k_chunk of the curves of `DETAILED` methods."""
    as_chat: bool = False
    """Whether every point is measured as a chat gets it too."""
    selected: Sequence[int] = (16, 64)
    """k_chunk of the comparison of selectors."""
    places: Sequence[int] = (0, 1)
    """Places in `RESIDUALS`."""
    tokens: int | None = None
    """Most tokens of each text; None for the case's own number."""


EXTENTS: Mapping[str, Extent] = {REAL: Extent(as_chat=True), SMALL: Extent(bits=(3,))}
"""By model. The small one is there for llama.cpp's 3-bit types, which need rows of a multiple of 256, and to show how
far effects differ between models."""


def quick(extent: Extent) -> Extent:
    """Enough to see that everything works; the numbers are noisy."""
    few = {"methods": DETAILED, "bits": (3,), "fine": CURVE, "selected": (64,), "places": (1,), "tokens": 700}
    return replace(extent, **few)


def points(case: Case, extent: Extent) -> list[Point]:
    """All points of a model, each once, in the order in which they are measured.

    Args:
        case: The model.
        extent: How much is measured.
    """
    return list(dict.fromkeys([*_curves(case, extent), *_comparisons(case, extent)]))


def _curves(case: Case, extent: Extent) -> Iterator[Point]:
    for bits in extent.bits:
        for method in extent.methods:
            for k_chunk in extent.fine if method in DETAILED else extent.curve:
                point = Point(model=case.name, method=method, bits=bits, group_size=case.group_size, k_chunk=k_chunk)
                yield point
                if not extent.as_chat:
                    continue
                yield chat(point)
                if method in DETAILED:
                    yield one_sided(point)


def _comparisons(case: Case, extent: Extent) -> Iterator[Point]:
    for method in [method for method in case.closer if method in extent.methods]:
        own = Point(model=case.name, method=method, bits=3, group_size=case.group_size)
        for k_chunk in extent.selected:
            for select in SELECTORS:
                yield replace(own, select=select, k_chunk=k_chunk)
        for residual_bits, numbers in RESIDUALS.items():
            for place in extent.places:
                yield replace(own, residual_bits=residual_bits, k_chunk=numbers[place])
