"""What a slowdown budget buys: the tuner's choice beside the best uniform k_chunk that fits the budget.

    make bench-tuned                                  all models that are there, budgets of 2, 5, 10 and 20 %
    make bench-tuned SMOLLM2=FOLDER                   SmolLM2-135M-Instruct too, as a Hugging Face folder
    python -m tests.bench.tuned --models demo --only times

Every model is quantized to 3 bits by GPTQ (the bundled model is also taken as it ships), tuned and refined, and
timed: decoding with the tuner's choice and with uniform k_chunk, in turns, medians. Then perplexities, as a chat gets
them. A uniform k_chunk counts where its own measured slowdown is within the budget. The shape of 1.1 billion
parameters has random weights: it gives times alone, and its losses are those that SmolLM2's layer types have, as the
tuner adds them. The verdict: every choice recovers at least 85 % of what the best uniform one does (`fails`); else the
command ends with 1. The two phases can run apart (`--only`): times want a machine of their own. Results go to
tests/bench/results/tuned.json, the table into docs/tuner.md (`--write`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assets import demo_path, evaluation_text
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from runtime.backends import backend
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.backends.operations.channels import LAYER_KINDS
from runtime.budget.clocks import NOISE_PERCENT, refined_slowdown
from runtime.budget.profile_key import content_id, profile_key
from runtime.budget.refining import MARGIN, refine
from runtime.budget.tuning import layers_of, tune
from runtime.compensation import CHUNK, k_chunk_by_type, layer_words
from runtime.load.open import open_decoder
from runtime.measure.evaluate import perplexity
from runtime.measure.timing import DecodeTimer
from runtime.text.tokenizer import Tokenizer
from runtime.wire.device import Tuning
from tests.bench.reporting.cases import CASES, ROOT, WINDOW
from tests.bench.reporting.cases import smollm2 as real_model
from tests.bench.reporting.markdown import number, table
from tests.bench.reporting.run import Tell, about_run, teller
from tests.peers.shape import RandomModel, llama_1b
from tuner.findings import Findings
from tuner.losses import total_loss
from tuner.profiles import ProfileStore
from tuner.refine import Refinement

BUDGETS = (2.0, 5.0, 10.0, 20.0)
"""Slowdowns in percent."""
UNIFORM = (1, 2, 4, 8, 16, 32, 64, 128)
"""Uniform k_chunk that are compared with."""
RESULTS = ROOT / "tests" / "bench" / "results" / "tuned.json"
DOCS = ROOT / "docs" / "tuner.md"
_STORE = ROOT / "build" / "tuned"
_ROUNDS = 3
"""Times that every configuration is timed, in turns with the others."""
_SECONDS = 0.4
"""Of one timing."""
_SLOWEST = 2.0
"""A uniform k_chunk that is slower than so many times the largest budget is not timed."""
SHARE = 0.85
"""Part of what the best uniform k_chunk recovers that the tuner's choice must recover."""
SHAPE = "1.1 B shape"
"""The subject with times alone."""
_TOKENS = 4000
"""Most tokens of a text."""
_ROWS = 64
"""Rows of a step when a text is scored."""
_SMOLLM2 = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A low-bit model and its text."""

    name: str
    """What the table calls it."""
    model: StoredModel
    """The model."""
    tokens: Sequence[int]
    """What its perplexity is taken of."""
    window: int
    """Tokens of a window."""
    stride: int
    """Tokens from one window's start to the next."""


def main() -> None:
    """Measure what is asked for, and write."""
    given = _arguments()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    tell = teller(time.monotonic())
    for name in given.models if not given.report else ():
        if name == SHAPE:
            continue
        subject = _subject(name, given.smollm2)
        own = found["models"].get(name, {})
        if own.get("content") != content_id(subject.model):
            own = {"content": content_id(subject.model), "perplexity": {}}
        if given.only != "perplexity":
            own |= {"times": _times(subject, given.budgets, tell), "run": about_run("python -m tests.bench.tuned")}
        if given.only != "times" and "times" in own:
            _perplexities(subject, own, tell)
        found["models"][name] = own
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if SHAPE in given.models and not given.report:
        found["models"][SHAPE] = _shape(_subject(_SMOLLM2, given.smollm2).model, given.budgets, tell)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(report(found["models"]))
    if given.write:
        from tests.bench import pages

        pages.write("tuned")
    if short := fails(found["models"]):
        raise SystemExit("\n".join(short))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--models", type=lambda text: tuple(text.split(",")), help="some of them; all unless given")
    parser.add_argument(
        "--budgets",
        type=lambda text: tuple(map(float, text.split(","))),
        default=BUDGETS,
        help="slowdowns in percent",
    )
    parser.add_argument("--only", choices=("times", "perplexity"), help="one phase alone")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what is known")
    parser.add_argument("--write", action="store_true", help="put the table into docs/tuner.md")
    given = parser.parse_args()
    there = [case.name for case in CASES if case.there()] + ["demo-shipped"]
    there = ([_SMOLLM2, SHAPE] if given.smollm2 else []) + there
    unknown = sorted({*(given.models or ())} - {*there})
    if unknown:
        parser.error(f"not here: {', '.join(unknown)}; there are {', '.join(there)}")
    given.models = given.models or tuple(there)
    return given


def _subject(name: str, smollm2: Path | None) -> Subject:
    """A model by name, quantized unless it is already."""
    store = Store(_STORE)
    shipped = name == "demo-shipped"
    known = CASES if smollm2 is None else (real_model(smollm2), *CASES)
    case = next(case for case in known if case.name == ("demo" if shipped else name))
    if not shipped and name not in store:
        recipe = Recipe(method="gptq", bits=3, group_size=case.group_size)
        quantize(case.folder, store, recipe, name=name, calibration=case.calibration())
    model = StoredModel.open_folder(demo_path(), "demo") if shipped else store.open(name)
    return Subject(name=name, model=model, tokens=case.text(_TOKENS), window=case.window, stride=case.stride)


def _decoder(subject: Subject) -> Decoder:
    return open_decoder(subject.model, DecoderOptions(context=subject.window, prompt_k_chunk=CHUNK), "cpu")[0]


def _times(subject: Subject, budgets: Sequence[float], tell: Tell) -> dict[str, Any]:
    """Tune for every budget, then time the choices and uniform k_chunk in turns."""
    decoder = _decoder(subject)
    try:
        with tempfile.TemporaryDirectory() as folder:
            profiles = ProfileStore(Path(folder))
            tuned: dict[str, Tuning] = {}
            seconds: dict[str, float] = {}
            encode = Tokenizer(subject.model.tokenizer_path).encode
            for budget in budgets:
                first = tune(decoder, subject.model, budget_percent=budget, profiles=profiles)
                began = time.monotonic()
                found = refine(decoder, subject.model, first, profiles=profiles, text=evaluation_text(), encode=encode)
                tuned[f"{budget:g}"], seconds[f"{budget:g}"] = found, time.monotonic() - began
                took = f"tuned in {first.seconds:.1f} s, refined in {seconds[f'{budget:g}']:.1f} s"
                tell(f"{subject.name} {budget:g} %: {dict(found.k_chunk)}, {took}")
        chosen = {budget: dict(found.k_chunk) for budget, found in tuned.items()}
        slowdown = _slowdowns(decoder, chosen, max(budgets))
    finally:
        decoder.close()
    return {
        "tuned": {
            budget: {
                "k_chunk": chosen[budget],
                "slowdown": slowdown["tuned", budget],
                "promised": round(found.measured_slowdown_percent, 2),
                "seconds": round(found.seconds, 1),
                "refined_seconds": round(seconds[budget], 1),
            }
            for budget, found in tuned.items()
        },
        "uniform": {name: percent for (group, name), percent in slowdown.items() if group == "uniform"},
    }


def _slowdowns(
    decoder: Decoder, chosen: Mapping[str, Mapping[str, int]], largest: float
) -> dict[tuple[str, str], float]:
    """Measured slowdowns of choices and of uniform k_chunk, medians of rounds, in percent."""
    uniform = {str(k_chunk): k_chunk_by_type(k_chunk) for k_chunk in UNIFORM}
    timer = DecodeTimer(decoder, seconds=_SECONDS)
    quick = {name: timer.slowdown(k_chunk) for name, k_chunk in uniform.items()}
    kept = {name: k_chunk for name, k_chunk in uniform.items() if quick[name] <= _SLOWEST * largest}
    readings: dict[tuple[str, str], list[float]] = {}
    for _ in range(_ROUNDS):
        for group, choices in (("tuned", chosen), ("uniform", kept)):
            for name, k_chunk in choices.items():
                slower = timer.slowdown(k_chunk) if any(k_chunk.values()) else 0.0
                readings.setdefault((group, name), []).append(slower)
    return {key: round(statistics.median(found), 2) for key, found in readings.items()}


def _shape(model: StoredModel, budgets: Sequence[float], tell: Tell) -> dict[str, Any]:
    """The 1.1 B shape with the losses of a real model: refined by its own times, with their sum for a text."""
    from runtime.backends.cpu.decoder import CpuDecoder

    losses = model.losses
    assert losses is not None
    decoder = CpuDecoder(RandomModel(replace(llama_1b(), max_context=WINDOW), 3, residuals=True), DecoderOptions())
    try:
        layers = layers_of(decoder)
        none, limits = dict.fromkeys(LAYER_KINDS, 0), dict.fromkeys(LAYER_KINDS, CHUNK)
        key = profile_key(backend("cpu").device(decoder.options), "cpu", model, 0.0)
        findings = Findings(key=key)
        chosen: dict[str, dict[str, int]] = {}
        for budget in budgets:
            began = time.monotonic()
            refinement = Refinement(
                layers,
                findings,
                lambda k_chunk: total_loss(losses, layers, k_chunk),
                refined_slowdown(decoder, lambda: False),
                n_tb=none,
                limits=limits,
            )
            refinement.within(MARGIN * budget, budget, none)
            findings = refinement.findings
            found = findings.best(MARGIN * budget)
            assert found is not None
            chosen[f"{budget:g}"] = dict(found.k_chunk)
            tell(f"{SHAPE} {budget} %: {chosen[f'{budget:g}']} in {time.monotonic() - began:.1f} s")
        slowdown = _slowdowns(decoder, chosen, max(budgets))
    finally:
        decoder.close()
    uniform = {name: percent for (group, name), percent in slowdown.items() if group == "uniform"}
    wanted = [*chosen.values(), *(k_chunk_by_type(int(name)) for name in (0, *uniform))]
    return {
        "run": about_run("python -m tests.bench.tuned"),
        "times": {
            "tuned": {
                budget: {"k_chunk": k_chunk, "slowdown": slowdown["tuned", budget]}
                for budget, k_chunk in chosen.items()
            },
            "uniform": uniform,
        },
        "perplexity": {_key(k_chunk): math.exp(total_loss(losses, layers, k_chunk)) for k_chunk in wanted},
    }


def _perplexities(subject: Subject, own: dict[str, Any], tell: Tell) -> None:
    """Perplexities of everything that was timed, and without compensation; each is taken once."""
    wanted = [k_chunk_by_type(0), *(found["k_chunk"] for found in own["times"]["tuned"].values())]
    wanted += [k_chunk_by_type(int(name)) for name in own["times"]["uniform"]]
    decoder = _decoder(subject)
    try:
        for k_chunk in wanted:
            if _key(k_chunk) not in own["perplexity"]:
                decoder.set_k_chunk(k_chunk)
                result = perplexity(decoder, subject.tokens, subject.window, subject.stride, as_chat=True, rows=_ROWS)
                own["perplexity"][_key(k_chunk)] = round(result.perplexity, 5)
                tell(f"{subject.name} {_key(k_chunk)}: {result.perplexity:.3f}")
    finally:
        decoder.close()


def _key(k_chunk: Mapping[str, int]) -> str:
    return _listed(k_chunk, "/")


def report(models: Mapping[str, Any]) -> str:
    """The table, from the results file's models."""
    rows = [
        [
            row.name,
            f"{row.budget:g} %",
            _shown(row.k_chunk),
            f"{row.slowdown:.1f} %",
            number(math.exp(row.without)),
            number(math.exp(row.loss)),
            "none" if row.uniform == 0 else str(row.uniform),
            number(math.exp(row.uniform_loss)),
            f"{100 * row.share:.0f} %" if row.uniform_loss < row.without else "–" if row.share < 1 else "all",
        ]
        for row in rows_of(models)
    ]
    head = ["model", "budget", "k_chunk (qkv / o / gate_up / down / head)", "measured", "perplexity without", "with"]
    return table([*head, "best uniform k_chunk that fits", "perplexity", "share"], rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A choice beside the best uniform one; losses in nats per token."""

    name: str
    """The model."""
    budget: float
    """In percent."""
    k_chunk: Mapping[str, int]
    """The choice."""
    slowdown: float
    """Its measured slowdown in percent."""
    without: float
    """Loss without compensation."""
    loss: float
    """Loss with the choice."""
    uniform: int
    """The best uniform k_chunk; 0 where none fits or helps."""
    uniform_loss: float
    """Its loss."""

    @property
    def share(self) -> float:
        """What the choice recovers, as a part of what the uniform one does; 1 where neither has to recover anything."""
        won, theirs = self.without - self.loss, self.without - self.uniform_loss
        return won / theirs if theirs > 0 else 1.0 if won >= 0 else 0.0


def rows_of(models: Mapping[str, Any]) -> list[Row]:
    """All comparisons, from the results file's models."""
    found = []
    for name, own in models.items():
        if "times" not in own or not own["perplexity"]:
            continue
        nats = {key: math.log(value) for key, value in own["perplexity"].items()}
        for budget, choice in own["times"]["tuned"].items():
            uniform, best = best_uniform(own["times"]["uniform"], nats, float(budget))
            found.append(
                Row(
                    name=name,
                    budget=float(budget),
                    k_chunk=choice["k_chunk"],
                    slowdown=choice["slowdown"],
                    without=nats[_key(k_chunk_by_type(0))],
                    loss=nats[_key(choice["k_chunk"])],
                    uniform=uniform,
                    uniform_loss=best,
                )
            )
    return found


def fails(models: Mapping[str, Any]) -> list[str]:
    """What falls short of the verdict, for SmolLM2 and the shape; in words."""
    judged = [row for row in rows_of(models) if row.name in (_SMOLLM2, SHAPE)]
    short = [
        f"{row.name} at {row.budget:g} %: {100 * row.share:.0f} % of what a uniform k_chunk of {row.uniform} recovers"
        for row in judged
        if row.share < SHARE
    ]
    slow = [
        f"{row.name} at {row.budget:g} %: decoding slows by {row.slowdown:.1f} %"
        for row in judged
        if row.slowdown > row.budget + NOISE_PERCENT
    ]
    return short + slow


def _shown(k_chunk: Mapping[str, int]) -> str:
    return _listed(k_chunk, " / ")


def _listed(k_chunk: Mapping[str, int], between: str) -> str:
    types = between.join(str(k_chunk[kind]) for kind in LAYER_KINDS)
    return ", ".join([types, *(f"{layer_words(key)} {k}" for key, k in k_chunk.items() if key not in LAYER_KINDS)])


def best_uniform(slowdowns: Mapping[str, float], nats: Mapping[str, float], budget: float) -> tuple[int, float]:
    """The best uniform k_chunk within a budget, by its own measured slowdown.

    Args:
        slowdowns: Measured, in percent, by k_chunk.
        nats: Loss by configuration, that of no compensation among them.
        budget: In percent.

    Returns:
        k_chunk and its loss; (0, the loss without compensation) where none within the budget is better.
    """
    fitting = [0, *(int(name) for name, percent in slowdowns.items() if percent <= budget)]
    return min(((k_chunk, nats[_key(k_chunk_by_type(k_chunk))]) for k_chunk in fitting), key=lambda found: found[1])


if __name__ == "__main__":
    main()
