"""Reusable prompts from files: `NAME.md`, or a folder with a `SKILL.md`, as agents have them.

They are the user's, in a folder beside the settings, or the skills of the folder in which the program was started. A
file of the latter is text like any other: nothing is sent before its name is typed, nothing is run, and no link leaves
the folder.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app import paths
from app.errors import CommandError
from app.language import _
from app.printable import printable

SKILL = "SKILL.md"
_SKILLS = (".agents/skills", ".claude/skills")
"""Where a project has its skills."""
MOST_FILES = 200
MOST_BYTES = 64_000
NAME = re.compile(r"[\w-]{1,40}")
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^(name|description):[ \t]*(?:[>|][+-]?[ \t]*)?(.*(?:\r?\n[ \t]+.*)*)", re.MULTILINE)
_ARGUMENTS = "$ARGUMENTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """A prompt."""

    name: str
    description: str
    """In one line."""
    path: Path

    def text(self, argument: str) -> str:
        """The prompt, with an argument in place of `$ARGUMENTS`, or behind it.

        Raises:
            CommandError: the file can't be read any more.
        """
        body = _FRONT.sub("", _read(self.path)).strip()
        if not body:
            raise CommandError(_("{path} has no text", path=self.path))
        return body.replace(_ARGUMENTS, argument) if _ARGUMENTS in body else f"{body}\n\n{argument}".strip()


def prompt_files() -> list[PromptFile]:
    """The prompts by name, the user's own before a project's of the same name. What can't be read is left out."""
    found: dict[str, PromptFile] = {}
    for path in _paths(Path.cwd()):
        with contextlib.suppress(CommandError):
            one = _described(path)
            if NAME.fullmatch(one.name):
                found.setdefault(one.name, one)
    return sorted(found.values(), key=lambda one: one.name)


def _paths(started_in: Path) -> Iterator[Path]:
    """The files of both places, each folder's in order."""
    own = paths.prompts_dir()
    yield from _inside(own, "*.md")
    yield from _inside(own, f"*/{SKILL}")
    for skills in _SKILLS:
        home = (started_in / skills).resolve()
        yield from (path for path in _inside(home, f"*/{SKILL}") if path.resolve().is_relative_to(started_in.resolve()))


def _inside(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))[:MOST_FILES]
    except OSError:
        return []


def _described(path: Path) -> PromptFile:
    text = _read(path)
    front = _FRONT.match(text)
    fields = {name: " ".join(value.split()).strip("\"'") for name, value in _FIELD.findall(front[1] if front else "")}
    usual = path.parent.name if path.name == SKILL else path.stem
    first = next((line.strip("# \t") for line in _FRONT.sub("", text).splitlines() if line.strip("# \t")), "")
    name = re.sub(r"\s+", "-", fields.get("name") or usual).lower()
    return PromptFile(name=name, description=printable(fields.get("description") or first)[:200], path=path)


def _read(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise CommandError(_("{path} is no file of at most {size} kB", path=path, size=MOST_BYTES // 1000))
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            _("{path} can't be read as text: {reason}", path=path, reason=getattr(error, "strerror", None) or error)
        ) from error
