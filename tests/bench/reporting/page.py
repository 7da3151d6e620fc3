"""What every report is written from: entries, which of them are older than the code, and the parts all pages have."""

from __future__ import annotations

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.bench.reporting.cases import SMOLLM2
from tests.bench.reporting.markdown import number
from tests.bench.reporting.origin import OLD, line
from tests.bench.reporting.results import Entry, Results
from tests.bench.reporting.style import draw_all

Picture = Callable[[Path], bool]
"""Draws into a file, and says whether there was anything to show."""


class Measured(ABC):
    """The results of a run, read-only.

    Args:
        results: What was measured.
    """

    def __init__(self, results: Results) -> None:
        self.results = results

    @abstractmethod
    def is_old(self, section: str, entry: Entry) -> bool:
        """Whether an entry is of another version of the code than this one."""

    @cached_property
    def stale(self) -> list[Entry]:
        """All entries that are older than the code."""
        sections = self.results.sections
        return [entry for section in sections for entry in self.results.all(section) if self.is_old(section, entry)]

    @cached_property
    def _places(self) -> frozenset[int]:
        """Of the old entries, which the results keep alive."""
        return frozenset(map(id, self.stale))

    def count(self) -> int:
        """All entries."""
        return sum(map(len, self.results.sections.values()))

    def mark(self, entry: Entry | None) -> str:
        """What stands behind the numbers of an entry: a sign where it is older than the code and others are not."""
        return OLD if id(entry) in self._places and len(self.stale) < self.count() else ""

    def shown(self, entry: Entry | None) -> str:
        """A perplexity with its mark; empty where it was not measured."""
        return "" if entry is None else number(entry["perplexity"]) + self.mark(entry)

    def origin(self, *sections: str) -> str:
        """The line under a table of numbers from these sections: of which code they are."""
        entries = [entry for section in sections for entry in self.results.all(section)]
        old = sum(id(entry) in self._places for entry in entries)
        return line(entries, old, self.results.about.get("date", ""))

    def left_out(self) -> str:
        """The section on what could not be measured, and why."""
        skipped = self.results.about.get("skipped", {})
        lines = "\n".join(f"- {what}: {why}" for what, why in skipped.items())
        return f"## Not measured\n\n{lines}" if skipped else ""


class Pictures:
    """The pictures of a page, drawn into a folder of its name beside it.

    Args:
        file: The page.
        wanted: What draws each, by name.
        alternatives: What stands for a picture where it is not seen, by its name up to the first hyphen.
    """

    def __init__(self, file: Path, wanted: Mapping[str, Picture], alternatives: Mapping[str, str]) -> None:
        drawn = draw_all(wanted, file.with_suffix(""))
        self.paths = {name: os.path.relpath(path, file.parent) for name, path in drawn.items()}
        self._alternatives = alternatives

    def __call__(self, name: str) -> str:
        """The picture in Markdown; empty where it had nothing to show."""
        return f"![{self._alternatives[name.split('-')[0]]}]({self.paths[name]})" if name in self.paths else ""


def write_page(file: Path, parts: Sequence[str]) -> None:
    """Write the parts of a page that are not empty."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def listed(text: str) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(text.split(","))


def report_arguments(about: str | None, name: str) -> argparse.ArgumentParser:
    """The command line of a report on models, as far as all have it.

    Args:
        about: What the command does.
        name: Of the page and of the folder with its results.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--smollm2", type=Path, default=SMOLLM2, help="Hugging Face folder of SmolLM2-135M-Instruct")
    add("--quick", action="store_true", help="a little of everything, in a few minutes")
    add("--report", action="store_true", help="measure nothing, write the report from the results file")
    add("--results", type=Path, help=f"results file; default docs/{name}/results.json")
    add("--out", type=Path, help=f"report; default docs/{name}.md")
    return parser
