"""The quality report: its statistics, its verdicts on made-up numbers, and a point measured on the bundled model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.recipe import DEFAULT_METHOD, Recipe
from models.store import Store
from tests.bench.quality import __main__ as command
from tests.bench.quality import answers, judge, llama, making, measure, points, summary
from tests.bench.quality.measure import Laboratory
from tests.bench.quality.points import EXTENTS, REAL, Point
from tests.bench.quality.report import write
from tests.bench.quality.view import View, closed
from tests.bench.reporting import markdown
from tests.bench.reporting.cases import CASES
from tests.bench.reporting.losses import difference
from tests.bench.reporting.origin import OLD
from tests.bench.reporting.results import Results
from tests.bench.reporting.verdicts import Verdict
from tests.close import assert_close

CASE, SMALL = points.cases()
DEMO = next(case for case in CASES if case.name == "demo")
QUESTION = ("What can you do?",)
PIECES, TOKENS = 16, 1600
FULL = 3.0
METHOD_LOSS = {"rtn": 1.0, "gptq": 0.9, "awq": 0.8, "awq-gptq": 0.75, "squeezellm": 0.7}
SELECTOR_GAIN = {"approx": 1.0, "exact": 1.002, "static": 0.5, "random": 0.1}
CODE = "of this test"
EXTENT = replace(EXTENTS[REAL], places=(0, 1))


@pytest.fixture(autouse=True)
def code_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's code is what made-up entries are of, whatever it is."""
    for name in ("oracle_code", "making_code", "running_code", "tuning_code"):
        monkeypatch.setattr(measure, name, lambda: CODE)
    monkeypatch.setattr("tests.bench.quality.view.peers.code", lambda: CODE)


def entry(nats: float, **others: Any) -> dict[str, Any]:
    """Numbers as a measurement leaves them; the noise is common to all, as on one text."""
    noise = np.random.default_rng(0).normal(0, 0.05, PIECES)
    pieces = [(nats + part - noise.mean()) * TOKENS / PIECES for part in noise]
    return {"nats": nats, "perplexity": math.exp(nats), "tokens": TOKENS, "pieces": pieces, "recall": None, **others}


def expected(point: Point) -> float:
    """A loss as the paper would have it."""
    loss = METHOD_LOSS[point.method] * {3: 0.12, 3.5: 0.07, 4: 0.03}[point.bits]
    share = min(1.0, 0.06 * math.sqrt(point.k_chunk)) * SELECTOR_GAIN[point.select]
    kept = {2: 0.65, 4: 1.0, 8: 1.02, 16: 1.02}[point.residual_bits]
    prompts = 0.6 if point.prompt_k_chunk else 1.0
    return FULL + loss * prompts * (1 - min(1.0, share * kept))


def results(path: Path, change: dict[str, Any] | None = None) -> Results:
    """A results file of the real model in which every promise holds, but for `change`."""
    found = Results(path)
    found.about = {
        "date": "2026-01-01",
        "cpu": "a processor",
        "threads": 1,
        "variant": "generic",
        "versions": {"numpy": "2"},
        "texts": {REAL: {"tokens": TOKENS}},
        "skipped": {},
    }
    for way in (False, True):
        found.add("full", way, CODE, entry(FULL, model=REAL, as_chat=way))
    for point in points.points(CASE, EXTENT):
        nats = expected(point) if change is None or not change["where"](point) else change["nats"](point)
        fetched = point.k_chunk * point.residual_bits * 1024
        recall = change["recall"] if change and "recall" in change else 0.9
        numbers = entry(nats, fetched_bytes=fetched, recall=recall)
        found.add("points", point.to_json(), measure.point_code("weights", CODE), {**point.to_json(), **numbers})
        about = {**point.to_json(), "weights": "weights", "bits_per_weight": point.bits + 0.2, "parameters": 10**8}
        sizes = dict.fromkeys(("gpu_bytes", "cpu_buffers", "gpu_buffers"), int(20e6 * point.bits))
        made = {"seconds": 14.0, "processor_seconds": 20.0, "others_seconds": 1.0, "cores": 2}
        made |= {"peak_bytes": 5 << 28, "limit_bytes": 6 << 28}
        identity = [point.method, point.bits, point.group_size, point.residual_bits]
        found.add("stored", identity, CODE, {**about, **sizes, **made, "residual_bytes": 10**8})
    peer = {"kind": "Q3_K_M", "weighted": True, "gpu_bytes": 90_000_000, "bits_per_weight": 4.5, "types": {"Q3_K": 1.0}}
    rows = [
        entry(FULL + 0.06, **peer, chat=entry(FULL + 0.06)),
        entry(FULL, **{**peer, "kind": "F32", "weighted": False, "gpu_bytes": 5 * 10**8}, chat=entry(FULL)),
    ]
    found.add("peers", 0, CODE, {"model": REAL, "version": "0.0", "rows": rows})
    _others(found)
    return found


def _others(found: Results) -> None:
    """What is neither a point nor a model."""
    kinds = ("qkv", "o", "gate_up", "down")
    for bits in (3, 4):
        for percent in points.BUDGETS:
            about = {"model": REAL, "method": DEFAULT_METHOD, "bits": bits, "group_size": CASE.group_size}
            bought = {"k_chunk": dict.fromkeys(kinds, 24), "slowdown_percent": 9.0}
            prompts = {"prompt_k_chunk": 1024, "prompt_slowdown_percent": 12.0, "budget_percent": percent}
            code = measure.point_code("weights", CODE)
            found.add("budgets", [bits, percent], code, {**about, **bought, **prompts, **entry(FULL + 0.1)})
    channels = [[step % 7, 100 + step] for step in range(100)]
    recalls = {kind: {"0.01": 0.2, "0.05": 0.3} for kind in kinds}
    about = {"model": REAL, "layer": "layers.2.down", "width": 512, "channels": channels, "recall": recalls}
    found.add("outliers", 0, CODE, about)
    sizes = {"first": 900.0, "channel": 7, "same": 8, "other": 9.0, "first_rms": 0.1, "rms": 1.0}
    blocks = [{"stream": [500.0, 5.0], "attention": 0.4, **dict.fromkeys(kinds, sizes)} for _ in range(3)]
    found.add("massive", 0, CODE, {"model": REAL, "blocks": blocks})
    found.add("same", 0, CODE, {"method": "rtn", "same": True})
    said = {"question": answers.SHORT[0], "full": "I.", "plain": "a | b", "compensated": "You.\nThey."}
    about = {"model": REAL, "method": DEFAULT_METHOD, "bits": 3, "group_size": CASE.group_size, "k_chunk": 64}
    code = measure.digest([measure.point_code("weights", CODE), CODE])
    found.add("answers", 0, code, {**about, "answers": [said]})


def view_of(found: Results) -> View:
    """What the report is written from."""
    return View(found, [CASE, SMALL])


def verdicts(found: Results) -> dict[str, Verdict]:
    """By the text of each claim."""
    return {claim.text: claim.verdict for claim in judge.claims(view_of(found))}


def verdict(found: Results, words: str) -> Verdict:
    """Of the one claim that has these words."""
    (one,) = [value for text, value in verdicts(found).items() if words in text]
    return one


def test_every_promise_holds_on_numbers_as_the_papers(tmp_path: Path) -> None:
    found = verdicts(results(tmp_path / "results.json"))
    assert {claim: value for claim, value in found.items() if value is not Verdict.YES} == {}
    assert len(found) == 21


@pytest.mark.parametrize(
    ("claim", "where", "nats"),
    [
        (
            "3 bits by the default recipe",
            lambda p: p.as_chat and p.bits == 3 and p.method == DEFAULT_METHOD,
            lambda p: FULL + math.log(1.121),
        ),
        (
            "4 bits by the default recipe",
            lambda p: p.as_chat and p.bits == 4 and p.method == DEFAULT_METHOD,
            lambda p: FULL + math.log(1.041),
        ),
        ("No method is behind", lambda p: p.method == "awq" and p.k_chunk == 16, lambda p: FULL + 0.3),
        ("No method is behind", lambda p: p.method == "squeezellm" and p.as_chat, lambda p: FULL + 0.3),
        ("Perplexity falls", lambda p: p.method == "gptq" and p.k_chunk == 64 and p.bits == 4, lambda p: FULL + 0.1),
        ("Perplexity falls", lambda p: p.as_chat and p.prompt_k_chunk and p.k_chunk == 64, lambda p: FULL + 0.1),
        ("Compensated prompts", lambda p: p.as_chat and p.k_chunk and not p.prompt_k_chunk, lambda p: FULL),
        ("Dynamic selection", lambda p: p.select == "static", lambda p: FULL + 0.001),
        ("Static selection", lambda p: p.select == "random", lambda p: FULL + 0.001),
        ("Approximate selection", lambda p: p.select == "exact", lambda p: expected(p) - 0.02),
        ("At equal fetched", lambda p: p.residual_bits == 8, lambda p: FULL),
        ("At 3 bits k_chunk 64 closes", lambda p: p.k_chunk == 64, lambda p: expected(replace(p, k_chunk=16))),
    ],
)
def test_a_broken_promise_is_seen(tmp_path: Path, claim: str, where: Any, nats: Any) -> None:
    found = results(tmp_path / "results.json", {"where": where, "nats": nats})
    assert verdict(found, claim) is Verdict.NO


@pytest.mark.parametrize(
    ("claim", "section", "change"),
    [
        ("budget of 10 %", "budgets", {"perplexity": math.exp(FULL) * 1.16}),
        ("by rtn within", "stored", {"seconds": 15.5}),
        ("default recipe within 60", "stored", {"seconds": 61.0}),
        ("slowest method within", "stored", {"seconds": 181.0}),
        ("within the memory", "stored", {"peak_bytes": 7 << 28}),
        ("Quantizing twice", "same", {"same": False}),
        ("CPU's buffers", "stored", {"cpu_buffers": 10**9}),
        ("GPU's buffers", "stored", {"gpu_buffers": 10**9}),
        ("and our full precision agree", "full", {"perplexity": math.exp(FULL) * 1.002}),
    ],
)
def test_a_limit_that_is_passed_is_seen(tmp_path: Path, claim: str, section: str, change: dict[str, Any]) -> None:
    found = results(tmp_path / "results.json")
    for one in found.sections[section].values():
        one.update(change)
    assert verdict(found, claim) is Verdict.NO


def test_a_time_of_a_busy_machine_is_no_verdict(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for one in found.sections["stored"].values():
        one |= {"seconds": 200.0, "others_seconds": 150.0}
    assert verdict(found, "slowest method within") is Verdict.UNSURE
    for one in list(found.sections["stored"].values()):
        one |= {"seconds": 14.0}
        if one["method"] == "awq":
            del found.sections["stored"][one["key"]]
    assert verdict(found, "slowest method within") is Verdict.NONE
    assert verdict(found, "by rtn within") is Verdict.YES


def test_too_low_a_recall_is_seen(tmp_path: Path) -> None:
    change = {"where": lambda _: False, "nats": expected, "recall": 0.74}
    assert verdict(results(tmp_path / "results.json", change), "Approximate selection") is Verdict.NO


def test_a_difference_within_the_noise_is_no_verdict(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    noisy = np.random.default_rng(1).normal(0, 50, PIECES)
    for row in next(iter(found.sections["peers"].values()))["rows"]:
        row["gpu_bytes"] = 50_000_000
        row["chat"]["pieces"] = list(np.asarray(row["chat"]["pieces"]) + noisy - noisy.mean())
    assert verdict(found, "3 bits at k_chunk 64 beat") is Verdict.UNSURE


def test_llama_cpp_in_fewer_bytes_is_what_counts(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    rows = next(iter(found.sections["peers"].values()))["rows"]
    better = {"kind": "Q4_0", "gpu_bytes": 95_000_000, "chat": entry(FULL)}
    rows.append({**rows[0], **better})
    assert verdict(found, "3 bits at k_chunk 64 beat") is Verdict.YES
    rows[-1]["gpu_bytes"] = 80_000_000
    assert verdict(found, "3 bits at k_chunk 64 beat") is Verdict.NONE
    rows[-1]["gpu_bytes"] = 50_000_000
    assert verdict(found, "3 bits at k_chunk 64 beat") is Verdict.NO


def test_the_report_draws_everything_and_the_same_each_time(tmp_path: Path) -> None:
    view = view_of(results(tmp_path / "results.json"))
    contents = []
    for folder in ("one", "two"):
        write(view, tmp_path / folder / "quality.md")
        files = sorted((tmp_path / folder).rglob("*.*"))
        assert {file.name for file in files if file.suffix == ".svg"} == {
            f"{name}.svg" for name in ("bytes", f"curves-{REAL}", "massive", "outliers")
        }
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]
    text = (tmp_path / "one" / "quality.md").read_text(encoding="utf-8")
    assert "21 of 21 hold" in text
    assert "](quality/bytes.svg)" in text
    assert "| 0 | qkv | 7 | 8 of 8 | 900 |" in text
    assert f"{math.exp(FULL):.2f}" in text
    assert OLD not in text
    assert f"All {view.count()} entries were measured by the code that wrote this page." in text
    assert "| llama.cpp Q3_K_M | 90.0 |" in text
    assert "At k_chunk 64, our 3 bits are ahead of all of these." in text


def test_numbers_of_an_older_version_are_marked(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    old = next(one for one in found.sections["points"].values() if one["method"] == "awq" and one["bits"] == 4)
    old |= {"perplexity": 123.45, "code": "older"}
    write(view_of(found), tmp_path / "quality.md")
    text = (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert text.count(f"123.45{OLD}") == text.count("123.45") > 0
    assert f"**1 of {view_of(found).count()} entries are older than the code**" in text
    budgets = text.split("## Budgets")[1].split("What compensating")[0]
    assert "by the code that wrote this page.*" in budgets
    assert f"*; of 1 of {len(found.all('points'))} measurements, marked {OLD}, the code has changed since.*" not in text
    assert f"; of 1 of {len(found.all('points'))} measurements, marked {OLD}, the code has changed since.*" in text


def test_a_page_of_nothing_but_older_numbers_says_so_instead_of_marking_each(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for section in found.sections.values():
        for one in section.values():
            one["code"] = "older"
    write(view_of(found), tmp_path / "quality.md")
    text = (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert f"All {view_of(found).count()} entries are older than the code that wrote this page." in text
    assert OLD not in text
    assert "by the code that wrote this page.*" not in text
    assert text.count("; the code has changed since.*") > 8


def test_points_of_weights_that_changed_are_old(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for one in found.sections["stored"].values():
        if one["method"] == "rtn":
            one["weights"] = "others"
    stale = {one["key"] for one in view_of(found).stale}
    assert stale == {one["key"] for one in found.all("points") if one["method"] == "rtn"}
    for one in found.sections["stored"].values():
        one["code"] = "older"
    stale = {one["key"] for one in view_of(found).stale}
    assert {one["key"] for name in ("points", "stored", "budgets", "answers") for one in found.all(name)} == stale


def test_a_report_of_few_numbers_says_what_is_missing(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for section in ("peers", "outliers", "massive", "budgets", "same"):
        del found.sections[section]
    found.sections["points"] = {
        k: v for k, v in found.sections["points"].items() if v["method"] == "rtn" and v["bits"] == 3
    }
    found.about["skipped"] = {"smollm2 awq 3 bits": "MakingError: no such method"}
    write(view_of(found), tmp_path / "quality.md")
    text = (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert "smollm2 awq 3 bits: MakingError" in text
    assert "llama.cpp was not measured" in text
    assert verdict(found, "3 bits by the default recipe") is Verdict.NONE


def test_a_report_without_the_real_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Results(tmp_path / "results.json")
    arguments = ["quality", "--smollm2", str(tmp_path), "--models", REAL, "--only", "full"]
    arguments += ["--results", str(found.path)]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(tmp_path / "quality.md")])
    command.main()
    text = (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert "make quality SMOLLM2=FOLDER" in text.split("## ")[0]
    assert "smollm2: SmolLM2-135M-Instruct is not there as a Hugging Face folder" in text


def test_the_readme_is_written_between_its_markers(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("before\n\n<!-- answers: begin -->\nold\n<!-- answers: end -->\n\nafter", encoding="utf-8")
    summary.write_answers(view_of(results(tmp_path / "results.json")), file)
    text = file.read_text(encoding="utf-8")
    assert text.startswith("before\n\n<!-- answers: begin -->")
    assert text.endswith("<!-- answers: end -->\n\nafter")
    assert "old" not in text
    assert f"| {answers.SHORT[0]} | I. | a \\| b | You.<br>They. |" in text
    with pytest.raises(ValueError, match="markers"):
        markdown.between("no markers", "answers", "")


def test_types_of_llama_cpp_that_are_ahead_are_named(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    next(iter(found.sections["peers"].values()))["rows"][0]["chat"]["perplexity"] = 20.1
    assert "behind Q3_K_M (1.50 × its bytes)" in summary.section(view_of(found))


def test_the_readme_has_the_markers() -> None:
    markdown.between(command.README.read_text(encoding="utf-8"), "answers", "")


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
    for place in range(len(points.RESIDUALS[4])):
        assert len({bits * numbers[place] for bits, numbers in points.RESIDUALS.items()}) == 1
    found = points.points(CASE, EXTENT)
    assert len(found) == len(set(found))
    assert all(point.prompt_k_chunk == 0 for point in found if not point.as_chat)
    assert {point.method for point in found if point.prompt_k_chunk and not point.k_chunk} == set(points.DETAILED)
    for method in points.METHODS:
        ways = {(point.k_chunk, point.prompt_k_chunk) for point in found if point.as_chat and point.method == method}
        fine = points.FINE if method in points.DETAILED else points.CURVE
        together = {(k_chunk, points.ALL_RESIDUALS if k_chunk else 0) for k_chunk in fine}
        apart = {(k_chunk, 0 if k_chunk else points.ALL_RESIDUALS) for k_chunk in fine}
        assert ways == (together | apart if method in points.DETAILED else together)


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


def test_a_chat_is_scored_where_llama_cpp_scores_it() -> None:
    text = llama.Text(tokens=range(1100), window=512, stride=256)
    parts = text.parts()
    assert [(part["first"], part["chat_first"]) for part in parts] == [(1, 256), (256, 256), (256, 256), (256, 256)]
    assert text.scored(as_chat=False) - text.scored(as_chat=True) == 255
    assert sum(len(part["tokens"]) - part["chat_first"] for part in parts) == text.scored(as_chat=True)


@pytest.fixture
def laboratory(tmp_path: Path) -> Laboratory:
    """The bundled model on a short text, with an empty store."""
    case = replace(DEMO, calibration=lambda: "<|user|>Hello<|end|><|assistant|>Hello! How can I help?<|end|>" * 20)
    found = Results(tmp_path / "results.json")
    return Laboratory(case, Store(tmp_path / "store"), found, lambda _: None, 300)


def test_a_point_is_measured_once(tmp_path: Path, laboratory: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    none = Point(model=DEMO.name, method="rtn", bits=3, group_size=128)
    every = replace(none, k_chunk=1024)
    chatty = points.chat(every)
    full = laboratory.full()
    losses = [laboratory.point(point)["nats"] for point in (none, every, chatty)]
    assert full["tokens"] == 299
    assert abs(losses[1] - full["nats"]) < abs(losses[0] - full["nats"])
    assert laboratory.point(chatty)["tokens"] == laboratory.full(as_chat=True)["tokens"] == 299 - 127
    assert laboratory.point(every)["fetched_bytes"] == sum(
        math.prod(laboratory.checkpoint.spec.linear_shape(name)) // 2
        for name in laboratory.checkpoint.spec.linear_names()
    )
    said = answers.low_bit(laboratory.open(every), chatty, QUESTION)[QUESTION[0]]
    assert (
        said.split()[:3]
        == answers.full_precision(laboratory.checkpoint, DEMO.folder, QUESTION)[QUESTION[0]].split()[:3]
    )
    made = laboratory.stored(none)
    assert 0 < made["cpu_buffers"] <= made["gpu_bytes"] <= made["gpu_buffers"]
    assert made["peak_bytes"] <= made["limit_bytes"]
    laboratory._results.save()

    def refuse(*_: object, **__: object) -> None:
        raise making.MakingError("this was known already")

    monkeypatch.setattr(measure, "make", refuse)
    monkeypatch.setattr(measure, "perplexity", refuse)
    known = Results(tmp_path / "results.json")
    again = Laboratory(laboratory.case, Store(tmp_path / "store"), known, lambda _: None, 300)
    assert [again.point(point)["nats"] for point in (none, every, chatty)] == losses
    with pytest.raises(making.MakingError):
        again.point(replace(none, k_chunk=8))
    monkeypatch.setattr(measure, "making_code", lambda: "another version")
    with pytest.raises(making.MakingError):
        again.point(every)


def test_a_process_that_makes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(making.MakingError, match=r"config\.json"):
        making.make(tmp_path, Store(tmp_path / "store"), Recipe(bits=3), name="none", calibration="text")
    assert not list(tmp_path.glob("store/*"))
