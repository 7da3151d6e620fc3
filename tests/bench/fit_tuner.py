"""Fits the constants of the simulated device to the AWQ column of the paper's Table 3, and writes the comparison down.

    python -m tests.bench.fit_tuner             search for constants and print them
    python -m tests.bench.fit_tuner --refine    the same, near the constants in use
    python -m tests.bench.fit_tuner --write     write the comparison with the constants in use into docs/tuner.md

All 20 rows (5 devices, 4 budgets) are fitted at once by a random search over six constants, each within limits that
make physical sense; `codebook_efficiency` alone is then chosen by the SqueezeLLM column. `memory_efficiency` is set and
not fitted: were all times twice as long, the same k_chunk would come out. The loss is the mean of
|log((k + ½) / (k' + ½))| over layer types, and a fine for each pair of neighbours whose order is not the table's.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import asdict, replace
from pathlib import Path

from tests.bench.reporting.markdown import between
from tests.bench.table_3 import Row, order_breaks, quantile, simulate
from tuner.simulate import FITTED, Constants

DOCUMENT = Path(__file__).parents[2] / "docs" / "tuner.md"
LIMITS = {
    "sm_bytes_per_cycle": (3.0, 16.0),
    "pcie_efficiency": (0.5, 0.9),
    "block_gb_s": (0.3, 6.0),
    "chunk_cycles": (500.0, 20000.0),
    "start_us": (2.0, 20.0),
    "interference": (0.0, 0.2),
}
FINE = 0.003


def distance(rows: tuple[Row, ...]) -> float:
    """Mean of |log((k + ½) / (k' + ½))|."""
    logs = [
        abs(math.log((ours + 0.5) / (theirs + 0.5)))
        for row in rows
        for ours, theirs in zip(row.k_chunk, row.paper, strict=True)
    ]
    return sum(logs) / len(logs)


def loss(constants: Constants) -> float:
    """What the fit makes small."""
    rows = simulate("awq", constants)
    return distance(rows) + FINE * len(order_breaks(rows))


def rounded(value: float) -> float:
    """Three significant digits: more would be fitting noise."""
    return float(f"{value:.3g}")


def middle() -> Constants:
    """Constants in the middle of their limits."""
    return replace(FITTED, **{name: rounded((low + high) / 2) for name, (low, high) in LIMITS.items()})


def fit(start: Constants, spread: float, steps: int, seed: int) -> Constants:
    """Random search with annealing.

    Args:
        start: Where to begin.
        spread: Standard deviation of the first steps, of the logarithm of a constant.
        steps: Constants to try.
        seed: Of the random numbers.
    """
    rng = random.Random(seed)
    current = start
    best, best_loss = current, loss(current)
    current_loss = best_loss
    for step in range(steps):
        part, changed = step / steps, {}
        for name in rng.sample(sorted(LIMITS), rng.randint(1, 3)):
            low, high = LIMITS[name]
            value = getattr(current, name) * math.exp((spread * (1 - part) + 0.005) * rng.gauss(0, 1))
            changed[name] = rounded(min(max(value, low), high))
        tried = replace(current, **changed)
        tried_loss = loss(tried)
        if tried_loss < current_loss or rng.random() < math.exp(
            (current_loss - tried_loss) / (0.01 * (1 - part) + 1e-9)
        ):
            current, current_loss = tried, tried_loss
            if tried_loss < best_loss:
                best, best_loss = tried, tried_loss
    return best


def fit_codebook(constants: Constants) -> Constants:
    """The one constant of codebook weights, by a grid."""
    grid = [replace(constants, codebook_efficiency=percent / 100) for percent in range(40, 96)]
    return min(grid, key=lambda tried: distance(simulate("squeezellm", tried)))


def described(rows: tuple[Row, ...]) -> str:
    """One line about a column."""
    breaks = order_breaks(rows)
    return (
        f"median {quantile(rows, 0.5):.1%}, nine in ten within {quantile(rows, 0.9):.1%}, "
        f"largest {quantile(rows, 1):.0%}; order broken: {'; '.join(breaks) if breaks else 'nowhere'}"
    )


def table(rows: tuple[Row, ...]) -> str:
    """A column as Markdown."""
    lines = [
        "| device | budget | paper: n_tb max / (qkv, o, gate_up, down) | simulated | largest difference |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.device} | {row.budget_percent:g} % | {row.paper_n_tb_max} / {row.paper} "
        f"| {row.simulated.n_tb_max} / {row.k_chunk} | {max(row.differences):.0%} |"
        for row in rows
    ]
    return "\n".join(lines)


def write(document: Path) -> None:
    """Put the comparison between its marks."""
    parts = [
        f"{title}: {described(rows)}.\n\n{table(rows)}"
        for title, rows in (("AWQ", simulate("awq")), ("SqueezeLLM", simulate("squeezellm")))
    ]
    text = document.read_text(encoding="utf-8")
    document.write_text(between(text, "comparison", "\n\n".join(parts)), encoding="utf-8")


def main() -> None:
    """Fit, or write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6000, help="constants to try, about 30 ms each")
    parser.add_argument("--seed", type=int, default=0, help="of the random search")
    parser.add_argument("--refine", action="store_true", help="begin at the constants in use, with small steps")
    parser.add_argument("--write", action="store_true", help="only write the comparison into docs/tuner.md")
    arguments = parser.parse_args()
    if arguments.write:
        write(DOCUMENT)
        return
    start, spread = (FITTED, 0.03) if arguments.refine else (middle(), 0.5)
    found = fit_codebook(fit(start, spread, arguments.steps, arguments.seed))
    for name, value in asdict(found).items():
        print(f"{name} = {value:g}")
    print("loss", round(loss(found), 4))
    for method in ("awq", "squeezellm"):
        print(f"{method}: {described(simulate(method, found))}")
        print(table(simulate(method, found)))


if __name__ == "__main__":
    main()
