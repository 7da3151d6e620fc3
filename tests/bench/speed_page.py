"""The tables of docs/speed.md, from the files that the benchmarks wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.bench.reporting.markdown import table

Found = Mapping[str, Any]
"""A results file."""
PEER = "llama.cpp"
FAIR = 0.7
"""Of the fair share of a busy machine's processors: the aim beside other processes."""
STARTS = {
    "cold": ("first answer of `run demo`, nothing compiled and no profile", 1, 8),
    "warm": ("later answers", 1, 1),
    "help": ("`--help`", 2, 0.15),
    "paint": ("the terminal UI is on the screen", 2, 0.3),
}
"""By what was started: its name, decimals, and the aim in seconds."""


def decoding(found: Found) -> str:
    """Decoding and prompts of every program of a comparison."""
    rows = [
        (
            row["program"],
            f"{row['bytes_per_token'] / 1e6:.0f}",
            f"{row['decode_tokens_per_s']:.0f}",
            f"{row['percent_of_read_bandwidth']:.0f} %",
            f"{row['prefill_tokens_per_s']:.0f}",
        )
        for row in found["rows"]
    ]
    return table(("", "MB per token", "decode, tokens/s", "of the limit", "prefill, tokens/s"), rows)


def busy(found: Found) -> str:
    """Decoding beside competing processes, and the aim there."""
    speeds: dict[str, dict[int, float]] = {}
    for row in found["rows"]:
        speeds.setdefault(row["program"], {})[row["spinners"]] = row["decode_tokens_per_s"]
    numbers = sorted({row["spinners"] for row in found["rows"]})
    order = sorted(speeds, key=lambda name: (name.startswith(PEER), "4-bit" in name))
    rows = [(name, *(f"{speeds[name][number]:.0f}" for number in numbers)) for name in order]
    cores, idle = found["cores"], speeds["lowbit-chat 3-bit"][0]
    aims = [f"{FAIR * cores / (cores + number) * idle:.0f}" if number else "" for number in numbers]
    return table(
        ("competing processes", *numbers), [*rows, (f"{FAIR:g} × the fair share of 3-bit's idle speed", *aims)]
    )


def versions(found: Found) -> str:
    """What compensation costs over many starts, and what this version takes longer than one before."""
    rows = [row for row in found["rows"] if "longer_than_before_percent" in row]
    columns = ("longer_than_uncompensated_percent", "longer_than_before_percent", "prefill_longer_than_before_percent")
    head = ("", "a token, than without compensation", "a token, than before", "a prompt, than before")
    return table(head, [(row["program"], *(_quartiles(row.get(column)) for column in columns)) for row in rows])


def compensated(found: Found) -> str:
    """What compensation costs over many starts, and the share of the bandwidth."""
    column = "longer_than_uncompensated_percent"
    rows = [
        (row["program"], f"{row['percent_of_read_bandwidth']:.0f} %", _quartiles(row.get(column)))
        for row in found["rows"]
    ]
    return table(("", "of the limit", "a token, than without compensation"), rows)


def _quartiles(percent: Sequence[float] | None) -> str:
    """Median, and between what quartiles."""
    if percent is None:
        return ""
    low, middle, high = percent
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def throughput(found: Found) -> str:
    """Requests at once, in one process."""
    rows = []
    for row in found["rows"]:
        ours, theirs = row["ours"], row[PEER]
        cells = [f"{ours['tokens_per_s']:.0f}", f"{theirs['tokens_per_s']:.0f}", f"{row['ratio']:.1f} ×"]
        cells += [f"{each['tokens_per_s_behind_the_last_first']:.0f}" for each in (ours, theirs)]
        rows.append((row["model"], row["in_flight"], *cells))
    head = ("model", "in flight", "all, tokens/s", PEER, "", "decoding, tokens/s", PEER)
    return table(head, rows)


def servers(found: Found) -> str:
    """Requests at once, over HTTP."""
    rows = []
    for row in found["rows"]:
        ours, theirs = row["ours"], row[PEER]
        speeds = [f"{each['tokens_per_s']:.0f}" for each in (ours, theirs)]
        waits = [f"{each['first_token_s']:.1f}" for each in (ours, theirs)]
        rows.append((row["in_flight"], *speeds, f"{row['ratio']:.1f} ×", *waits))
    peer = f"{PEER}'s server"
    return table(("in flight", "tokens/s", peer, "", "first word of the last, s", peer), rows)


def starts(found: Found) -> str:
    """How long a person waits for the program."""
    medians = {row["what"]: row["median_s"] for row in found["rows"] if row["program"] == "now"}
    rows = [(name, f"{medians[what]:.{places}f}", f"{aim:g}") for what, (name, places, aim) in STARTS.items()]
    return table(("", "seconds", "aim"), rows)


def products(found: Found) -> str:
    """Products of W4A16 and W4A8 by rows."""
    cells: dict[tuple[str, int], list[str]] = {}
    for row in found["products"]:  # both kinds of weights in turn
        cells.setdefault((row["product"], row["rows"]), []).extend(
            [f"{row['us']:,.1f}", f"{row['percent_of_limit']} %"]
        )
    head = ("product", "rows", "W4A16, µs", "of the limit", "W4A8, µs", "of the limit")
    return table(head, [(*key, *own) for key, own in cells.items()])


def prefills(found: Found) -> str:
    """Time to the first token of a long prompt."""
    rows = [(row["program"], f"{row['ms']:.0f}", f"{row['tokens_per_s']:,}") for row in found["prefills"]]
    if not any("amx" in name for name, *_ in rows):
        rows.append(("with AMX", "", "left out: this processor has no tile registers"))
    return table(("", "ms", "tokens/s"), rows)


def prompts(*found: Found) -> str:
    """What compensating a prompt costs, the longest prompts first."""
    rows = [row for one in found for row in one["rows"]]
    order = list(dict.fromkeys(row["model"] for row in rows))
    rows.sort(key=lambda row: (-row["tokens"], order.index(row["model"])))
    head = ("", "tokens", "without, ms", "with, ms", "longer")
    return table(head, [_prompt(row) for row in rows])


def _prompt(row: Found) -> Sequence[str]:
    longer = row["slowdown_percent"]
    times = [f"{1e3 * row[name]:,.0f}" for name in ("without_s", "with_s")]
    return row["model"], f"{row['tokens']:,}", *times, f"{longer:.{int(longer < 10)}f} %"


def steps(found: Found) -> str:
    """What a step of few rows costs in every way."""
    own = {(row["way"], row["rows"]): row for row in found["rows"]}
    ways = list(dict.fromkeys(way for way, _ in own))
    titles = {"plain": "plain", "rows 16": "each row by its own 16 channels", "rows 64": "its own 64"}
    rows = [
        (
            size,
            *_both(own["plain", size]),
            *(f"{own[way, size]['median_ms']:.2f}" for way in ways if way in titles and way != "plain"),
            *_both(own["all", size]),
        )
        for size in sorted({size for _, size in own})
    ]
    return table(("rows", "plain", "limit", *list(titles.values())[1:], "all residuals", "limit"), rows)


def _both(row: Found) -> Iterable[str]:
    return f"{row['median_ms']:.2f}", f"{row['limit_ms']:.2f}"
