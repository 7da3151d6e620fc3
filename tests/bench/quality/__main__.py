"""What compressing costs and what compensation gives back, on real weights: docs/quality.md with its pictures.

    make quality                                 or: python -m tests.bench.quality --models english3m,demo
    make quality PEER_PYTHON=peers-venv/bin/python     beside llama.cpp (tests/peers/README.md says how to install it)

Every number goes through the program's own way: quantize, store, CPU decoder, `runtime.evaluate.perplexity`. Numbers
are kept in docs/quality/results.json with everything that decides them; a run that was stopped goes on where it was.
`--quick` measures a little of everything, noisily, and writes to build/quality/quick.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.recipe import METHODS
from models.store import Store
from runtime.tokenizer import Tokenizer
from tests.bench.quality import llama, outliers, speed
from tests.bench.quality.measure import Laboratory, making_code
from tests.bench.quality.points import BITS, QUICK, Extent, points
from tests.bench.quality.report import write
from tests.bench.quality.view import View
from tests.bench.reporting.cases import CASES, ROOT, STRIDE, WINDOW
from tests.bench.reporting.losses import pieces
from tests.bench.reporting.results import Results
from tests.bench.reporting.run import about_run, teller

DOCS = ROOT / "docs"
BUILD = ROOT / "build" / "quality"
_PEER_KINDS = [(llama.FULL, False), *((kind, weighted) for kind in llama.KINDS for weighted in (False, True))]


def main() -> None:
    """Measure what is missing, judge, draw, and write the report."""
    given = _arguments()
    out = BUILD / "quick" if given.quick else DOCS
    results = Results(given.results or out / "quality" / "results.json", keep=given.keep)
    if not given.report:
        _measure(given, results)
    if not results.about:
        raise SystemExit(f"{results.path} holds no results; run without --report first")
    write(View(results), given.out or out / "quality.md")
    print(f"written to {given.out or out / 'quality.md'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--models", type=_listed, help=f"some of {names}; all that are there unless given")
    parser.add_argument("--methods", type=_listed, help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--bits", type=lambda text: tuple(map(float, _listed(text))), help="some of 3, 3.5, 4")
    parser.add_argument("--quick", action="store_true", help="a little of everything, in a few minutes")
    parser.add_argument("--keep", action="store_true", help="keep numbers of earlier versions of the code")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report from the results file")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python and gguf")
    parser.add_argument("--no-speed", action="store_true", help="leave out speed and memory of quantizing")
    parser.add_argument("--results", type=Path, help="results file; default docs/quality/results.json")
    parser.add_argument("--out", type=Path, help="report; default docs/quality.md")
    given = parser.parse_args()
    wrong = sorted({*(given.models or ())} - {case.name for case in CASES}) + sorted(
        {*(given.methods or ())} - {*METHODS}
    )
    wrong += [f"{bits:g} bits" for bits in given.bits or () if bits not in BITS]
    if wrong:
        parser.error(
            f"unknown: {', '.join(wrong)}; models are {names}; methods are {', '.join(METHODS)}; bits 3, 3.5, 4"
        )
    return given


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _measure(given: argparse.Namespace, results: Results) -> None:
    """Fill the gaps in the results."""
    import torch

    torch.set_num_threads(1)
    extent = QUICK if given.quick else Extent()
    extent = replace(extent, methods=given.methods or extent.methods, bits=given.bits or extent.bits)
    cases = [case for case in CASES if (given.models is None or case.name in given.models) and case.there()]
    peer = llama.available(given.peer_python)
    skipped: dict[str, str] = {}
    for case in CASES:
        if case not in cases and (given.models is None or case.name in given.models):
            skipped[case.name] = "its checkpoint or texts are not beside the repository"
    texts = dict(results.about.get("texts", {}))
    begin = time.monotonic()
    for case in cases:
        laboratory = Laboratory(case, Store(BUILD / "store"), results, teller(begin), extent.tokens)
        texts[case.name] = {"tokens": len(laboratory.tokens)}
        results.about = _about(texts, skipped, peer)
        _model(laboratory, extent, given.peer_python if peer else None, skipped)
        results.save()
    if not given.no_speed:
        _speed(results, extent.methods, teller(begin), skipped)
    if not (given.models or given.methods or given.bits or given.no_speed):
        results.drop_unused()
    results.about = _about(texts, skipped, peer)
    results.save()
    print(f"measured in {(time.monotonic() - begin) / 60:.1f} minutes")


def _model(laboratory: Laboratory, extent: Extent, peer_python: str | None, skipped: dict[str, str]) -> None:
    """Everything about one model."""
    case, checkpoint = laboratory.case, laboratory.checkpoint
    laboratory.full()
    squares = outliers.mean_squares(checkpoint, Tokenizer(case.folder).encode(laboratory.calibration))
    laboratory.known("outliers", outliers.STEPS, lambda: outliers.outliers(checkpoint, laboratory.tokens, squares))
    for point in points(case.name, case.group_size, case.closer, extent):
        what = f"{point.model} {point.method} {point.bits:g} bits g{point.group_size} residual {point.residual_bits}"
        if what in skipped:
            continue
        try:
            laboratory.point(point)
        except Exception as error:  # noqa: BLE001  one recipe that can't be made must not end the report
            skipped[what] = f"{type(error).__name__}: {error}"
            laboratory.tell(f"{what} left out: {skipped[what]}")
        laboratory.save_now_and_then()
    if peer_python is None:
        return
    try:
        asked = [_PEER_KINDS, llama.available(peer_python)]
        laboratory.known("peers", asked, lambda: _peers(peer_python, laboratory, squares))
    except llama.PeerError as error:
        skipped[f"{case.name} llama.cpp"] = str(error)


def _peers(python: str, laboratory: Laboratory, squares: dict[str, outliers.FloatArray]) -> dict[str, Any]:
    """llama.cpp's numbers on the same windows."""
    laboratory.tell(f"{laboratory.case.name}: llama.cpp")
    spec, tokens = laboratory.checkpoint.spec, laboratory.tokens
    importance = llama.importance(spec, squares)
    version, rows = llama.ask(python, laboratory.checkpoint, tokens, WINDOW, STRIDE, importance, _PEER_KINDS)
    count = len(tokens) - 1
    made = [
        {
            "kind": row.kind,
            "weighted": row.weighted,
            "gpu_bytes": row.gpu_bytes,
            "bits_per_weight": row.bits_per_weight,
            "types": dict(row.types),
            "perplexity": round(math.exp(sum(row.nats) / count), 5),
            "nats": round(sum(row.nats) / count, 6),
            "tokens": count,
            "pieces": pieces(row.nats),
        }
        for row in rows
    ]
    return {"version": version, "rows": made}


def _speed(results: Results, methods: Sequence[str], tell: Any, skipped: dict[str, str]) -> None:
    """Speed, memory and determinism of quantizing, for each method."""
    code = making_code()
    for method in methods:
        identity = {"speed": method, "hidden": speed.HIDDEN, "layers": speed.LAYERS}
        if results.find("speed", identity, code) is None:
            tell(f"speed of {method}")
            found = speed.measure(method, 3)
            if "error" in found:
                skipped[f"speed of {method}"] = found["error"]
            else:
                results.add("speed", identity, code, found)
                results.save()


def _about(texts: dict[str, Any], skipped: dict[str, str], peer: str | None) -> dict[str, Any]:
    """What concerns all numbers."""
    return {
        **about_run("python -m tests.bench.quality"),
        "llama_cpp_python": peer,
        "texts": texts,
        "skipped": skipped,
    }


if __name__ == "__main__":
    main()
