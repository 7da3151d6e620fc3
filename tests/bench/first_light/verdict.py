"""The report as text: the first defect, what works, and the meaning of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
PURPOSE = {
    "start": "a kernel can run",
    "graph": "the barrier of many blocks holds beside a product, in a graph",
    "tokens": "tokens are the reference's, for every kind of cache",
    "shapes": "tokens are the reference's at the widths of real models, for drafts, batches, prompts and W4A8",
    "memory": "a load takes what was planned, and unloading gives it back",
    "chat": "the bundled model answers",
    "link": "residuals are read nearly as fast as the link allows",
    "overlap": "compensation hides behind the product",
    "product": "products are right",
    "draw": "tokens drawn on the card are those drawn on the host",
    "tune": "a budget of 5 % buys compensation, and is kept",
    "tests": "the tests that need a card pass",
    "oracle": "kernels agree with their oracles",
    "bench": "the benchmark ran",
}
"""What each part shows, in the order in which a failure matters."""
_LENGTH = 400
"""Characters of a row that are shown."""
_OVERLAP, _READS = 1.1, 70.0
"""Both by the longer of the two, at most; percent of the bandwidth of reads, at least."""


def broken(parts: Mapping[str, Any]) -> list[str]:
    """What is wrong, worst first: a sentence each."""
    found = []
    for name in [name for name in PURPOSE if name in parts]:
        entry = parts[name]
        rows: list[Row] = entry["rows"]
        wrong = [row for row in rows if row.get("correct") is False]
        if wrong:
            found.append(f"{name}: not shown that {PURPOSE[name]}: {_shown(wrong[0])} ({len(wrong)} such rows)")
        if entry["error"]:
            at = f", at {_shown(rows[-1])}" if rows else ""
            found.append(f"{name}: {entry['error']}{at}")
    return found


def not_shown(report: Mapping[str, Any]) -> list[str]:
    """What this run says nothing about, though it should: a sentence each."""
    parts, found = report["parts"], []
    for name in report["expected"]:
        entry = parts.get(name)
        if entry is None:
            found.append(f"{name}: not shown that {PURPOSE[name]}: it was not run")
            continue
        rows: list[Row] = entry["rows"]
        left = [row for row in rows if "left out" in str(row.get("what"))]
        if left:
            found.append(f"{name}: not shown in full that {PURPOSE[name]}: {len(left)} times {_left(left)}")
        elif not entry["error"] and name != "bench" and not any("correct" in row for row in rows):
            found.append(f"{name}: not shown that {PURPOSE[name]}: nothing was judged")
    return found


def verdict(report: Mapping[str, Any]) -> str:
    """The page."""
    parts, device = report["parts"], report.get("device") or {}
    where = device.get("name", "no card: dry mode, in which times and rates mean nothing")
    lines = [f"First light on {where}, {report['date']}", ""]
    wrong, missing = broken(parts), not_shown(report)
    if wrong:
        lines += ["The first broken thing:", f"  {wrong[0]}", ""]
        lines += [*(["Broken as well:"] if wrong[1:] else []), *(f"  {line}" for line in wrong[1:]), ""]
    if missing:
        lines += ["Not shown:", *(f"  {line}" for line in missing), ""]
    if not wrong and not missing:
        lines += ["Everything was shown, and nothing is broken.", ""]
    lines.append("Part by part:")
    for name, entry in parts.items():
        said = "shown"
        if any(line.startswith(f"{name}:") for line in missing):
            said = "not shown"
        if any(line.startswith(f"{name}:") for line in wrong):
            said = "broken"
        lines.append(f"  {name:8} {said:9} {entry['seconds']:6.1f} s  {PURPOSE[name]}")
    figures = [line for name, say in _FIGURES.items() if name in parts for line in say(parts[name]["rows"])]
    return "\n".join([*lines, "", "Figures:", *(f"  {line}" for line in figures or ["none"])]) + "\n"


def _left(rows: list[Row]) -> str:
    words = _shown(rows[0])
    return str(rows[0]["what"]) + (f", first {words}" if words else "")


def _shown(row: Row) -> str:
    words = [f"{key} {value}" for key, value in row.items() if key not in ("correct", "what") and value is not None]
    return ", ".join(words)[:_LENGTH]


def _overlap(rows: Iterable[Row]) -> Iterable[str]:
    timed = [row for row in rows if "both_by_longer" in row]
    for choice in ("order", "priority", "reserved"):
        means = {}
        for name in dict.fromkeys(row[choice] for row in timed):
            ratios = sorted(row["both_by_longer"] for row in timed if row[choice] == name)
            means[name] = ratios[len(ratios) // 2]
        if means:
            shown = ", ".join(f"{name or 'neither'}: {mean}" for name, mean in means.items())
            yield f"both by the longer of the two, median by {choice}: {shown}"
    if timed and min(row["both_by_longer"] for row in timed) > _OVERLAP:
        yield f"nowhere do the two overlap to within {_OVERLAP}: look at the room that the product leaves for blocks"


def _product(rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        if row.get("percent_of_reads") is not None:
            low = " (low)" if row["percent_of_reads"] < _READS else ""
            share = f"{row['percent_of_reads']} % of reads{low}"
            yield f"{row['kind']} at {row['bits']} bits: {row['us']} µs, {row['gb_s']} GB/s, {share}"


def _link(rows: Iterable[Row]) -> Iterable[str]:
    speeds = [f"{row.get('n_tb', 'copy engine')}: {row['gb_s']}" for row in rows if "gb_s" in row]
    if speeds:
        yield "GB/s from main memory by blocks: " + ", ".join(speeds)


def _tokens(rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        if "equal" in row:
            rest = f"{row['near_ties']} near ties, largest error {row['largest_error']} of the logits' spread"
            what = row.get("kv", row.get("case"))
            yield f"{what}: {row['equal']} of {row['tokens']} tokens are the reference's, {rest}"


def _tune(rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        if "measured_slowdown_percent" in row:
            yield (
                f"tuned for {row['budget_percent']} %: k_chunk {row.get('k_chunk')}, n_tb {row.get('n_tb')}, measured "
                f"{row['measured_slowdown_percent']} %, {row['tokens_per_second']} tokens/s"
            )


def _chat(rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        if "answer" in row:
            said = f"{row['answer'][:150]!r}"
            yield f"{row['backend']}: loaded in {row['load_s']} s, {row['tokens_per_s']} tokens/s: {said}"


def _draw(rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        if "us" in row:
            yield f"drawing a token ({row['how']}): {row['us']} µs on the card, {row['host_us']} µs on the host"


_FIGURES: dict[str, Callable[[Iterable[Row]], Iterable[str]]] = {
    "overlap": _overlap,
    "product": _product,
    "link": _link,
    "draw": _draw,
    "tokens": _tokens,
    "shapes": _tokens,
    "tune": _tune,
    "chat": _chat,
}
