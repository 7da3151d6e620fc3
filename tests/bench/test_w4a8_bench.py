"""The report on W4A8: what is compared is what it says, and a section is written from few numbers, too."""

from __future__ import annotations

from pathlib import Path

from tests.bench.reporting.results import Results
from tests.bench.w4a8.models import ablation, alone, compared
from tests.bench.w4a8.report import section


def test_every_step_of_the_ablation_adds_to_the_one_before() -> None:
    steps = ablation(128)
    recipes = [step.recipe.to_json() for step in steps]
    assert all(
        one != other or a.kv != b.kv for one, other, a, b in zip(recipes, recipes[1:], steps, steps[1:], strict=False)
    )
    assert steps[-1].recipe == compared(128)[1].recipe
    assert steps[0].recipe == compared(128)[4].recipe
    assert all(recipe != compared(128)[1].recipe for recipe in alone(128).values())


def test_a_section_says_what_was_measured_and_whether_the_order_holds(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    variants = compared(128)
    for number, variant in enumerate(variants):
        loss = 3.0 + 0.1 * (number if number != 2 else 0.5)
        pieces = [loss * 10 + 0.01 * piece for piece in range(10)]
        about = {"model": "smollm2", "recipe": variant.recipe.to_json(), "kv": "int4", "as_chat": True}
        numbers = {"perplexity": 20.0 + number, "tokens": 100, "pieces": pieces, "bits_per_weight": 4.16}
        results.add("points", [number], "1", {**about, **numbers})
    found = section(results, tmp_path)
    assert found.count("| holds |") == 2
    assert found.count("| **broken** |") == 1
    assert "W4A8 QoQ, per channel" in found
    assert "Fig. 12" not in found
