"""Costs and savings of compressed KV caches: writes docs/kv.md with its pictures.

    make kv SMOLLM2=FOLDER                       FOLDER: SmolLM2-135M-Instruct, as the tests' cache keeps it
    make kv PEER_PYTHON=peers-venv/bin/python    beside llama.cpp (tests/peers/README.md says how to install it)
    python -m tests.bench.caches --models english3m,demo --only perplexity

Losses go through the program's own evaluation, sizes come from real buffers, speeds from the CPU backend. Numbers are
kept in docs/kv/results.json with everything that decides them; a run that was stopped goes on where it was. `--only
speed,attention --again` times again what is known already. `--quick` measures a little of everything, noisily, and
writes to build/kv/quick.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from models.store import Store
from tests.bench.caches import attention, corrected, drift, gear, memory, perplexity, size, smooth, speed
from tests.bench.caches.extent import FIRST, QUICK, REAL, SECTIONS, Extent, cases, known_cases
from tests.bench.caches.laboratory import Laboratory, Notebook
from tests.bench.caches.report import write
from tests.bench.caches.view import View
from tests.bench.quality import llama
from tests.bench.reporting.cases import ROOT
from tests.bench.reporting.page import listed, report_arguments
from tests.bench.reporting.results import Results
from tests.bench.reporting.run import about_run, teller

DOCS = ROOT / "docs"
BUILD = ROOT / "build" / "kv"


def main() -> None:
    """Measure what is missing, judge, draw, and write the report."""
    given = _arguments()
    out = BUILD / "quick" if given.quick else DOCS
    results = Results(given.results or out / "kv" / "results.json", keep=given.keep)
    if not given.report:
        _measure(given, results)
    if not results.about:
        raise SystemExit(f"{results.path} holds no results; run without --report first")
    write(View(results), given.out or out / "kv.md")
    print(f"written to {given.out or out / 'kv.md'}")


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, "kv")
    known = [case.name for case in known_cases()]
    names = ", ".join(known)
    parser.add_argument("--models", type=listed, help=f"some of {names}; all that are there unless given")
    parser.add_argument("--only", type=listed, help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--again", action="store_true", help="measure what --only names even where it is known")
    parser.add_argument("--keep", action="store_true", help="keep numbers of earlier versions of the code")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python and gguf")
    given = parser.parse_args()
    wrong = sorted({*(given.models or ())} - {*known}) + sorted({*(given.only or ())} - {*SECTIONS})
    if wrong:
        parser.error(f"unknown: {', '.join(wrong)}; models are {names}; parts are {', '.join(SECTIONS)}")
    if given.again and not given.only:
        parser.error("--again needs --only, to say what is measured again")
    return given


def _measure(given: argparse.Namespace, results: Results) -> None:
    """Fill the gaps in the results."""
    import torch

    torch.set_num_threads(1)
    begin = time.monotonic()
    only = given.only or SECTIONS
    notebook = Notebook(results, teller(begin), frozenset(only if given.again else ()))
    extent = QUICK if given.quick else Extent()
    minutes = dict(results.about.get("minutes", {}))
    peer = llama.available(given.peer_python)
    kept = {name: why for name, why in results.about.get("skipped", {}).items() if given.only or given.models}
    results.about = {**results.about, **about_run("python -m tests.bench.caches"), "llama_cpp_python": peer}
    for section, act in _parts(given, extent, notebook, given.peer_python if peer else None).items():
        if section in only:
            since = time.monotonic()
            notebook.attempt(section, act)
            took = (time.monotonic() - since) / 60
            if took > 0.05 or section not in minutes:
                minutes[section] = round(took, 1)
            still = {what: why for what, why in kept.items() if what not in notebook.done}
            results.about |= {"minutes": minutes, "skipped": {**still, **notebook.skipped}}
            results.save()
    if not (given.models or given.only):
        results.drop_unused()
        results.save()
    print(f"measured in {(time.monotonic() - begin) / 60:.1f} minutes")


def _parts(
    given: argparse.Namespace, extent: Extent, notebook: Notebook, peer_python: str | None
) -> dict[str, Callable[[], object]]:
    """What measures each part of the report."""
    store = Store(BUILD / "store")
    found: list[Laboratory] = []

    def each(*acts: Callable[[Laboratory], Any], real: Collection[str] = ()) -> Callable[[], object]:
        def run() -> None:
            if not found:
                found.extend(
                    Laboratory(case, store, notebook, extent.tokens) for case in cases(given.models, given.smollm2)
                )
            texts = {laboratory.case.name: {"tokens": len(laboratory.tokens)} for laboratory in found}
            notebook.results.about["texts"] = {**notebook.results.about.get("texts", {}), **texts}
            for act in acts:
                for laboratory in found:
                    if laboratory.case.name in real or laboratory.case.name not in REAL:
                        act(laboratory)
                    notebook.results.save()

        return run

    return {
        "gear": each(gear.measure, real=(FIRST,)),
        "corrected": each(corrected.measure, real=(FIRST,)),
        "size": lambda: size.measure(notebook),
        "memory": each(memory.measure, real=(FIRST,)),
        "drift": each(lambda one: drift.measure(one, extent.drift_steps), real=(FIRST,)),
        "perplexity": each(
            *(partial(perplexity.measure, kinds=extent.kinds, way=way) for way in perplexity.WAYS), real=REAL
        ),
        "smooth": each(lambda one: smooth.measure(one, BUILD / "planted")),
        "attention": lambda: attention.measure(notebook, extent),
        "speed": lambda: speed.measure(notebook, extent, peer_python, BUILD),
    }


if __name__ == "__main__":
    main()
