"""What a slowdown budget costs and buys: the tuner's refined choice beside the best uniform k_chunk that fits it.

    python -m tests.lab.tuned --smollm2 FOLDER        SmolLM2-135M-Instruct and the bundled model
    python -m tests.lab.tuned --models demo --only times

Every model is quantized to 3 bits by its default method (the bundled model is also taken as it ships), tuned and
refined. Then the program is started nine times: each start times decoding with and without every choice and uniform
k_chunk, in turns. What a budget promises is the median of the nine slowdowns. Every perplexity is taken as a chat gets
it. A uniform k_chunk counts where its own median is within the budget. Times want a machine of their own.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assets import demo_path, evaluation_text
from models.quantize import quantize
from models.recipe import Recipe, chosen_method
from models.store import Store, StoredModel
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.backends.operations.channels import LAYER_KINDS
from runtime.budget.tuning import refine, tune
from runtime.compensation import CHUNK, k_chunk_by_type, layer_words
from runtime.load.plan import open_decoder
from runtime.measure.evaluate import perplexity
from runtime.measure.timing import DecodeTimer
from runtime.text.tokenizer import Tokenizer
from tests.lab.measure import Worker, closing_all
from tests.lab.models import REAL, Case, demo, smollm2
from tests.lab.store import ROOT, about_run, digest, listed, number, parser, read, table, teller, version, write
from tuner.profiles import ProfileStore

BUDGETS = (5.0, 10.0, 20.0)
"""Slowdowns in percent."""
UNIFORM = (1, 2, 4, 8, 16, 32, 64, 128)
STARTS, SECONDS = 9, 0.4
"""Starts of the program, since where its memory lies makes it faster or slower, and seconds of each configuration."""
SHIPPED = "demo-shipped"


def opened(case: Case, name: str) -> StoredModel:
    """A model, quantized unless this code has done it."""
    if name == SHIPPED:
        return StoredModel.open_folder(demo_path(), "demo")
    store, kept = Store(ROOT / "build" / "tuned"), f"{name}-{digest(version('models'))}"
    if kept not in store:
        method = chosen_method("auto", group_size=case.group_size)
        recipe = Recipe(method=method, bits=3, group_size=case.group_size)
        quantize(case.folder, store, recipe, name=kept, calibration=case.calibration())
    return store.open(kept)


def times(decoder: Decoder, model: StoredModel, budgets: Sequence[float]) -> dict[str, Any]:
    """Tune and refine for every budget, then time the choices and uniform k_chunk in many starts of the program."""
    encode, tuned = Tokenizer(model.tokenizer_path).encode, dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        profiles = ProfileStore(Path(folder))
        for budget in budgets:
            first = tune(decoder, model, budget_percent=budget, profiles=profiles)
            began = time.monotonic()
            found = refine(decoder, model, first, profiles=profiles, text=evaluation_text(), encode=encode)
            tuned[f"{budget:g}"] = {
                "k_chunk": dict(found.k_chunk),
                "promised": round(found.measured_slowdown_percent, 2),
                "seconds": round(first.seconds, 1),
                "refined_seconds": round(time.monotonic() - began, 1),
            }
    timer = DecodeTimer(decoder, seconds=SECONDS)
    uniform = {str(k_chunk): k_chunk_by_type(k_chunk) for k_chunk in UNIFORM}
    fitting = {name: one for name, one in uniform.items() if timer.slowdown(one) <= 2 * max(budgets)}
    ways = [("tuned", budget, own["k_chunk"]) for budget, own in tuned.items()]
    ways += [("uniform", name, one) for name, one in fitting.items()]
    found: dict[tuple[str, str], list[float]] = {way[:2]: [] for way in ways}
    for start in range(STARTS):
        random.Random(start).shuffle(ways)
        command = (sys.executable, "-m", "tests.lab.tuned", "--worker", str(model.path), str(decoder.options.context))
        with closing_all({"": Worker(*command)}) as workers:
            for kind, name, k_chunk in ways:
                found[kind, name].append(workers[""].ask(json.dumps(k_chunk, separators=(",", ":"))))
    for budget, own in tuned.items():
        each = found["tuned", budget]
        own |= {"slowdown": round(statistics.median(each), 2), "starts": [round(one, 2) for one in sorted(each)]}
    return {"tuned": tuned, "uniform": {name: round(statistics.median(found["uniform", name]), 2) for name in fitting}}


def worker(folder: str, context: int) -> None:
    """Answer lines that are k_chunk in JSON with how much slower they make a token, in percent."""
    model = StoredModel.open_folder(Path(folder), "model")
    decoder, _ = open_decoder(model, DecoderOptions(context=context), "cpu")
    timer = DecodeTimer(decoder, seconds=SECONDS)
    print("{}", flush=True)
    for line in sys.stdin:
        k_chunk = json.loads(line)
        print(timer.slowdown(k_chunk) if any(k_chunk.values()) else 0.0, flush=True)


def perplexities(decoder: Decoder, case: Case, found: Mapping[str, Any]) -> dict[str, float]:
    """Perplexities of everything that was timed, and without compensation."""
    wanted = [k_chunk_by_type(0), *(own["k_chunk"] for own in found["tuned"].values())]
    wanted += [k_chunk_by_type(int(name)) for name in found["uniform"]]
    tokens, scored = case.text(4000), dict[str, float]()
    for k_chunk in wanted:
        if key(k_chunk) not in scored:
            decoder.set_k_chunk(k_chunk)
            result = perplexity(decoder, tokens, case.window, case.stride, as_chat=True, rows=64)
            scored[key(k_chunk)] = round(result.perplexity, 5)
    return scored


def key(k_chunk: Mapping[str, int], between: str = "/") -> str:
    """A choice in a few words."""
    types = between.join(str(k_chunk[kind]) for kind in LAYER_KINDS)
    return ", ".join([types, *(f"{layer_words(name)} {k}" for name, k in k_chunk.items() if name not in LAYER_KINDS)])


def report(models: Mapping[str, Any]) -> str:
    """A row for each model and budget."""
    rows = []
    for name, own in models.items():
        scored, plain = own["perplexity"], own["perplexity"][key(k_chunk_by_type(0))]
        for budget, choice in own["times"]["tuned"].items():
            fits = [k for k, slowdown in own["times"]["uniform"].items() if slowdown <= float(budget)]
            best, theirs = min(
                [("none", plain), *((k, scored[key(k_chunk_by_type(int(k)))]) for k in fits)], key=lambda pair: pair[1]
            )
            with_it = scored[key(choice["k_chunk"])]
            shown = key(choice["k_chunk"], " / ")
            starts = choice.get("starts")
            took = f"{choice['slowdown']:.1f} % ({f'{starts[0]:.1f} to {starts[-1]:.1f}' if starts else 'one start'})"
            row = (name, f"{budget} %", shown, took, number(plain), number(with_it))
            rows.append((*row, best, number(theirs)))
    head = ("model", "budget", f"k_chunk ({' / '.join(LAYER_KINDS)})", "measured", "perplexity without", "with")
    return table([*head, "best uniform k_chunk that fits", "perplexity"], rows)


def main() -> None:
    """Measure what is asked for, print and store; or be one start of the program."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
        return
    options = parser(__doc__, "tuned")
    options.add_argument("--smollm2", type=Path, help="Hugging Face folder of SmolLM2-135M-Instruct")
    options.add_argument("--models", type=listed, default=(REAL, "demo", SHIPPED), help="some of %(default)s")
    options.add_argument("--budgets", type=listed, default=BUDGETS, help="slowdowns in percent")
    options.add_argument("--only", choices=("times", "perplexity"), help="one phase alone")
    given = options.parse_args()
    found, tell = read(given.out) or {"models": {}}, teller()
    for name in given.models:
        if name == REAL and given.smollm2 is None:
            continue
        case, own = smollm2(given.smollm2) if name == REAL else demo(), found["models"].setdefault(name, {})
        model = opened(case, name)
        decoder, _ = open_decoder(model, DecoderOptions(context=case.window, prompt_k_chunk=CHUNK), "cpu")
        if given.only != "perplexity":
            own |= {
                "times": times(decoder, model, [*map(float, given.budgets)]),
                "run": about_run("python -m tests.lab.tuned"),
            }
            write(given.out, found)
            tell(f"{name}: timed")
        if given.only != "times":
            own["perplexity"] = perplexities(decoder, case, own["times"])
            write(given.out, found)
        decoder.close()
    print(report({name: own for name, own in found["models"].items() if own.get("perplexity")}))


if __name__ == "__main__":
    main()
