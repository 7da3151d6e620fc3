"""Gain from a slowdown budget: the tuner's choice and the best uniform k_chunk of the same measured slowdown.

    make bench-tuned                                  all models that are there, budgets of 2.5, 5 and 10 %
    make bench-tuned SMOLLM2=FOLDER                   SmolLM2-135M-Instruct too, as a Hugging Face folder
    python -m tests.bench.tuned --models demo --only times

Every model is quantized to 3 bits by the default recipe (the bundled model is also taken as it ships), tuned as `run`
does it, and timed: decoding with the tuner's choice and with uniform k_chunk, in turns, medians. Then perplexities. A
uniform k_chunk of exactly the tuner's slowdown is interpolated between its neighbours, so that neither side has an
advantage. The two phases can run apart (`--only`): times want a machine of their own. Results go to
tests/bench/results/tuned.json, the table into docs/tuner.md (`--write`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assets import demo_path
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.backends.operations.channels import LAYER_KINDS
from runtime.budget.profile_key import content_id
from runtime.budget.tuning import tune
from runtime.compensation import k_chunk_by_type
from runtime.load.open import open_decoder
from runtime.measure.evaluate import perplexity
from runtime.measure.timing import DecodeTimer
from tests.bench.reporting.cases import CASES, ROOT
from tests.bench.reporting.cases import smollm2 as real_model
from tests.bench.reporting.markdown import number, table
from tests.bench.reporting.run import Tell, about_run, teller
from tuner.profiles import ProfileStore

BUDGETS = (2.5, 5.0, 10.0)
"""Slowdowns in percent."""
UNIFORM = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
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
_TOKENS = 4000
"""Most tokens of a text."""
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


class Untold:
    """A model that does not say what its layer types lose, so that the tuner goes by times alone."""

    losses = None

    def __init__(self, model: StoredModel) -> None:
        self.name = model.name
        self.path = model.path
        self.recipe = model.recipe


def main() -> None:
    """Measure what is asked for, and write."""
    given = _arguments()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    tell = teller(time.monotonic())
    for name in given.models if not given.report else ():
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
    text = report(found["models"])
    print(text)
    if given.write:
        from tests.bench import pages

        pages.write("tuned")


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
    there = ([_SMOLLM2] if given.smollm2 else []) + there
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
        recipe = Recipe(bits=3, group_size=case.group_size)
        quantize(case.folder, store, recipe, name=name, calibration=case.calibration())
    model = StoredModel.open_folder(demo_path(), "demo") if shipped else store.open(name)
    return Subject(name=name, model=model, tokens=case.text(_TOKENS), window=case.window, stride=case.stride)


def _decoder(subject: Subject) -> Decoder:
    return open_decoder(subject.model, DecoderOptions(context=subject.window), "cpu")[0]


def _times(subject: Subject, budgets: Sequence[float], tell: Tell) -> dict[str, Any]:
    """Tune for every budget, then time the choices and uniform k_chunk in turns."""
    decoder = _decoder(subject)
    try:
        with tempfile.TemporaryDirectory() as folder:
            profiles = ProfileStore(Path(folder))
            tuned = {
                f"{budget:g}": tune(decoder, subject.model, budget_percent=budget, profiles=profiles)
                for budget in budgets
            }
            for profile in Path(folder).glob("*.json"):
                profile.unlink()  # the journal of times stays
            by_time = {
                f"{budget:g}": tune(decoder, Untold(subject.model), budget_percent=budget, profiles=profiles)
                for budget in budgets
            }
        for budget, found in tuned.items():
            tell(f"{subject.name} {budget} %: {dict(found.k_chunk)} in {found.seconds:.1f} s")
        chosen = {budget: dict(found.k_chunk) for budget, found in tuned.items()}
        plain = {budget: dict(found.k_chunk) for budget, found in by_time.items()}
        uniform = {str(k_chunk): k_chunk_by_type(k_chunk) for k_chunk in UNIFORM}
        timer = DecodeTimer(decoder, seconds=_SECONDS)
        quick = {name: timer.slowdown(k_chunk) for name, k_chunk in uniform.items()}
        kept = {name: k_chunk for name, k_chunk in uniform.items() if quick[name] <= _SLOWEST * max(budgets)}
        readings: dict[tuple[str, str], list[float]] = {}
        for _ in range(_ROUNDS):
            for group, choices in (("tuned", chosen), ("by_time", plain), ("uniform", kept)):
                for name, k_chunk in choices.items():
                    slower = timer.slowdown(k_chunk) if any(k_chunk.values()) else 0.0
                    readings.setdefault((group, name), []).append(slower)
    finally:
        decoder.close()
    slowdown = {key: round(statistics.median(found), 2) for key, found in readings.items()}
    return {
        "tuned": {
            budget: {
                "k_chunk": chosen[budget],
                "slowdown": slowdown["tuned", budget],
                "promised": round(found.measured_slowdown_percent, 2),
                "seconds": round(found.seconds, 1),
                "predicted_loss_won": found.predicted_loss_won,
            }
            for budget, found in tuned.items()
        },
        "by_time": {budget: {"k_chunk": plain[budget], "slowdown": slowdown["by_time", budget]} for budget in by_time},
        "uniform": {name: slowdown["uniform", name] for name in kept},
    }


def _perplexities(subject: Subject, own: dict[str, Any], tell: Tell) -> None:
    """Perplexities of everything that was timed, and without compensation; each is taken once."""
    wanted = [k_chunk_by_type(0), *(found["k_chunk"] for found in own["times"]["tuned"].values())]
    wanted += [found["k_chunk"] for found in own["times"]["by_time"].values()]
    wanted += [k_chunk_by_type(int(name)) for name in own["times"]["uniform"]]
    decoder = _decoder(subject)
    try:
        for k_chunk in wanted:
            if _key(k_chunk) not in own["perplexity"]:
                decoder.set_k_chunk(k_chunk)
                result = perplexity(decoder, subject.tokens, subject.window, subject.stride)
                own["perplexity"][_key(k_chunk)] = round(result.perplexity, 5)
                tell(f"{subject.name} {_key(k_chunk)}: {result.perplexity:.3f}")
    finally:
        decoder.close()


def _key(k_chunk: Mapping[str, int]) -> str:
    return "/".join(str(k_chunk[kind]) for kind in LAYER_KINDS)


def report(models: Mapping[str, Any]) -> str:
    """The table, from the results file's models."""
    rows = []
    for name, own in models.items():
        if "times" not in own or not own["perplexity"]:
            continue
        nats = {key: math.log(value) for key, value in own["perplexity"].items()}
        without = nats[_key(k_chunk_by_type(0))]
        for budget, found in own["times"]["tuned"].items():
            loss = nats[_key(found["k_chunk"])]
            plain = own["times"]["by_time"][budget]
            uniform, best = best_uniform(own["times"]["uniform"], nats, found["slowdown"])
            won, theirs = without - loss, without - best
            share = f"{100 * won / theirs:.0f} %" if theirs > 0 else "–" if won <= 0 else "all"
            rows.append(
                [
                    name,
                    f"{budget} %",
                    _shown(found["k_chunk"]),
                    f"{found['slowdown']:.1f} %",
                    number(math.exp(without)),
                    number(math.exp(loss)),
                    "none" if uniform == 0 else f"{uniform:.1f}",
                    number(math.exp(best)),
                    share,
                    f"{_shown(plain['k_chunk'])}: {number(math.exp(nats[_key(plain['k_chunk'])]))}",
                ]
            )
    head = ["model", "budget", "k_chunk (qkv / o / gate_up / down / head)", "measured", "perplexity without", "with"]
    return table([*head, "uniform k_chunk, same slowdown", "perplexity", "share", "by times alone"], rows)


def _shown(k_chunk: Mapping[str, int]) -> str:
    return " / ".join(str(k_chunk[kind]) for kind in LAYER_KINDS)


def best_uniform(slowdowns: Mapping[str, float], nats: Mapping[str, float], slowdown: float) -> tuple[float, float]:
    """The best uniform k_chunk of at most a slowdown.

    Args:
        slowdowns: Measured, in percent, by k_chunk.
        nats: Loss by configuration, that of no compensation among them.
        slowdown: In percent.

    Returns:
        k_chunk and its loss, between two measured ones on the line through them; (0, the loss without compensation)
        where even one channel takes longer.
    """
    points = [(0, 0.0, nats[_key(k_chunk_by_type(0))])]
    for name in sorted(slowdowns, key=int):  # noise apart, more channels never take less time
        slower = max(slowdowns[name], points[-1][1])
        points.append((int(name), slower, nats[_key(k_chunk_by_type(int(name)))]))
    best = (0.0, points[0][2])
    for (low, fast, worse), (high, slow, better) in itertools.pairwise(points):
        if slow <= slowdown:
            found = (float(high), better)
        elif low == 0 or fast > slowdown:  # choosing channels costs a step: nothing lies between none and one
            break
        else:
            part = (slowdown - fast) / (slow - fast)
            found = (low + part * (high - low), worse + part * (better - worse))
        best = min(best, found, key=lambda point: point[1])
    return best


if __name__ == "__main__":
    main()
