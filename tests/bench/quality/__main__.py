"""The cost of quantizing and the gain of compensation on a real model: writes docs/quality.md with its pictures.

    make quality SMOLLM2=FOLDER                  or: python -m tests.bench.quality --smollm2 FOLDER
    make quality SMOLLM2=FOLDER PEER_PYTHON=peers-venv/bin/python    beside llama.cpp (tests/peers/README.md says how)
    python -m tests.bench.quality --only times,budgets --again       time again what depends on the machine

FOLDER holds SmolLM2-135M-Instruct as a Hugging Face checkpoint in fp16. Every number goes the program's own way:
quantize, store, CPU decoder, `runtime.measure.evaluate.perplexity`. Numbers are kept in docs/quality/results.json with
everything that decides them; a run that was stopped goes on where it was, and numbers of an older version of the code
are measured again. `--quick` measures a little of everything, noisily, and writes to build/quality/quick.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from models.recipe import DEFAULT_METHOD
from models.recipe import WEIGHT_ONLY_METHODS as METHODS
from models.store import Store
from runtime.text.tokenizer import Tokenizer
from tests.bench.quality import answers, llama, making, massive, outliers, peers, summary
from tests.bench.quality.measure import Laboratory, making_code, oracle_code
from tests.bench.quality.points import BUDGETS, EXTENTS, REAL, Extent, Point, cases, points, quick
from tests.bench.quality.report import write
from tests.bench.quality.view import View
from tests.bench.reporting.cases import ROOT, SMOLLM2, Case
from tests.bench.reporting.results import Results
from tests.bench.reporting.run import about_run, teller

DOCS = ROOT / "docs"
README = ROOT / "README.md"
BUILD = ROOT / "build" / "quality"
PARTS = ("full", "points", "budgets", "peers", "outliers", "massive", "answers", "times", "same")
"""What is measured, in this order."""
MACHINES = ("budgets", "times")
"""Parts whose numbers are those of a moment on a machine: `--again` measures them anew."""


def main() -> None:
    """Measure what is missing, judge, draw, and write the report."""
    given = _arguments()
    out = BUILD / "quick" if given.quick else DOCS
    results = Results(given.results or out / "quality" / "results.json")
    if not given.report:
        _Run(given, results).measure()
    if not results.about:
        raise SystemExit(f"{results.path} holds no results; run without --report first")
    view, file = View(results, cases(given.smollm2)), given.out or out / "quality.md"
    write(view, file)
    print(f"written to {file}")
    if not (given.quick or given.out):
        summary.write_answers(view, README)
    for what, why in results.about["skipped"].items():
        print(f"missing: {what}: {why}", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in cases()]
    parser.add_argument("--smollm2", type=Path, default=SMOLLM2, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--models", type=_listed, default=names, help=f"some of {', '.join(names)}")
    parser.add_argument("--methods", type=_listed, default=METHODS, help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--bits", type=_numbers, help="some of 3, 3.5, 4")
    parser.add_argument("--only", type=_listed, default=PARTS, help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--again", action="store_true", help=f"measure {' and '.join(MACHINES)} even where known")
    parser.add_argument("--quick", action="store_true", help="a little of everything, in a few minutes")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report from the results file")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python and gguf")
    parser.add_argument("--results", type=Path, help="results file; default docs/quality/results.json")
    parser.add_argument("--out", type=Path, help="report; default docs/quality.md")
    given = parser.parse_args()
    known = {"models": names, "methods": METHODS, "only": PARTS, "bits": EXTENTS[REAL].bits}
    for option, allowed in known.items():
        wrong = [str(one) for one in getattr(given, option) or () if one not in allowed]
        if wrong:
            parser.error(f"--{option} knows {', '.join(map(str, allowed))}, not {', '.join(wrong)}")
    return given


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers as the points have them: whole ones are integers, which decides by what key they are found again."""
    return tuple(int(word) if word.isdigit() else float(word) for word in _listed(text))


class _Run:
    """One run: what is asked for, and what was left out.

    Args:
        given: The command line.
        results: What is known already, and where numbers go.
    """

    def __init__(self, given: argparse.Namespace, results: Results) -> None:
        self._given, self._results = given, results
        self._peer = llama.available(given.peer_python)
        self._whole = set(given.only) == {*PARTS} and set(given.methods) == {*METHODS} and not given.bits
        self._skipped: dict[str, str] = {} if self._whole else dict(results.about.get("skipped", {}))
        self._texts: dict[str, Any] = dict(results.about.get("texts", {}))
        self._tell = teller(time.monotonic())

    def measure(self) -> None:
        """Fill the gaps in the results."""
        given, begin = self._given, time.monotonic()
        for case in cases(given.smollm2):
            if case.name not in given.models:
                continue
            self._skipped.pop(case.name, None)
            if not case.there():
                self._skipped[case.name] = _missing(case)
                continue
            self._model(case)
            self._save()
        if "same" in given.only:
            for method in given.methods:
                self._attempt(f"{method} twice", lambda method=method: self._same(method))
        if self._whole and not self._skipped:
            self._results.drop_unused()
        self._save()
        print(f"measured in {(time.monotonic() - begin) / 60:.1f} minutes")

    def _model(self, case: Case) -> None:
        """Everything about one model."""
        given = self._given
        extent = quick(EXTENTS[case.name]) if given.quick else EXTENTS[case.name]
        chosen = tuple(method for method in extent.methods if method in given.methods)
        extent = replace(extent, methods=chosen, bits=given.bits or extent.bits)
        laboratory = Laboratory(case, Store(BUILD / "store"), self._results, self._tell, extent.tokens)
        self._texts[case.name] = {"tokens": len(laboratory.tokens)}
        parts = self._parts(laboratory, extent)
        for name in PARTS:
            for what, act in parts.get(name, {}).items() if name in given.only else ():
                self._attempt(f"{case.name}: {what}", act)
                laboratory.save_now_and_then()

    def _parts(self, laboratory: Laboratory, extent: Extent) -> dict[str, dict[str, Callable[[], object]]]:
        """By part and description, what measures it."""
        case, checkpoint = laboratory.case, laboratory.checkpoint
        real, known, again = case.name == REAL, laboratory.known, self._given.again

        @cache
        def calibration() -> list[int]:
            return Tokenizer(case.folder).encode(laboratory.calibration)

        @cache
        def squares() -> dict[str, outliers.FloatArray]:
            return outliers.mean_squares(checkpoint, calibration())

        def default(bits: float) -> Point:
            return Point(model=case.name, method=DEFAULT_METHOD, bits=bits, group_size=case.group_size)

        ways = (False, True) if extent.as_chat else (False,)
        parts: dict[str, dict[str, Callable[[], object]]] = {
            "full": {
                f"full precision{', as a chat' if way else ''}": lambda way=way: laboratory.full(as_chat=way)
                for way in ways
            },
            "points": {str(point): lambda point=point: laboratory.point(point) for point in points(case, extent)},
            "outliers": {
                "outliers": lambda: known(
                    "outliers",
                    outliers.STEPS,
                    oracle_code(),
                    lambda: outliers.outliers(checkpoint, laboratory.tokens, squares()),
                )
            },
        }
        if self._peer is not None:
            parts["peers"] = {
                "llama.cpp": lambda: peers.measure(laboratory, self._given.peer_python, str(self._peer), squares)
            }
        if real:
            parts["budgets"] = {
                f"{bits:g} bits with a budget of {percent:g} %": lambda bits=bits, percent=percent: laboratory.budget(
                    default(bits), percent, again=again
                )
                for bits in (3, 4)
                for percent in BUDGETS
            }
            parts["massive"] = {
                "first tokens": lambda: known(
                    "massive", massive.LENGTH, oracle_code(), lambda: massive.measure(checkpoint, calibration())
                )
            }
            parts["answers"] = {"questions": lambda: answers.measure(laboratory)}
            parts["times"] = {
                f"time of {method}": lambda method=method: laboratory.stored(
                    replace(default(3), method=method), again=again
                )
                for method in extent.methods
            }
        return parts

    def _attempt(self, what: str, act: Callable[[], object]) -> None:
        """Do something; where that fails the report goes on and says so."""
        self._skipped.pop(what, None)
        try:
            act()
        except Exception as error:  # noqa: BLE001  one number that can't be had must not end the report
            self._skipped[what] = f"{type(error).__name__}: {error}"
            self._tell(f"{what} left out: {self._skipped[what]}")

    def _same(self, method: str) -> None:
        if self._results.find("same", method, making_code()) is None:
            same = making.same_twice(method)
            self._results.add("same", method, making_code(), {"method": method, "same": same})
            self._tell(f"{method} twice: {'the same' if same else 'other'} bytes")

    def _save(self) -> None:
        self._results.about = {
            **about_run("python -m tests.bench.quality"),
            "llama_cpp_python": self._peer or self._results.about.get("llama_cpp_python"),
            "texts": self._texts,
            "skipped": self._skipped,
        }
        self._results.save()


def _missing(case: Case) -> str:
    """Why a model is not measured, and what to do about it."""
    if case.name != REAL:
        return "its checkpoint or its text is not beside the repository (../shared/data)"
    if not (case.folder / "config.json").is_file():
        return (
            "SmolLM2-135M-Instruct is not there as a Hugging Face folder: make quality SMOLLM2=FOLDER. It is the model "
            "that decides; toy models alone say little"
        )
    return "WikiText-2 is not beside the repository (../shared/data/text)"


if __name__ == "__main__":
    main()
