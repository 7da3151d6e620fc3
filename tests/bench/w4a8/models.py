"""The compared models, as data, and the code that determines their numbers.

The order of methods is that of QServe's Table 2, the order of steps that of its Fig. 12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from models.recipe import QOQ_STEPS, QOQ_USUAL, Recipe
from tests.bench.caches.laboratory import Codes
from tests.bench.quality.measure import oracle_code
from tests.bench.reporting.cases import Case
from tests.bench.reporting.results import digest

ROUNDED = "reference, activations of 8 bits"
"""The reference backend with every product's input rounded to 8 bits with one scale a token, as QoQ rounds it: W4A8 of
weights that are made for activations of any precision."""
OFF: Mapping[str, bool] = dict.fromkeys(QOQ_STEPS, False)
"""No step of QoQ: round-to-nearest."""


@cache
def code_of(section: str, backend: str = "") -> str:
    """Digest of the code that decides an entry of a section.

    Args:
        section: `full`, `folding` or `points`.
        backend: What ran a point.
    """
    codes = Codes.now()
    if section == "points":
        return digest([codes.cpu if backend == "cpu" else codes.reference, codes.making])
    return oracle_code() if section == "full" else codes.making


def group_of(case: Case) -> int:
    """Group size of the variants with groups: 128, or what a small model has."""
    return 128 if case.group_size >= 64 else case.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to make the low-bit model."""

    name: str
    """What the report calls it."""
    recipe: Recipe
    """How it is made."""
    backend: str = "cpu"
    """What runs it: `cpu`, `reference`, or `ROUNDED`."""


def _qoq(group_size: int, *steps: str) -> Recipe:
    return Recipe.usual("qoq", group_size=group_size, **{**OFF, **dict.fromkeys(steps, True)})


def compared(group_size: int) -> Sequence[Variant]:
    """Table 2's order, the best first; behind it QoQ with the paper's rotation, which is not usual here.

    Args:
        group_size: Of the variants with groups.
    """
    awq = Recipe(method="awq", group_size=group_size, residual_bits=0)
    return (
        Variant(name="W4A16 AWQ, groups", recipe=awq, backend="reference"),
        Variant(name="W4A8 QoQ, groups", recipe=Recipe.usual("qoq", group_size=group_size)),
        Variant(name="W4A8 AWQ, groups", recipe=awq, backend=ROUNDED),
        Variant(name="W4A8 QoQ, per channel", recipe=Recipe.usual("qoq", group_size=0)),
        Variant(name="W4A8 RTN, groups", recipe=_qoq(group_size)),
        Variant(name="W4A8 RTN, per channel", recipe=_qoq(0)),
        Variant(name="W4A8 QoQ, groups, rotated", recipe=Recipe.usual("qoq", group_size=group_size, rotate=True)),
        Variant(name="W4A8 QoQ, per channel, rotated", recipe=Recipe.usual("qoq", group_size=0, rotate=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the ablation."""

    name: str
    """What is added."""
    recipe: Recipe
    """The model with it."""
    kv: str
    """Its cache."""


def ablation(group_size: int, *, rotated: bool) -> Sequence[Step]:
    """Fig. 12's order, from round-to-nearest to all of QoQ.

    Args:
        group_size: Of the last steps.
        rotated: Whether block inputs are rotated, as in the paper; else that step is left out of all.
    """
    turned = ("rotate",) if rotated else ()
    blocks = (*turned, "smooth_outputs")
    channels = (*blocks, "clip")
    steps: list[tuple[str, Recipe, str]] = [
        ("W4A8, round to nearest, per channel", _qoq(0), "fp16"),
        ("+ rotated block inputs", _qoq(0, *turned), "fp16"),
        ("+ smoothed block outputs", _qoq(0, *blocks), "fp16"),
        ("+ clipping", _qoq(0, *channels), "fp16"),
        ("+ KV4", _qoq(0, *channels), "int4"),
        ("+ SmoothAttention", _qoq(0, *channels, "smooth_attention"), "int4"),
        ("+ progressive groups", _qoq(group_size, *channels, "smooth_attention"), "int4"),
        ("+ reordered channels", _qoq(group_size, *channels, "smooth_attention", "reorder"), "int4"),
    ]
    return [Step(name=name, recipe=recipe, kv=kv) for name, recipe, kv in steps]


def alone(group_size: int) -> Mapping[str, Recipe]:
    """The whole recipe with groups but for one step: left out, or rotation put in; and clipping as the only one."""
    found = {
        f"without {step.replace('_', ' ')}": Recipe.usual("qoq", group_size=group_size, **{step: False})
        for step in QOQ_STEPS
        if step in QOQ_USUAL
    }
    found["clipping alone"] = _qoq(group_size, "clip")
    found["with rotation"] = Recipe.usual("qoq", group_size=group_size, rotate=True)
    found["with rotation, without clip"] = Recipe.usual("qoq", group_size=group_size, rotate=True, clip=False)
    return found
