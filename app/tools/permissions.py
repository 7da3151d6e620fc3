"""Permissions: which tools a chat may use, and which of them may run without asking.

A tool is identified by a digest of how its server is started or reached and of all that the server says of it. When
anything of that changes, such as the server's variables or the tool's description, schema or annotations, an earlier
"always" no longer counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app import paths
from app.language import _
from app.tools.config import MAX_FILE, ToolsError
from runtime.system.foreign import read_json
from runtime.system.private_files import read_trusted

Answer = Literal["once", "chat", "always", "no"]
"""Answers to the question whether a call may run."""


def permissions_file() -> Path:
    """The file of permissions, next to the settings."""
    return paths.settings_file().with_name("tools.json")


def fingerprint(server: Sequence[Any], definition: Mapping[str, Any]) -> str:
    """Sixteen digits for a tool.

    Args:
        server: Its server's identity.
        definition: What the server says of it, its name included.
    """
    text = json.dumps([server, definition], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Permissions:
    """What was decided, for all chats and for those of this run."""

    always: dict[str, str] = field(default_factory=dict)
    """Names of the tools that run unasked in every chat, by fingerprint."""
    usual: list[str] = field(default_factory=list)
    """Keys (`server/tool`) of the tools that a new chat begins with."""
    chats: dict[str, set[str]] = field(default_factory=dict)
    """Fingerprints of the tools that run unasked in one chat, by the chat's id; gone when the program ends."""
    file: Path | None = None
    """Where the first two are stored; None: nowhere."""
    problem: str = ""
    """Why the file is not used."""

    @classmethod
    def load(cls, file: Path | None = None) -> Permissions:
        """Read the stored permissions. A damaged file grants nothing, nor does one that others can have written."""
        file = file or permissions_file()
        found, problem = None, ""
        try:
            found = read_json(read_trusted(file, MAX_FILE))
        except PermissionError as error:
            problem = _("{file} says which tools run unasked, and is not used: {error}", file=file, error=error)
        except (OSError, ValueError):
            pass
        found = found if isinstance(found, dict) else {}
        always, usual = found.get("always"), found.get("usual")
        return cls(
            always={str(key): str(name) for key, name in always.items()} if isinstance(always, dict) else {},
            usual=[str(key) for key in usual] if isinstance(usual, list) else [],
            file=file,
            problem=problem,
        )

    def allows(self, tool: str, chat: str) -> bool:
        """Whether a tool, by its fingerprint, may run unasked in a chat."""
        return tool in self.always or tool in self.chats.get(chat, ())

    def decide(self, tool: str, name: str, chat: str, answer: Answer) -> None:
        """Keep an answer.

        Raises:
            ToolsError: it can't be stored.
        """
        if answer == "chat":
            self.chats.setdefault(chat, set()).add(tool)
        elif answer == "always":
            self.always[tool] = name
            self.save()

    def revoke(self, tool: str, chat: str) -> None:
        """Ask again before a tool runs.

        Raises:
            ToolsError: that can't be stored.
        """
        self.chats.get(chat, set()).discard(tool)
        if self.always.pop(tool, None) is not None:
            self.save()

    def begin_with(self, keys: Sequence[str]) -> None:
        """Keep the tools that a new chat begins with.

        Raises:
            ToolsError: they can't be stored.
        """
        self.usual = list(keys)
        self.save()

    def save(self) -> None:
        """Store what holds for all chats.

        Raises:
            ToolsError: it can't be written.
        """
        if self.file is None:
            return
        if self.problem:
            raise ToolsError(self.problem)
        text = json.dumps({"always": self.always, "usual": self.usual}, indent=2, ensure_ascii=False) + "\n"
        try:
            paths.write_atomically(self.file, text)
        except OSError as error:
            raise ToolsError(_("{file} can't be written: {error}", file=self.file, error=error)) from error
