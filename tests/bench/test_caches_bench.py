"""The report on caches: its verdicts on made-up numbers, and its measurements on small extents of real ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.oracle import Oracle
from models.store import Store
from runtime.backends.decoder import DecoderOptions
from runtime.kv.kinds import KINDS, PARTS, SINKS, SPARSITY, KVKind, Part, page_bytes
from runtime.measure.evaluate import perplexity
from tests.bench.caches import corrected, drift, gear, judge, peak, reasons, size, smooth, summary
from tests.bench.caches import perplexity as losses
from tests.bench.caches.extent import CONTEXTS, ORDER, paged_share, window
from tests.bench.caches.full import STEP, FullDecoder, feed, rows
from tests.bench.caches.laboratory import Codes, Laboratory, Notebook
from tests.bench.caches.report import write
from tests.bench.caches.view import View
from tests.bench.reporting.cases import CASES
from tests.bench.reporting.losses import difference
from tests.bench.reporting.results import Results, digest
from tests.bench.reporting.verdicts import Verdict
from tests.close import assert_close

ENGLISH, DEMO = CASES[0], CASES[1]
PIECES, TOKENS, FULL = 16, 1600, 3.9
COST: dict[str, float] = {
    "fp16": 0.0,
    "int8": 0.0004,
    "hierarchical": 0.0006,
    "int4": 0.012,
    "kcvt4": 0.009,
    "gear-l4": 0.006,
    "gear4": 0.004,
    "kivi2": 0.08,
    "gear-l2": 0.05,
    "gear2": 0.03,
}
"""Nats that each kind costs, as the papers would have it."""
DRIFTS = {kind: 0.001 + cost for kind, cost in COST.items()}
PLANTED = smooth.PLANTED


def entry(nats: float, **others: Any) -> dict[str, Any]:
    """Numbers as an evaluation leaves them; the noise is common to all, as on one text."""
    noise = np.random.default_rng(0).normal(0, 0.05, PIECES)
    pieces = [(nats + part - noise.mean()) * TOKENS / PIECES for part in noise]
    return {"nats": nats, "perplexity": math.exp(nats), "tokens": TOKENS, "pieces": pieces, **others}


def results(path: Path) -> Results:
    """A results file of one model in which every promise holds."""
    found = Results(path)
    found.about = {
        "date": "2026-01-01",
        "cpu": "a processor",
        "threads": 2,
        "variant": "generic",
        "versions": {"numpy": "2"},
        "minutes": {"perplexity": 1.5},
    }
    base = {"model": ENGLISH.name, "smooth": False, "window": 256, "quantized": 0.8}
    found.add("perplexity", 0, "", entry(FULL, **{**base, "weights": "full", "backend": "oracle", "kind": "fp32"}))
    for weights, backend in losses.WAYS:
        for kind, cost in COST.items():
            about = {**base, "weights": weights, "backend": backend, "kind": kind}
            found.add("perplexity", about, "", entry(FULL + cost, **about))
    for model, ratio, gain in ((ENGLISH.name, 3.0, 0.0), (PLANTED, 20.0, 0.05)):
        found.add("channels", model, "", {"model": model, "ratio": [ratio, 2.0], "median": [2.0, 2.0]})
        for smoothed in (False, True):
            for kind in smooth.KINDS_TRIED:
                cost = COST[kind] + (0 if smoothed or kind == "fp16" else gain)
                about = {**base, "model": model, "weights": "4-bit", "backend": "reference", "kind": kind}
                about["smooth"] = smoothed
                found.add("perplexity", about, "", entry(FULL + cost, **about))
    errors = {kind: {"keys": COST[kind], "values": 2 * COST[kind]} for kind in gear.KINDS_SHOWN}
    parts = {bits: {part: [0.2, 0.15, 0.1] for part in ("keys", "values")} for bits in ("4", "2")}
    iteration = {bits: {part: {"mean": 1.01, "worst": 1.04} for part in ("keys", "values")} for bits in ("4", "2")}
    about = {"model": ENGLISH.name, "head_dim": 64, "tokens": 2048}
    found.add("gear", 0, "", {**about, "errors": errors, "parts": parts, "iteration": iteration})
    for D in size.HEAD_DIMS:
        for kind in ORDER:
            counted = size.accounted(KINDS[kind], D)
            shares = {f"{b} {n}": counted for b in ("reference", "cpu") for n in ("page", *size.LENGTHS)}
            found.add("size", [kind, D], "", {"kind": kind, "head_dim": D, "accounted": counted, **shares})
    for way in drift.WAYS:
        for kind in ORDER:
            about = {"model": ENGLISH.name, "way": way, "kind": kind, "mean": DRIFTS[kind], "repeats": 0.5}
            bins = [DRIFTS[kind]] * 50
            steps = {"deviation": bins, "first": 0.1, "last": 0.2, "different": 10, "steps": 1001}
            found.add("drift", [way, kind], "", {**about, **steps})
    for tokens in CONTEXTS:
        named = [(kind, 0.2 + COST[kind]) for kind in ORDER] + [("llama.cpp f16", 0.3), ("llama.cpp q4_0", 0.4)]
        timed = [{"kind": kind, "p50": p50, "best": p50, "kv_bytes_per_token": 100.0} for kind, p50 in named]
        for row in timed:
            row |= {"turn_p50": 0.1, "turn_mean": 0.1, "longest": 0.2}
        about = {"tokens": tokens, "rounds": 3, "steps": 8, "threads": 2, "weight_bytes": 10**7, "peer": "0.0"}
        found.add("speed", tokens, "", {**about, "rows": timed})
    attended = [{"kind": kind, "p50": 0.3, "bytes_per_token": 400.0} for kind in [*ORDER, "hierarchical draft"]]
    attended[0] |= {"p50": 1.0, "bytes_per_token": 1600.0}
    shape = {"layers": 2, "kv_heads": 4, "share": 8, "head_dim": 64}
    found.add("attention", 0, "", {"tokens": judge.LONG, "threads": 2, "shape": shape, "rows": attended})
    return found


def verdicts(found: Results) -> dict[str, Verdict]:
    """By the text of each claim."""
    return {claim.text: claim.verdict for claim in judge.claims(View(found))}


def one(found: dict[str, Verdict], words: str) -> Verdict:
    """The verdict of the claim that says these words."""
    return next(verdict for text, verdict in found.items() if words in text)


def change(found: Results, nats: float, **about: Any) -> None:
    """Give an evaluation another loss."""
    for loss in found.sections["perplexity"].values():
        if all(loss[name] == value for name, value in about.items()):
            loss |= entry(nats)


def test_every_promise_holds_on_numbers_as_the_papers(tmp_path: Path) -> None:
    found = verdicts(results(tmp_path / "results.json"))
    assert {claim: verdict for claim, verdict in found.items() if verdict is not Verdict.YES} == {}
    assert len(found) == 15


@pytest.mark.parametrize(
    ("words", "kind", "nats"),
    [
        ("int8 is within", "int8", FULL + 0.002),
        ("hierarchical is within", "hierarchical", FULL + 0.003),
        ("int4 is within", "int4", FULL + 0.03),
        ("gear4 is within", "gear4", FULL + 0.0085),
        ("gear2 is within", "gear2", FULL + 0.06),
        ("gear4 is better", "gear4", FULL + 0.0095),
        ("gear2 is better", "gear2", FULL + 0.09),
    ],
)
@pytest.mark.parametrize("way", losses.WAYS)
def test_a_loss_that_breaks_its_promise_is_seen(
    tmp_path: Path, words: str, kind: str, nats: float, way: tuple[str, str]
) -> None:
    found = results(tmp_path / "results.json")
    change(found, nats, model=ENGLISH.name, kind=kind, weights=way[0], backend=way[1], smooth=False)
    assert one(verdicts(found), words) is Verdict.NO


def test_a_backend_that_costs_more_is_seen(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    change(found, FULL + COST["kcvt4"] + 0.005, kind="kcvt4", backend="cpu")
    assert one(verdicts(found), "On the CPU no kind") is Verdict.NO


def test_a_difference_of_one_piece_has_no_error() -> None:
    one, other = ({"pieces": [nats], "tokens": 100} for nats in (301.0, 300.0))
    assert judge.percent(difference(one, other)) == "+1.01 %"
    one["pieces"], other["pieces"] = [150.0, 151.0], [150.0, 150.0]
    assert judge.percent(difference(one, other)) == "+1.01 ± 1.00 %"


def test_a_window_that_is_never_compressed_is_not_judged(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for loss in found.sections["perplexity"].values():
        loss["quantized"] = 0 if loss["kind"] == "hierarchical" else 0.8
    assert one(verdicts(found), "hierarchical is within") is Verdict.NONE


def test_other_broken_promises_are_seen(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    gear_entry = next(iter(found.sections["gear"].values()))
    gear_entry["errors"]["gear2"]["values"] = 1.0
    gear_entry["iteration"]["4"]["keys"]["worst"] = 1.06
    for row in found.sections["drift"].values():
        row["mean"] = 0.2 if row["kind"] == "gear2" else row["mean"]
    change(found, FULL + 0.1, model=PLANTED, kind="int4", smooth=True)
    next(iter(found.sections["size"].values()))["reference page"] *= 1.02
    for row in next(iter(found.sections["attention"].values()))["rows"]:
        row["p50"] = 0.45 if row["kind"] == "int4" else row["p50"]
    for timed in found.sections["speed"].values():
        for row in timed["rows"]:
            row["p50"] = 0.2 if row["kind"] == "llama.cpp q4_0" else row["p50"]
    seen = verdicts(found)
    broken = ("The error of keys", "Power iteration", "Over the generation", "SmoothAttention", "Pages take")
    for words in (*broken, "int4's attention", "faster than llama.cpp"):
        assert one(seen, words) is Verdict.NO, words


def test_the_report_draws_everything_and_the_same_each_time(tmp_path: Path) -> None:
    view = View(results(tmp_path / "results.json"))
    contents = []
    for folder in ("one", "two"):
        write(view, tmp_path / folder / "kv.md")
        files = sorted((tmp_path / folder).rglob("*.*"))
        names = ("attention", f"drift-{ENGLISH.name}", "gear", "loss", "speed")
        assert {file.name for file in files if file.suffix == ".svg"} == {f"{name}.svg" for name in names}
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]
    text = (tmp_path / "one" / "kv.md").read_text(encoding="utf-8")
    assert "15 of 15 hold" in text
    assert "](kv/loss.svg)" in text


def test_a_report_of_few_numbers_is_written_too(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for section in ("gear", "size", "drift", "channels", "attention", "speed"):
        del found.sections[section]
    found.about["skipped"] = {"speed": "PeerError: no such program"}
    write(View(found), tmp_path / "kv.md")
    assert "speed: PeerError" in (tmp_path / "kv.md").read_text(encoding="utf-8")
    assert one(verdicts(found), "faster than llama.cpp") is Verdict.NONE


def test_the_page_begins_with_what_most_readers_want(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    for kind, nats in (("fp16", 3.0), ("int4", 3.01)):
        about = {"model": "smollm2", "smooth": False, "window": 1024, "weights": "4-bit", "backend": "cpu"}
        found.add("perplexity", [about, kind], "", entry(nats, **about, kind=kind, quantized=0.8))
    text = summary.section(View(found))
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert f"{math.exp(3.0):.2f}" in lines["fp16"]
    assert "+1.01 ± 0.00 %" in lines["int4"]
    assert "0.30" in lines["int4"]
    assert lines["llama.cpp q4_0"].endswith("| 2 |")


def test_numbers_of_another_version_are_marked(tmp_path: Path) -> None:
    found, now = Results(tmp_path / "results.json"), Codes.now()
    found.about = results(tmp_path / "other.json").about
    about = {"model": ENGLISH.name, "weights": "4-bit", "backend": "cpu", "kind": "fp16", "smooth": False}
    codes = digest([now.cpu, now.making]), "of yesterday"
    says = {
        0: "by the code that wrote this page",
        1: "of 1 of 2 measurements, marked †",
        2: "; the code has changed since",
    }
    for number, old in enumerate(((codes[0], codes[0]), codes, (codes[1], codes[1]))):
        for key, (code, model) in enumerate(zip(old, (ENGLISH.name, DEMO.name), strict=True)):
            numbers = entry(FULL + key, **{**about, "model": model}, window=256 << 2 * key, quantized=0.8)
            found.add("perplexity", key, code, numbers)
        write(View(found), tmp_path / "kv.md")
        text = (tmp_path / "kv.md").read_text(encoding="utf-8")
        assert [says[number] in text for number in says] == [number == other for other in says]
        assert text.count(f"{math.exp(FULL + 1):.2f}†") == int(number == 1)


def test_a_model_whose_generation_was_not_measured_is_not_judged(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    del found.sections["drift"]
    (claim,) = [claim for claim in judge.claims(View(found)) if "logits drift" in claim.text]
    assert {finding.numbers for finding in claim.findings.values()} == {"not measured"}


def test_reasons_name_claims_that_exist(tmp_path: Path) -> None:
    assert set(reasons.WHY) <= set(verdicts(results(tmp_path / "results.json")))


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    torch.set_num_threads(1)
    return Checkpoint.open(DEMO.folder)


@pytest.mark.parametrize("kind", ["int4", "gear2", "hierarchical"])
def test_steps_of_a_page_see_what_single_tokens_see(demo: Checkpoint, kind: KVKind) -> None:
    text = DEMO.text(300)
    long, short = (FullDecoder(demo, DecoderOptions(kv=kind, context=300)) for _ in range(2))
    together = np.concatenate([rows(long, text[at : at + STEP], at) for at in range(0, 300, STEP)])
    alone = np.stack([feed(short, text[at : at + 1], at) for at in range(300)])
    exact = Oracle(demo).logits(torch.tensor([text]))[0].numpy()
    # Sums in another order round a code differently now and then, which is little beside what the kind loses.
    assert np.linalg.norm(together - alone) < 0.2 * np.linalg.norm(alone - exact)
    assert long.cache.paged_length(0) == short.cache.paged_length(0) > 0


def test_an_evaluation_reads_the_compressed_cache_as_decoding_does(demo: Checkpoint) -> None:
    """Steps of the default size and steps of one token give the same loss, which differs from the fp16 cache's."""
    text = DEMO.text(460)
    found = []
    for kind, max_rows in (("kivi2", 128), ("kivi2", 1), ("fp16", 128)):
        decoder = FullDecoder(demo, DecoderOptions(kv=kind, context=460, max_rows=max_rows))  # type: ignore[arg-type]
        found.append(perplexity(decoder, text, 460, 460).nll_sum / 459)
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert abs(found[0] - found[2]) > 4e-4


@pytest.mark.parametrize("part", PARTS)
def test_only_the_latest_pages_of_a_prompt_are_corrected(demo: Checkpoint, part: Part) -> None:
    """Of two pages of a prompt the first one stands as the backbone leaves it; pages behind the prompt have both."""
    text, window = DEMO.text(520), 768
    page = KINDS["gear2"].page
    ways = (corrected.Way(share=0.5), corrected.Way(), corrected.Way(rank=0))
    partly, whole, plain = (corrected.decoder_of(demo, None, window, way) for way in ways)
    for decoder in (partly, whole, plain):
        for at in range(0, len(text), STEP):
            rows(decoder, text[at : at + STEP], at)
    read = [decoder.cache.read(part, 0, 0)[SINKS : SINKS + 3 * page] for decoder in (partly, whole, plain)]
    first, later = slice(0, page), slice(page, 3 * page)
    assert torch.equal(read[0][first], read[2][first])
    assert not torch.equal(read[0][first], read[1][first])
    assert torch.equal(read[0][later], read[1][later])
    assert not torch.equal(read[0][later], read[2][later])


def test_every_way_to_correct_is_measured_once() -> None:
    ways = corrected.ways()
    assert len(ways) == len(set(ways)) == len(corrected.RANKS) + len(corrected.SPARSITIES) + len(corrected.SHARES) - 2
    assert corrected.Way(sparsity=SPARSITY).kind == replace(KINDS["gear2"], name="gear2")


def test_what_corrects_and_what_is_held_stand_in_tables(tmp_path: Path) -> None:
    found = results(tmp_path / "results.json")
    about = {"model": "smollm2", "window": 2048, "rank": None, "sparsity": None, "share": None}
    found.add("corrected", 0, "", entry(3.0, **about, bytes=100.0))
    for number, way in enumerate(corrected.ways()):
        named = {"rank": way.rank, "sparsity": way.sparsity, "share": way.share}
        nats = 3.3 - 0.02 * way.rank - way.sparsity - 0.01 * way.share
        found.add("corrected", number + 1, "", entry(nats, **{**about, **named}, bytes=20.0 + way.rank))
    for kind, context in itertools.product(("fp16", "int4"), (1024, 8192)):
        sizes = {"kv_bytes": 5 * context * 1000, "peak_bytes": 9 * context * 1000, "weight_bytes": 600_000_000}
        found.add("memory", [kind, context], "", {"model": "a shape", "kind": kind, "context": context, **sizes})
    write(View(found), tmp_path / "kv.md")
    text = (tmp_path / "kv.md").read_text(encoding="utf-8")
    lines = {tuple(cell.strip() for cell in line.strip("| ").split("|"))[:2] for line in text.splitlines()}
    assert {("0", "20.0"), ("8", "28.0"), ("4 %", "24.0"), ("50 %", f"{math.exp(3.215):.3f}")} <= lines
    assert "| fp16 | 5 | 9 | 41 | 74 |" in text
    assert "a shape, 600 MB of weights" in text


@pytest.mark.slow
def test_a_longer_context_holds_more_and_peaks_higher() -> None:
    """In processes of their own: the cache's buffers are in the peak, and so are the weights."""
    short, long = (peak.asked({"shape": 4, "kind": "fp16", "context": context}) for context in (256, 4096))
    assert long["kv_bytes"] == 16 * short["kv_bytes"]
    grown = long["peak_bytes"] - short["peak_bytes"]
    assert grown == pytest.approx(long["kv_bytes"] - short["kv_bytes"], rel=0.3)
    assert short["peak_bytes"] > short["weight_bytes"] > 4e8


def test_the_share_that_is_read_compressed() -> None:
    assert paged_share("int8", 256, 128) == 1
    assert paged_share("hierarchical", 256, 128) == 0
    assert paged_share("kivi2", 256, 193) == pytest.approx(
        np.mean([128 / (position + 1) for position in range(192, 255)])
    )
    assert window("english3m", 1024) == (256, 128)
    assert window("demo", 4096) == (1024, 512)


def test_full_precision_over_the_fp16_cache_is_nearly_exact(demo: Checkpoint) -> None:
    text = DEMO.text(100)
    through = rows(FullDecoder(demo, DecoderOptions(context=100)), text, 0)
    exact = Oracle(demo).logits(torch.tensor([text]))[0].numpy()
    assert np.linalg.norm(through - exact) < 1e-3 * np.linalg.norm(exact)


def test_accounting_is_what_pages_hold() -> None:
    for D in size.HEAD_DIMS:
        spec = size._spec(D)
        for kind in KINDS.values():
            share = 100 * page_bytes(kind, spec) / (kind.page * 4 * size.LAYERS * size.KV_HEADS * D)
            assert size.accounted(kind, D) == pytest.approx(share, rel=1e-6), kind.name


def test_a_planted_model_has_the_same_logits_and_other_keys(tmp_path: Path, demo: Checkpoint) -> None:
    smooth.plant(demo.spec, DEMO.folder, tmp_path / "planted")
    planted = Checkpoint.open(tmp_path / "planted")
    text = torch.tensor([DEMO.text(40)])
    one_, other = (Oracle(checkpoint).logits(text) for checkpoint in (demo, planted))
    assert_close(one_, other, "half attention")
    magnitudes = [checkpoint.linear("layers.0.qkv")[0].float().abs().amax(1) for checkpoint in (demo, planted)]
    raised = magnitudes[1][demo.spec.q_width :] > 8 * magnitudes[0][demo.spec.q_width :]
    assert int(raised.sum()) == 2 * smooth.PAIRS * demo.spec.num_kv_heads


def test_numbers_are_measured_once_and_again_where_asked(tmp_path: Path) -> None:
    lines: list[str] = []
    found = Results(tmp_path / "results.json")
    laboratory = Laboratory(DEMO, Store(tmp_path / "store"), Notebook(found, lines.append), 300)
    first = losses.point(laboratory, losses.FULL, "reference", "int4")
    assert losses.point(laboratory, losses.FULL, "reference", "int4") is first
    assert len(lines) == 2  # quantized, measured
    again = Laboratory(DEMO, Store(tmp_path / "store"), Notebook(found, lines.append, frozenset({"perplexity"})), 300)
    assert losses.point(again, losses.FULL, "reference", "int4")["nats"] == first["nats"]
    assert len(lines) == 3


def test_errors_of_keys_and_values_and_drift_of_a_real_model(tmp_path: Path) -> None:
    notebook = Notebook(Results(tmp_path / "results.json"), lambda _: None)
    laboratory = Laboratory(DEMO, Store(tmp_path / "store"), notebook, 300)
    gear.measure(laboratory)
    drift.measure(laboratory, 250)
    view = View(notebook.results)
    errors = view.gear[DEMO.name]["errors"]
    assert errors["int8"]["keys"] < 0.1 * errors["int4"]["keys"]
    for bits, kind in (("4", "gear4"), ("2", "gear2")):
        later, ours = view.gear[DEMO.name]["paper"][bits][1:]
        assert {name: ours[name] for name in ("keys", "values")} == errors[kind]
        assert (later["tokens"], later["rank"]) == gear.PAPER[int(bits)][1]
        assert ours["bytes"] == pytest.approx(size.accounted(KINDS[kind], 64), rel=0.01)  # type: ignore[index]
    means = {kind: view.drift[DEMO.name, "sampled", kind]["mean"] for kind in ORDER}
    assert means["fp16"] < means["int8"] < means["int4"]
    assert means["gear2"] < means["kivi2"]
