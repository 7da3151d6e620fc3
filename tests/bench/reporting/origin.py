"""The code behind a number: a digest of its sources, and the line under a table that reports it.

A digest is of what code does, not of how it is written or where it stands: docstrings, comments, layout and the modules
that names are imported from do not change it.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.bench.reporting.cases import ROOT

ROOMS = ("models", "runtime", "tuner")
"""What decides the numbers of a benchmark that names nothing else."""
OLD = "†"
"""Behind a number that is older than the code, where others of its page are not."""
_COMPLETE: Mapping[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
"""Python 3.13 leaves empty fields out of a dump unless asked."""


def digest_code(files: Iterable[Path]) -> str:
    """Sixteen hexadecimal digits for what Python files do, whatever their names and order.

    Args:
        files: Sources.
    """
    own = sorted(hashlib.sha256(_meaning(file.read_text(encoding="utf-8")).encode()).digest() for file in files)
    return hashlib.sha256(b"".join(own)).hexdigest()[:16]


@cache
def code_of(*rooms: str) -> str:
    """Digest of all Python files in some folders of the repository."""
    return digest_code(file for room in rooms for file in (ROOT / room).rglob("*.py"))


def code_of_patterns(folder: str, patterns: Sequence[str]) -> str:
    """Digest of the Python files in a folder of the repository that match patterns, as `Path.glob` has them.

    Raises:
        ValueError: a pattern matches nothing: its file was moved.
    """
    files: list[Path] = []
    for pattern in patterns:
        found = list((ROOT / folder).glob(pattern))
        if not found:
            raise ValueError(f"{folder} has no {pattern}")
        files += found
    return digest_code(files)


def _meaning(source: str) -> str:
    """A source's syntax tree without texts that nothing reads, and without the modules that names come from."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module, node.level = None, 0
        elif isinstance(node, ast.Import):
            for alias in node.names:
                alias.name = alias.name.rpartition(".")[2]
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_text(one)]
    return ast.dump(tree, **_COMPLETE).replace(", type_params=[]", "")  # a field from Python 3.12 on


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def commit() -> str:
    """The commit that is checked out, with a `+` where files differ from it; empty outside a repository."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def stamp(rooms: Sequence[str] = ROOMS) -> dict[str, Any]:
    """What a results file keeps of the code: its digest, the folders that it is of, and the commit."""
    return {"code": code_of(*rooms), "rooms": list(rooms), "commit": commit()}


def is_old(about: Mapping[str, Any]) -> bool:
    """Whether a run is older than the code, or may be, because that was not recorded.

    Args:
        about: What `tests.bench.reporting.run.about_run` returned for it.
    """
    return "rooms" not in about or about["code"] != code_of(*about["rooms"])


def line(entries: Sequence[Mapping[str, Any]], old: int, date: str = "") -> str:
    """The line under a table: when its numbers were measured, at which commit, and whether that is the code still.

    Args:
        entries: What was measured, each with its date and commit where these were kept.
        old: How many of them are older than the code.
        date: ISO date of those that have none.
    """
    if not entries:
        return ""
    commits = sorted({str(entry["commit"]) for entry in entries if entry.get("commit")})
    when = f"{_when(entries, date)}{' at ' if commits else ''}{', '.join(commits)}"
    if not old:
        return f"*{when}, by the code that wrote this page.*"
    if not any(entry.get("code") for entry in entries):
        return f"*{when}, by a version of the code that was not recorded.*"
    if old == len(entries):
        return f"*{when}; the code has changed since.*"
    return f"*{when}; of {old} of {len(entries)} measurements, marked {OLD}, the code has changed since.*"


def _when(entries: Sequence[Mapping[str, Any]], date: str = "") -> str:
    days = sorted({str(entry.get("date") or date)[:10] for entry in entries} - {""})
    return (
        "Measured" if not days else f"Measured on {days[0]}" if len(days) == 1 else f"Measured {days[0]} to {days[-1]}"
    )
