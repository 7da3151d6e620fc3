"""Time to the first token with and without compensation of the prompt.

    make bench-prompts SMOLLM2=FOLDER                                   stored models, and the 1.1-billion shape
    python -m tests.bench.prompts --stored NAME=FOLDER --tokens 512 --rows 128 512

Both ways take turns in one run on one decoder; a round's ratio is of two neighbours in time, and the median of the
rounds' ratios is what counts. A long prompt has a fifth of the rounds. The shape's weights are random: the time of a
dense model does not depend on what it reads.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from models.store import StoredModel
from models.weights import Weights
from runtime.backends.cpu.backend import CpuBackend
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.budget.prompt_tuning import PromptTimer
from runtime.load.open import open_decoder
from tests.bench.reporting.run import about_run, write_report
from tests.peers.shape import RandomModel, llama_1b

_LONG = 1024
"""Tokens above which a prompt is long."""
_CONTEXT = 8192
"""Of the shape."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt, timed."""

    model: str
    """Name, or the shape."""
    backend: str
    """What ran it."""
    tokens: int
    """Of the prompt."""
    rows: int
    """Most rows of a step."""
    without_s: float
    """Median seconds to the first token, not compensated."""
    with_s: float
    """Likewise, compensated by all residuals."""
    slowdown_percent: float
    """Median over rounds."""
    rounds: int
    """Rounds."""


def measured(name: str, decoder: Decoder, tokens: int, rounds: int) -> Row:
    """Time a prompt with and without compensation, in turns."""
    timer = PromptTimer(decoder)
    timer.tokens = min(tokens, 2 * decoder.options.max_rows)
    times: dict[bool, list[float]] = {False: [], True: []}
    with decoder.session():
        for compensate in times:
            timer.seconds(compensate=compensate)
        timer.tokens = tokens
        for turn in range(rounds):
            for compensate in (False, True) if turn % 2 else (True, False):
                times[compensate].append(timer.seconds(compensate=compensate))
    ratios = [own / plain for plain, own in zip(times[False], times[True], strict=True)]
    return Row(
        model=name,
        backend=decoder.backend,
        tokens=tokens,
        rows=decoder.options.max_rows,
        without_s=statistics.median(times[False]),
        with_s=statistics.median(times[True]),
        slowdown_percent=100 * (statistics.median(ratios) - 1),
        rounds=rounds,
    )


def models(stored: Sequence[str], bits: Sequence[int]) -> list[tuple[str, Weights]]:
    """The models to time: those of folders, and the shape with random weights of some bits."""
    found: list[tuple[str, Weights]] = []
    for text in stored:
        name, _, folder = text.partition("=")
        found.append((name, StoredModel.open_folder(Path(folder), name)))
    spec = replace(llama_1b(), max_context=_CONTEXT)
    found += [(f"1.1 B shape, {own} bits", RandomModel(spec, own, residuals=True)) for own in bits]
    return found


def main() -> None:
    """Measure, print a table, and write the rows down where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stored", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--shape-bits", nargs="*", type=int, default=[3], help="of the shape; none: not it")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--rows", nargs="+", type=int, default=list(CpuBackend.step_rows))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows: list[Row] = []
    print(f"{'model':24}{'tokens':>8}{'rows':>6}{'without':>12}{'with':>12}{'slower':>9}")
    for name, model in models(asked.stored, asked.shape_bits):
        for step in asked.rows:
            context = min(max(asked.tokens), model.spec.max_context)
            options = DecoderOptions(context=context, k_chunk=0, prompt_k_chunk=1024, max_rows=step)
            decoder = open_decoder(model, options, asked.backend)[0]
            for tokens in (own for own in asked.tokens if own <= context):
                rounds = asked.rounds if tokens <= _LONG else max(1, asked.rounds // 5)
                row = measured(name, decoder, tokens, rounds)
                rows.append(row)
                times = f"{1e3 * row.without_s:9.0f} ms{1e3 * row.with_s:9.0f} ms{row.slowdown_percent:7.1f} %"
                print(f"{name:24}{tokens:8}{step:6}{times}", flush=True)
            decoder.close()
    if asked.out:
        report = {"about": about_run("python -m tests.bench.prompts"), "rows": [asdict(row) for row in rows]}
        write_report(asked.out, report)


if __name__ == "__main__":
    main()
