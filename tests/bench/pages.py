"""The tables of the README and of docs/ that come from results files, and the command that writes all of them.

    make pages                       or: python -m tests.bench.pages

Nothing is measured. Each table stands between markers and says of which code its numbers are
(`tests.bench.reporting.origin`). docs/quality.md and docs/kv.md are written whole. docs/kernels.md is left alone: it
has no results file, `make kernels` compiles it anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from models.recipe import DEFAULT_METHOD
from tests.bench import (
    cpu_code,
    fit_tuner,
    installations,
    rates,
    speculation,
    speed_page,
    tool_calls,
    tool_servers,
    tuned,
)
from tests.bench.caches import report as caches_report
from tests.bench.caches import summary as caches_summary
from tests.bench.caches.view import View as CachesView
from tests.bench.quality import report as quality_report
from tests.bench.quality import summary
from tests.bench.quality.points import REAL, REFERENCE_K, cases
from tests.bench.quality.view import View as QualityView
from tests.bench.reporting.cases import ROOT
from tests.bench.reporting.markdown import between, number, table
from tests.bench.reporting.origin import OLD, is_old, line
from tests.bench.reporting.results import Results
from tests.bench.w4a8 import __main__ as w4a8

README, DOCS = ROOT / "README.md", ROOT / "docs"
_BENCH, _PEERS = ROOT / "tests" / "bench" / "results", ROOT / "tests" / "peers" / "results"
_DAY = "2026-11-22-2core-avx512"
Found = Mapping[str, Any]
"""A results file."""


def _about(found: Found) -> Sequence[Found]:
    return [found.get("about", found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table between the markers of a page."""

    page: Path
    """The page."""
    name: str
    """Of the markers."""
    files: tuple[Path, ...]
    """Results files."""
    text: Callable[..., str]
    """Takes what the files hold, and makes the table."""
    runs: Callable[[Found], Sequence[Found]] = _about
    """Takes a file's contents, and returns the metadata of its runs (`about_run`)."""

    def content(self) -> str:
        """The table, and the line that says of which code it is."""
        found = [json.loads(file.read_text(encoding="utf-8")) for file in self.files]
        return f"{self.text(*found)}\n\n{_origin([run for one in found for run in self.runs(one)])}"


def _origin(runs: Sequence[Found]) -> str:
    return line(runs, sum(map(is_old, runs)))


def tables() -> Iterator[Table]:
    """All tables of pages that hold other words, too."""
    speed = DOCS / "speed.md"
    for model in ("smollm2", "1b", "mixture", "qwen3.5", "gemma3"):
        yield Table(page=speed, name=f"decoding-{model}", files=(_PEERS / f"{model}.json",), text=speed_page.decoding)
    yield Table(page=speed, name="busy", files=(_PEERS / "spinners.json",), text=speed_page.busy)
    yield Table(page=speed, name="versions", files=(_PEERS / "versions.json",), text=speed_page.versions)
    yield Table(page=speed, name="starts-1b", files=(_PEERS / "1b-starts.json",), text=speed_page.compensated)
    own = {"throughput": "throughput", "servers": "servers", "starts": "start"}
    own |= {"products": "prefill", "prefills": "prefill", "steps": f"{_DAY}-steps"}
    for name, file in own.items():
        yield Table(page=speed, name=name, files=(_BENCH / f"{file}.json",), text=getattr(speed_page, name))
    both = tuple(_BENCH / f"{_DAY}-prompts{end}.json" for end in ("", "-1b"))
    yield Table(page=speed, name="prompts", files=both, text=speed_page.prompts)
    yield Table(page=DOCS / "cpu.md", name="cpu-code", files=(cpu_code.RESULTS,), text=cpu_code.table)
    yield Table(
        page=DOCS / "install.md", name="installations", files=(installations.RESULTS,), text=installations.table
    )
    yield Table(page=rates.DOCUMENT, name="rates", files=(rates.RESULTS,), text=rates.stored_table)
    for part, make in speculation.TABLES.items():
        yield Table(
            page=speculation.DOCUMENT,
            name=part,
            files=(speculation.RESULTS,),
            text=partial(_part, part, make),
            runs=partial(_part_run, part),
        )
    yield Table(
        page=tuned.DOCS,
        name="tuned",
        files=(tuned.RESULTS,),
        text=lambda found: tuned.report(found["models"]),
        runs=lambda found: [own["run"] for own in found["models"].values() if "run" in own],
    )
    for name, made in (("tool-calls", tool_calls), ("tool-servers", tool_servers)):
        file = _BENCH / f"{name.replace('-', '_')}.json"
        yield Table(page=DOCS / "tools.md", name=name, files=(file,), text=made.written)


def _part(part: str, make: Callable[[Any], str], found: Found) -> str:
    return make(found[part]["rows"])


def _part_run(part: str, found: Found) -> Sequence[Found]:
    return [found[part]["about"]]


def write(*names: str) -> None:
    """Put tables into their pages.

    Args:
        names: Of their markers; none: all.

    Raises:
        ValueError: a page lacks the markers of a table.
    """
    for one in tables():
        if not names or one.name in names:
            _put(one.page, one.name, one.content())


def _put(page: Path, name: str, content: str) -> None:
    page.write_text(between(page.read_text(encoding="utf-8"), name, content), encoding="utf-8")


def _stored(*files: Path) -> list[Any]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def numbers() -> str:
    """The six numbers of the README, each with the command that measures it."""
    quality = QualityView(Results(DOCS / "quality" / "results.json"), cases())
    caches = CachesView(Results(DOCS / "kv" / "results.json"))
    peers, served, started = _stored(_PEERS / "smollm2.json", _BENCH / "servers.json", _BENCH / "start.json")
    programs = {row["program"]: row for row in peers["rows"]}
    alone = programs["lowbit-chat 4-bit"], programs["llama.cpp Q4_K_M"]
    eight = next((row["ours"], row["llama.cpp"]) for row in served["rows"] if row["in_flight"] == 8)
    seconds = {row["what"]: f"{row['median_s']:.1f} s" for row in started["rows"] if row["program"] == "now"}
    points = {entry["k_chunk"]: number(entry["perplexity"]) for entry in _chats(quality)}
    exact = number(quality.chat_full[REAL]["perplexity"])
    measured = [
        (peers, "decode, 4 bits", *_speeds(alone, "decode_tokens_per_s"), "`python -m tests.peers.compare`"),
        (peers, "prefill, 4 bits", *_speeds(alone, "prefill_tokens_per_s"), "the same"),
        (served, "eight chats at once, over HTTP", *_speeds(eight, "tokens_per_s"), "`python -m tests.bench.servers`"),
        (
            quality.results.about,
            f"perplexity at 3 bits, compensated (full precision {exact})",
            points[REFERENCE_K],
            f"uncompensated: {points[0]}",
            "`make quality`",
        ),
        (
            caches.results.about,
            "4-bit KV cache, 8,192 tokens: extra perplexity",
            caches_summary.cost(caches, "smollm2-8k", "int4"),
            f"at {caches.size['int4', 64]['reference 32768']:.0f} % of fp16's memory",
            "`make kv`",
        ),
        (
            started,
            "`run demo hello`, start to last word",
            seconds["warm"],
            f"the first time: {seconds['cold']}",
            "`make bench-start`",
        ),
    ]
    runs = [peers, served, started, quality.results.about, caches.results.about]
    marked = not all(map(is_old, runs))
    rows = [
        (what, f"{ours}{OLD if marked and is_old(run) else ''}", beside, by) for run, what, ours, beside, by in measured
    ]
    return f"{table(('', 'lowbit-chat', '', 'measured by'), rows)}\n\n{_origin(runs)}"


def _chats(view: QualityView) -> Iterator[Any]:
    """What a chat gets of 3 bits by the default recipe, without compensation and with it."""
    assert view.real is not None
    for k_chunk in (0, REFERENCE_K):
        yield view.chat(view.real, DEFAULT_METHOD, 3, k_chunk)


def _speeds(pair: tuple[Found, Found], name: str) -> tuple[str, str]:
    ours, theirs = (f"{one[name]:,.0f}" for one in pair)
    return f"{ours} tokens/s", f"llama.cpp: {theirs}"


def main() -> None:
    """Write everything."""
    write()
    fit_tuner.write(fit_tuner.DOCUMENT)
    caches_report.write(CachesView(Results(DOCS / "kv" / "results.json")), DOCS / "kv.md")
    view = QualityView(Results(DOCS / "quality" / "results.json"), cases())
    quality_report.write(view, DOCS / "quality.md")
    w4a8.write(Results(w4a8.RESULTS))
    summary.write_answers(view, README)
    _put(README, "numbers", numbers())


if __name__ == "__main__":
    main()
