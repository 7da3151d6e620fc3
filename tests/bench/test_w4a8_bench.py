"""The report on W4A8: its comparisons, and a section written from few numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.bench.reporting.origin import OLD
from tests.bench.reporting.results import Results
from tests.bench.w4a8 import folding
from tests.bench.w4a8.models import ablation, alone, code_of, compared
from tests.bench.w4a8.report import ROTATED_STEP, section


def test_every_step_of_the_ablation_adds_to_the_one_before() -> None:
    by_name = {variant.name: variant.recipe for variant in compared(128)}
    for rotated, whole in ((True, "W4A8 QoQ, groups, rotated"), (False, "W4A8 QoQ, groups")):
        steps = ablation(128, rotated=rotated)
        settings = [(step.recipe, step.kv) for step in steps]
        same = [step.name for step, a, b in zip(steps[1:], settings, settings[1:], strict=False) if a == b]
        assert same == ([] if rotated else [ROTATED_STEP])
        assert steps[-1].recipe == by_name[whole]
        assert steps[0].recipe == by_name["W4A8 RTN, per channel"]
    assert all(recipe != compared(128)[1].recipe for recipe in alone(128).values())


def test_folding_a_norm_that_suppresses_large_channels_costs() -> None:
    """All ways compute the same; with one that suppresses nothing, folding costs nothing."""
    generator = torch.Generator().manual_seed(1)
    weight, stream = torch.randn(32, 576, generator=generator), torch.randn(50, 576, generator=generator)
    stream[:, :8] *= 40
    norm = torch.ones(576)
    norm[:8] = 1 / 40
    found = folding.errors_of(weight, norm, stream * norm)
    assert found["norm folded"] > 2 * found["as it is"]
    assert found["norm folded, Hadamard"] > 5 * found["not folded, Hadamard"]
    neutral = folding.errors_of(weight, torch.ones(576), stream * norm)
    assert neutral["norm folded"] == neutral["as it is"]


def test_a_section_says_what_was_measured_and_whether_the_order_holds(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    variants = compared(128)
    for number, variant in enumerate(variants):
        loss = 3.0 + 0.1 * (number if number != 2 else 0.5)
        pieces = [loss * 10 + 0.01 * piece for piece in range(10)]
        about = {"model": "smollm2", "recipe": variant.recipe.to_json(), "kv": "int4", "as_chat": True}
        numbers = {"perplexity": 20.0 + number, "tokens": 100, "pieces": pieces, "bits_per_weight": 4.16}
        about["backend"] = variant.backend
        results.add("points", [number], code_of("points", variant.backend), {**about, **numbers})
    found = section(results, tmp_path)
    assert found.count("| holds |") == 4
    assert found.count("| **broken** |") == 1
    assert "W4A8 QoQ, per channel" in found
    assert "Fig. 12" not in found
    assert "by the code that wrote this page" in found


def test_numbers_are_of_the_code_that_made_and_ran_the_model(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    about = {"model": "smollm2", "kv": "int4", "as_chat": True, "tokens": 9, "pieces": [9.0], "bits_per_weight": 4.0}
    for number, variant in enumerate(compared(128)[:3]):
        code = code_of("points", variant.backend) if number < 2 else "1"
        own = {**about, "recipe": variant.recipe.to_json(), "backend": variant.backend, "perplexity": 20.0 + number}
        results.add("points", [number], code, own)
    found = section(results, tmp_path)
    assert f"22.00{OLD} |" in found
    assert f"21.00{OLD}" not in found
    assert f"of 1 of 3 measurements, marked {OLD}, the code has changed since" in found
    assert len({code_of("points", "cpu"), code_of("points", "reference"), code_of("full"), code_of("folding")}) == 4
