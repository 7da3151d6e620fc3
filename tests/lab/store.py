"""What instruments keep and print: the record of a run, entries that a stopped run finds again, tables, lines."""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
ROOMS = ("models", "runtime", "tuner")
"""Folders whose code decides the numbers of an instrument that names nothing else."""
_WRITTEN = ("tests/lab/results", "docs", "*.md")
"""What measuring writes, or nobody measures by."""
_WORDS = (".md", ".mo", ".po", ".pot")
"""Ends of files that say things only to people."""
_PLACES = ("--peer-python", "--out", "--smollm2", "--gemma", "--stored", "--home")
_LINE = re.compile(r"\[\n[\s\d.,e+-]+\]|{\n[^{}\[\]]*}")
"""A list of numbers in JSON, or an object that holds no other, which gets one line."""
Entry = dict[str, Any]
Tell = Callable[[str], None]


@cache
def commit() -> str:
    """The commit that is checked out, with a `+` where any but results and pages differ; empty outside a repository."""
    head = _git("rev-parse", "--short=7", "HEAD").stdout.strip()
    changed = head and _git("diff", "--quiet", "HEAD", "--", ".", *(f":!{name}" for name in _WRITTEN)).returncode
    return f"{head}{'+' * bool(changed)}"


@cache
def is_of(measured: str, rooms: tuple[str, ...]) -> bool:
    """Whether the code in some folders and files does what it did at a commit.

    Comments, docstrings, the form of lines, pages and translations may have changed since.

    Args:
        measured: What `commit` gave; empty where it was not recorded. With a `+`, nobody knows what the code was.
        rooms: Paths in the repository.
    """
    if not measured or measured.endswith("+"):
        return False
    found = _git("diff", "--name-only", "--no-renames", "-z", measured, "--", *rooms, *(f":!*{end}" for end in _WORDS))
    return not found.returncode and all(_same_code(measured, name) for name in found.stdout.split("\0") if name)


def _same_code(measured: str, name: str) -> bool:
    was, file = _git("show", f"{measured}:{name}"), ROOT / name
    if was.returncode or not file.is_file() or file.suffix != ".py":
        return False
    return _code(was.stdout) == _code(file.read_text(encoding="utf-8"))


def _code(text: str) -> str:
    """What Python makes of a text, without docstrings."""
    return ast.dump(_Bare().visit(ast.parse(text)))


class _Bare(ast.NodeTransformer):
    """Leaves out statements that are only a string."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def version(room: str) -> str:
    """What tells a folder's code from any other: a hash, with a `+` where files differ from what was committed."""
    return _git("rev-parse", "--short=7", f"HEAD:{room}").stdout.strip() + "+" * (not is_of("HEAD", (room,)))


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    asked = ["git", "-C", str(ROOT), *words]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return subprocess.CompletedProcess(asked, 1, "", "")


def today() -> str:
    """The day, in UTC."""
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def about_run(program: str, rooms: Sequence[str] = ROOMS) -> Entry:
    """Command line, day, commit, processor, threads, instruction set and versions.

    Args:
        program: How the program is started, without its arguments.
        rooms: Folders of the repository whose code decides the numbers, beside the program's own.
    """
    from runtime.backends.cpu.machine.isa import VARIANT
    from runtime.backends.cpu.pool import default_threads
    from tuner.detect import detect_cpu

    return {
        "command": " ".join([program, *shown(sys.argv[1:])]),
        "date": today(),
        "commit": commit(),
        "rooms": [*rooms, program.split()[-1].replace(".", "/") + ".py"],
        "cpu": detect_cpu().name,
        "threads": default_threads(),
        "variant": VARIANT,
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "torch", "numba")},
    }


def shown(arguments: Sequence[str]) -> list[str]:
    """The command line without places of this machine."""
    words, hidden = [], False
    for word in arguments:
        name, equals, value = word.rpartition("=")
        words.append(f"{name}{equals}PATH" if hidden or value.startswith("/") else word)
        hidden = word in _PLACES
    return words


def write(file: Path | None, found: object) -> None:
    """Write JSON where a file was asked for; a reader finds the old or the new, never half."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(file.name + ".part")
    text = _LINE.sub(lambda one: re.sub(r"\n *", " ", one[0]), json.dumps(found, indent=1, ensure_ascii=False))
    half.write_text(text + "\n", encoding="utf-8")
    half.replace(file)


def read(file: Path) -> Any:
    """What a file holds; an empty object where there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def digest(value: object) -> str:
    """Sixteen hexadecimal digits for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Entries:
    """Measured numbers by section and identity, in one file; a run that was stopped goes on where it was.

    Args:
        file: The file; need not exist.
        again: Sections that are measured anew even where this code's numbers are known.
    """

    def __init__(self, file: Path, again: Iterable[str] = ()) -> None:
        stored = read(file)
        self._file, self._again = file, set(again)
        self.about: Entry = stored.get("about", {})
        self._unfinished, self._touched, self._failed = set(stored.get("unfinished", ())), set[str](), set[str]()
        self._sections: dict[str, dict[str, Entry]] = {
            section: {entry["key"]: entry for entry in entries}
            for section, entries in stored.get("sections", {}).items()
        }

    def known(self, section: str, identity: object, measure: Callable[[], Mapping[str, Any]]) -> Entry:
        """The entry of an identity; it is measured, and the file written, unless this code has measured it."""
        own, key = self._sections.setdefault(section, {}), digest(identity)
        measured = own.get(key, {}).get("commit") or ""
        known = measured == commit() or is_of(measured, tuple(self.about.get("rooms", ROOMS)))
        self._touched.add(section)
        if section in self._again or not known:
            self._unfinished.add(section)
            try:
                found = measure()
            except Exception:
                self._failed.add(section)
                raise
            own[key] = {"key": key, "date": today(), "commit": commit(), "cpu": self.about.get("cpu"), **found}
            self._write()
        return own[key]

    def keep(self, section: str, identities: Iterable[object]) -> None:
        """Forget entries of a section that nobody asks for any more."""
        keys, own = set(map(digest, identities)), self._sections.get(section, {})
        self._sections[section] = {key: entry for key, entry in own.items() if key in keys}

    def finish(self) -> None:
        """Say that all was measured: until then, and where something failed, sections are unfinished."""
        self._unfinished -= self._touched - self._failed
        self._write()

    def _write(self) -> None:
        sections = {name: list(entries.values()) for name, entries in self._sections.items()}
        unfinished = {"unfinished": sorted(self._unfinished)} if self._unfinished else {}
        write(self._file, {"about": self.about, **unfinished, "sections": sections})

    def all(self, section: str) -> list[Entry]:
        """The entries of a section."""
        return list(self._sections.get(section, {}).values())


def attempt(tell: Tell, what: str, act: Callable[[], object]) -> None:
    """Do something; where that fails, say so and go on: one number that cannot be had ends no run of hours."""
    try:
        act()
    except Exception as error:  # noqa: BLE001
        tell(f"{what} left out: {type(error).__name__}: {error}")


def teller() -> Tell:
    """A printer of lines with the seconds since now."""
    begin = time.monotonic()
    return lambda line: print(f"{time.monotonic() - begin:6.0f} s  {line}", flush=True)


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns of numbers stand to the right."""
    body = [[str(cell) for cell in row] for row in rows]
    right = [bool(body) and all(_numeric(row[i]) for row in body) for i in range(len(head))]
    lines = [
        "| " + " | ".join(map(str, head)) + " |",
        "|" + "|".join("---:" if aligned else "---" for aligned in right) + "|",
        *("| " + " | ".join(row) + " |" for row in body),
    ]
    return "\n".join(lines)


def columns(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows that are objects with plain values, floats with four figures."""
    names = list(
        dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict | list))
    )
    return table(names, ([_cell(row.get(name, "")) for name in names] for row in rows))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _numeric(cell: str) -> bool:
    return not cell or cell.strip("*")[0].isdigit() or cell[0] in "+-−"


def number(perplexity: float) -> str:
    """Four or five figures, whatever the size."""
    return f"{perplexity:.2f}" if perplexity >= 20 else f"{perplexity:.3f}" if perplexity >= 3 else f"{perplexity:.4f}"


def parser(about: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """The command line that instruments share: a description as it is written, and where results go.

    Args:
        about: What the command does.
        out: Name of its file in `results`; None: it writes only where asked.
    """
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=RESULTS / f"{out}.json" if out else None, help="the JSON file")
    return made


def listed(text: str) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(text.split(","))
