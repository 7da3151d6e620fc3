"""QoQ on real models: perplexity by method, and the gain of each step; docs/quality.md's section on W4A8.

    python -m tests.bench.w4a8 --smollm2 FOLDER              all; some minutes for each of nineteen models
    python -m tests.bench.w4a8 --report                      write the section again from what was measured

Numbers are kept in docs/quality/w4a8.json; a run that was stopped goes on where it was, and numbers of an older version
of the code are measured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from runtime.backends.decoder import Decoder, DecoderOptions, KVKind
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.load.open import open_decoder
from runtime.measure.evaluate import full_precision_perplexity, perplexity
from tests.bench.reporting.cases import CASES, ROOT, SMOLLM2, Case, smollm2
from tests.bench.reporting.losses import numbers
from tests.bench.reporting.markdown import between
from tests.bench.reporting.page import listed
from tests.bench.reporting.results import Entry, Results, digest
from tests.bench.reporting.run import about_run, teller
from tests.bench.w4a8 import folding
from tests.bench.w4a8.models import ROUNDED, ablation, alone, code_of, compared, group_of
from tests.bench.w4a8.report import section
from tests.bench.w4a8.rounded import RoundedInput

RESULTS = ROOT / "docs" / "quality" / "w4a8.json"
REPORT = ROOT / "docs" / "quality.md"
_CALIBRATION = 6000
"""Characters of the calibration text that all models are made by, for caches of 4 bits depend on it too: a quarter of
what `quantize` would use, in a quarter of the time."""
PARTS = ("compared", "steps", "alone")
"""What is measured: Table 2's comparison, the ablation, and single changes of the whole."""


def main() -> None:
    """Measure what is missing and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, default=SMOLLM2, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--models", default="smollm2", help="names, with commas; the report shows smollm2")
    parser.add_argument("--store", type=Path, default=ROOT / "build" / "w4a8", help="where models are kept")
    parser.add_argument("--only", type=listed, default=PARTS, help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    given = parser.parse_args()
    results = Results(RESULTS)
    cases = {case.name: case for case in (smollm2(given.smollm2), *CASES)}
    if not given.report:
        for name in given.models.split(","):
            if cases[name].there():
                measure(cases[name], results, Store(given.store), given.only)
        results.save()
    write(results)


def write(results: Results) -> None:
    """Put the section into docs/quality.md, and its picture beside it."""
    text = REPORT.read_text(encoding="utf-8")
    REPORT.write_text(between(text, "w4a8", section(results, RESULTS.parent)), encoding="utf-8")


def wanted(case: Case, parts: Collection[str]) -> Iterator[tuple[Recipe, KVKind, bool, str]]:
    """Recipe, cache, whether as a chat, and backend, of everything that is measured of a model in some of `PARTS`."""
    real, group = case.name == "smollm2", group_of(case)
    for variant in compared(group) if "compared" in parts else ():
        for kv in ("fp16", "int4"):
            for as_chat in (False, True):
                yield variant.recipe, kv, as_chat, variant.backend  # type: ignore[misc]
    if real and "steps" in parts:
        for step in (*ablation(group, rotated=True), *ablation(group, rotated=False)):
            for as_chat in (False, True):
                yield step.recipe, step.kv, as_chat, "cpu"  # type: ignore[misc]
    for recipe in alone(group).values() if "alone" in parts else ():
        for as_chat in (False, True):
            yield recipe, "int4", as_chat, "cpu"


def measure(case: Case, results: Results, store: Store, parts: Collection[str] = PARTS) -> None:
    """Fill the gaps of one model."""
    tell = teller(time.monotonic())
    tokens = case.text()
    code = code_of("full")
    for as_chat in (False, True):
        if results.find("full", [case.name, as_chat], code) is None:
            from models.checkpoint import Checkpoint

            found = full_precision_perplexity(
                Checkpoint.open(case.folder), tokens, case.window, case.stride, as_chat=as_chat
            )
            about = {"model": case.name, "as_chat": as_chat}
            results.add("full", [case.name, as_chat], code, {**about, **numbers(found)})
    code = code_of("folding")
    if case.name == "smollm2" and any(entry["code"] != code for entry in results.all("folding") or [{"code": ""}]):
        for kind, errors in folding.measured(case):
            facts = {name: errors[name] for name in folding.FACTS}
            ways = {way: value for way, value in errors.items() if way not in facts}
            results.add("folding", [case.name, kind], code, {"kind": kind, "errors": ways, **facts})
            results.save()
    for recipe, kv, as_chat, backend in wanted(case, parts):
        identity = key(case, recipe, kv, as_chat=as_chat, backend=backend)
        code = code_of("points", backend)
        if results.find("points", identity, code) is None:
            entry = point(case, store, recipe, kv, as_chat=as_chat, backend=backend, tokens=tokens)
            results.add("points", identity, code, entry)
            results.about = about_run("python -m tests.bench.w4a8")
            results.save()
            tell(f"{case.name} {recipe.to_json()} {kv} {'chat' if as_chat else 'plain'}: {entry['perplexity']}")


def key(case: Case, recipe: Recipe, kv: str, *, as_chat: bool, backend: str) -> list[object]:
    """What decides a number."""
    rounded = [ROUNDED] if backend == ROUNDED else []
    return [case.name, case.window, case.stride, recipe.to_json(), kv, as_chat, _CALIBRATION, *rounded]


def opened(model: StoredModel, options: DecoderOptions, backend: str) -> Decoder:
    """A model on one of the backends that `Variant` names."""
    decoder, _ = open_decoder(model, options, "reference" if backend == ROUNDED else backend)
    if backend == ROUNDED:
        assert isinstance(decoder, ReferenceDecoder)
        decoder.linears = {name: RoundedInput(linear) for name, linear in decoder.linears.items()}  # type: ignore[misc]
    return decoder


def point(
    case: Case, store: Store, recipe: Recipe, kv: KVKind, *, as_chat: bool, backend: str, tokens: list[int]
) -> Entry:
    """Perplexity of one model with one cache."""
    name = f"{case.name}-{digest([recipe.to_json(), code_of('folding'), _CALIBRATION])}"
    if name not in store:
        quantize(case.folder, store, recipe, name=name, calibration=case.calibration()[:_CALIBRATION])
    model = store.open(name)
    decoder = opened(model, DecoderOptions(context=case.window, kv=kv), backend)
    try:
        found = perplexity(decoder, tokens, case.window, case.stride, as_chat=as_chat)
    finally:
        decoder.close()
    about = {"model": case.name, "recipe": recipe.to_json(), "kv": kv, "as_chat": as_chat, "backend": backend}
    about |= {"bits_per_weight": model.info.summary.bits_per_weight, "calibration": _CALIBRATION}
    return {**about, **numbers(found)}


if __name__ == "__main__":
    main()
