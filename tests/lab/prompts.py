"""Time to the first token with and without compensation of the prompt, on stored models and the 1.1-billion shape.

    python -m tests.lab.prompts --stored NAME=FOLDER --tokens 512 4096

Both ways take turns on one decoder; what counts is the median of the ratios of neighbours in time.
"""

from __future__ import annotations

import statistics
from typing import Any

from models.packed import Weights
from runtime.backends.cpu.backend import CpuBackend
from runtime.backends.decoder import DecoderOptions
from runtime.budget.prompt_tuning import PromptTimer
from runtime.load.plan import open_decoder
from tests.lab.measure import in_turns, longer
from tests.lab.models import RandomModel, llama_1b, opened
from tests.lab.store import about_run, columns, parser, write


def measured(name: str, model: Weights, tokens: int, rounds: int) -> dict[str, Any]:
    """Time a prompt both ways."""
    options = DecoderOptions(context=tokens, k_chunk=0, prompt_k_chunk=1024, max_rows=CpuBackend.step_rows[0])
    decoder, _ = open_decoder(model, options, "cpu")
    timer = PromptTimer(decoder)
    timer.tokens = tokens
    with decoder.session():
        times = in_turns({how: lambda h=how: timer.seconds(compensate=h) for how in (False, True)}, rounds)
    decoder.close()
    without, with_it = times[False], times[True]
    slowdown = longer(with_it, without)[1]
    medians = {"without_s": statistics.median(without), "with_s": statistics.median(with_it)}
    return {"model": name, "tokens": tokens, "rows": options.max_rows, **medians, "slowdown_percent": slowdown}


def main() -> None:
    """Measure, print and store."""
    options = parser(__doc__, "prompts")
    options.add_argument("--stored", nargs="*", default=[], metavar="NAME=FOLDER")
    options.add_argument("--tokens", nargs="+", type=int, default=[512, 4096])
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    shape = ("1.1 B shape, 3 bits", RandomModel(llama_1b(8192), 3))
    models: list[tuple[str, Weights]] = [*opened(given.stored), shape]
    rows = [measured(name, model, tokens, given.rounds) for name, model in models for tokens in given.tokens]
    print(columns(rows))
    write(given.out, {**about_run("python -m tests.lab.prompts"), "rows": rows})


if __name__ == "__main__":
    main()
