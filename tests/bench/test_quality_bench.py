"""The quality report: its statistics, its verdicts on made-up numbers, and a point measured on the bundled model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import ModelError
from models.store import Store
from tests.bench.quality import judge, llama, measure, points, reasons
from tests.bench.quality.measure import Laboratory
from tests.bench.quality.points import Extent, Point
from tests.bench.quality.report import write
from tests.bench.quality.view import View, closed
from tests.bench.reporting.cases import CASES
from tests.bench.reporting.losses import difference
from tests.bench.reporting.results import Results
from tests.bench.reporting.verdicts import Verdict
from tests.close import assert_close

ENGLISH, DEMO = CASES[0], CASES[1]
PIECES, TOKENS = 16, 1600
FULL = 3.9
METHOD_LOSS = {"rtn": 1.0, "gptq": 0.9, "awq": 0.8, "awq-gptq": 0.75, "squeezellm": 0.7}
SELECTOR_GAIN = {"approx": 1.0, "exact": 1.002, "static": 0.5, "random": 0.1}


def entry(nats: float, **others: Any) -> dict[str, Any]:
    """Numbers as a measurement leaves them; the noise is common to all, as on one text."""
    noise = np.random.default_rng(0).normal(0, 0.05, PIECES)
    pieces = [(nats + part - noise.mean()) * TOKENS / PIECES for part in noise]
    return {"nats": nats, "perplexity": math.exp(nats), "tokens": TOKENS, "pieces": pieces, **others}


def expected(point: Point) -> float:
    """A loss as the paper would have it."""
    loss = METHOD_LOSS[point.method] * {3: 0.12, 3.5: 0.07, 4: 0.03}[point.bits]
    share = min(1.0, 0.06 * math.sqrt(point.k_chunk)) * SELECTOR_GAIN[point.select]
    kept = {2: 0.65, 4: 1.0, 8: 1.02, 16: 1.02}[point.residual_bits]
    return FULL + loss * (1 - min(1.0, share * kept)) * (1.0 if point.group_size > 32 else 0.9)


def results(path: Path, change: dict[str, Any] | None = None) -> Results:
    """A results file of one model in which every promise holds, but for `change`."""
    found = Results(path)
    found.about = {
        "date": "2026-01-01",
        "cpu": "a processor",
        "threads": 1,
        "variant": "generic",
        "versions": {"numpy": "2"},
        "texts": {ENGLISH.name: {"tokens": TOKENS}},
        "skipped": {},
    }
    found.add("full", 0, "", entry(FULL, model=ENGLISH.name))
    for point in points.points(ENGLISH.name, ENGLISH.group_size, ENGLISH.closer, Extent()):
        nats = expected(point) if change is None or not change["where"](point) else change["nats"](point)
        fetched = point.k_chunk * point.residual_bits * 1024
        recall = change["recall"] if change and "recall" in change else 0.9
        found.add(
            "points", point.to_json(), "", {**point.to_json(), **entry(nats, fetched_bytes=fetched, recall=recall)}
        )
        about = {**point.to_json(), "gpu_bytes": int(400_000 * point.bits), "bits_per_weight": point.bits + 0.2}
        found.add("stored", [point.method, point.bits, point.group_size, point.residual_bits], "", about)
    peer = {"kind": "Q3_K_M", "weighted": False, "gpu_bytes": 1_900_000, "bits_per_weight": 4.5, "types": {"Q3_K": 1.0}}
    rows = [
        entry(FULL + 0.06, **peer),
        entry(FULL + 0.05, **{**peer, "weighted": True}),
        entry(FULL, **{**peer, "kind": "F32"}),
    ]
    found.add("peers", 0, "", {"model": ENGLISH.name, "version": "0.0", "rows": rows})
    channels = [[step % 7, 100 + step] for step in range(100)]
    recalls = {kind: {"0.01": 0.2, "0.05": 0.3} for kind in ("qkv", "o", "gate_up", "down")}
    found.add(
        "outliers",
        0,
        "",
        {"model": ENGLISH.name, "layer": "layers.2.down", "width": 512, "channels": channels, "recall": recalls},
    )
    speed = {
        "method": "rtn",
        "parameters": 10**7,
        "seconds": 5.0,
        "peak_bytes": 5 << 28,
        "limit_bytes": 6 << 28,
        "same": True,
    }
    found.add("speed", 0, "", speed)
    return found


def verdicts(found: Results) -> dict[str, Verdict]:
    """By the first words of each claim."""
    return {" ".join(claim.text.split()[:3]): claim.verdict for claim in judge.claims(View(found))}


def test_every_promise_holds_on_numbers_as_the_papers(tmp_path: Path) -> None:
    found = verdicts(results(tmp_path / "results.json"))
    assert {claim: verdict for claim, verdict in found.items() if verdict is not Verdict.YES} == {}
    assert len(found) == 14


@pytest.mark.parametrize(
    ("claim", "where", "nats"),
    [
        ("At 3, 3.5", lambda p: p.method == "awq" and p.k_chunk == 0, lambda p: FULL + 0.2),
        ("The same for", lambda p: p.method == "squeezellm" and p.k_chunk == 0, lambda p: FULL + 0.2),
        (
            "Perplexity falls, or",
            lambda p: p.method == "gptq" and p.bits == 4 and p.k_chunk == 64,
            lambda p: FULL + 0.1,
        ),
        ("Dynamic selection is", lambda p: p.select == "static", lambda p: FULL + 0.001),
        ("Static selection is", lambda p: p.select == "random", lambda p: FULL + 0.001),
        ("Approximate selection is", lambda p: p.select == "exact", lambda p: expected(p) - 0.02),
        ("At equal fetched", lambda p: p.residual_bits == 8, lambda p: FULL),
        ("At 3 bits", lambda p: p.k_chunk == 64 and p.method == "rtn", lambda p: expected(replace(p, k_chunk=16))),
        (
            "Likewise with every",
            lambda p: p.k_chunk == 64 and p.method == "gptq",
            lambda p: expected(replace(p, k_chunk=16)),
        ),
        ("In no more", lambda p: p.bits == 3 and p.k_chunk > 0, lambda p: FULL + 0.08),
    ],
    ids=["awq", "squeezellm", "monotone", "static", "random", "exact", "residuals", "closed", "closed by all", "peer"],
)
def test_a_broken_promise_is_seen(tmp_path: Path, claim: str, where: Any, nats: Any) -> None:
    found = verdicts(results(tmp_path / "results.json", {"where": where, "nats": nats}))
    assert found[claim] is Verdict.NO


def test_too_low_a_recall_is_seen(tmp_path: Path) -> None:
    change = {"where": lambda _: False, "nats": expected, "recall": 0.74}
    assert verdicts(results(tmp_path / "results.json", change))["Approximate selection is"] is Verdict.NO


def test_a_difference_within_the_noise_is_no_verdict(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    noisy = np.random.default_rng(1).normal(0, 5, PIECES)
    for point in found.sections["points"].values():
        if point["method"] == "awq" and point["k_chunk"] == 0:
            point["pieces"] = list(np.asarray(point["pieces"]) + noisy - noisy.mean())
    assert verdicts(found)["At 3, 3.5"] is Verdict.UNSURE


def test_a_conversion_that_changes_the_model_is_seen(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    rows = next(iter(found.sections["peers"].values()))["rows"]
    rows[-1]["perplexity"] *= 1.002
    assert verdicts(found)["llama.cpp in float32"] is Verdict.NO


def test_what_llama_cpp_cannot_hold_in_three_bits_is_not_compared(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for row in next(iter(found.sections["peers"].values()))["rows"]:
        row["types"] = {"Q4_0": 0.9, "F16": 0.1}
    assert verdicts(found)["In no more"] is Verdict.NONE


def test_the_report_draws_everything_and_the_same_each_time(tmp_path: Path) -> None:
    view = View(results(tmp_path / "results.json"))
    contents = []
    for folder in ("one", "two"):
        write(view, tmp_path / folder / "quality.md")
        files = sorted((tmp_path / folder).rglob("*.*"))
        assert {file.name for file in files if file.suffix == ".svg"} == {
            f"{name}.svg" for name in ("bytes", f"curves-{ENGLISH.name}", "exact", "outliers", "selectors")
        }
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]
    text = (tmp_path / "one" / "quality.md").read_text(encoding="utf-8")
    assert "14 of 14 hold" in text
    assert "](quality/bytes.svg)" in text
    assert f"{math.exp(FULL):.2f}" in text


def test_a_report_of_few_numbers_says_what_is_missing(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for section in ("peers", "outliers", "speed"):
        del found.sections[section]
    found.sections["points"] = {
        k: v for k, v in found.sections["points"].items() if v["method"] == "rtn" and v["bits"] == 3
    }
    found.about["skipped"] = {"english3m awq 3 bits": "QuantizationError: no such method"}
    write(View(found), tmp_path / "quality.md")
    text = (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert "english3m awq 3 bits: QuantizationError" in text
    assert "llama.cpp was not measured" in text
    assert verdicts(found)["At 3, 3.5"] is Verdict.NONE


def test_differences_are_of_pairs() -> None:
    rng = np.random.default_rng(0)
    common, own = rng.normal(300, 30, 32), rng.normal(0, 0.5, 32)
    one = {"pieces": list(common + 1 + own), "tokens": 3200}
    other = {"pieces": list(common), "tokens": 3200}
    found = difference(one, other)
    assert found.nats == pytest.approx((1 + own.mean()) / 100)
    assert found.error == pytest.approx(own.std(ddof=1) / math.sqrt(32) / 100)
    assert found.worse
    assert difference(other, one).better
    half = {"pieces": list(common + (1 + own) / 2), "tokens": 3200}
    part = closed(one, half, other)
    assert part.share == pytest.approx(0.5)
    assert part.error < 1e-9


def test_points_of_a_place_fetch_the_same_bits() -> None:
    for place in range(4):
        assert len({bits * numbers[place] for bits, numbers in points.RESIDUALS.items()}) == 1
    found = points.points(ENGLISH.name, 128, ENGLISH.closer, Extent())
    assert len(found) == len(set(found))
    made = [(point.method, point.bits, point.group_size, point.residual_bits) for point in found]
    assert sum(one != other for one, other in pairwise(made)) + 1 == len(set(made))


def test_results_are_found_again_unless_the_code_changed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results(path)
    first.add("points", {"a": 1}, "old", {"model": "é", "value": 1})
    first.add("points", {"a": 2}, "old", {"model": "b", "value": 2})
    first.save()
    again = Results(path)
    assert again.find("points", {"a": 1}, "new") is None
    assert Results(path, keep=True).find("points", {"a": 1}, "new") is not None
    found = again.find("points", {"a": 1}, "old")
    assert found is not None
    assert found["value"] == 1
    again.drop_unused()
    again.save()
    assert [row["value"] for row in json.loads(path.read_text(encoding="utf-8"))["sections"]["points"]] == [1]


def test_rows_for_llama_cpp_rotate_in_neighbouring_pairs() -> None:
    rng = np.random.default_rng(0)
    heads, D, K = 3, 8, 5
    rows, x, angles = rng.normal(size=(heads * D, K)), rng.normal(size=K), rng.normal(size=D // 2)
    halves = (rows @ x).reshape(heads, 2, D // 2)
    turned = (halves[:, 0] + 1j * halves[:, 1]) * np.exp(1j * angles)
    pairs = (llama.interleaved(rows.astype(np.float32), heads) @ x).reshape(heads, D // 2, 2)
    other = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    assert_close(other, turned)


def test_an_interpreter_without_llama_cpp_is_no_peer(tmp_path: Path) -> None:
    assert llama.available(str(tmp_path / "no-python")) is None


def test_a_point_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("making_code", "running_code"):
        monkeypatch.setattr(measure, code, lambda: "of this test")
    lines: list[str] = []
    found = Results(tmp_path / "results.json")
    case = replace(DEMO, calibration=lambda: "<|user|>Hello<|end|><|assistant|>Hello! How can I help?<|end|>" * 20)
    laboratory = Laboratory(case, Store(tmp_path / "store"), found, lines.append, 300)
    none = Point(model=DEMO.name, method="rtn", bits=3, group_size=128)
    every = replace(none, k_chunk=1024)
    full = laboratory.full()
    losses = [laboratory.point(point)["nats"] for point in (none, every)]
    assert full["tokens"] == 299
    assert abs(losses[1] - full["nats"]) < abs(losses[0] - full["nats"])
    assert laboratory.point(every)["fetched_bytes"] == sum(
        math.prod(laboratory.checkpoint.spec.linear_shape(name.rsplit(".", 1)[-1])) // 2
        for name in laboratory.checkpoint.spec.linear_names()
    )
    found.save()

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("this was known already")

    monkeypatch.setattr(measure, "quantize", refuse)
    monkeypatch.setattr(measure, "perplexity", refuse)
    again = Laboratory(case, Store(tmp_path / "store"), Results(tmp_path / "results.json"), lines.append, 300)
    assert [again.point(point)["nats"] for point in (none, every)] == losses
    with pytest.raises(ModelError):
        again.point(replace(none, k_chunk=8))


def test_reasons_name_claims_that_exist(tmp_path: Path) -> None:
    texts = {claim.text for claim in judge.claims(View(results(tmp_path / "results.json")))}
    assert set(reasons.WHY) <= texts
