"""The servers of mcp.json, in the form that other programs use.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/home/ann"]},
                    "wiki": {"url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${WIKI_TOKEN}"}}}}

A file of another program can be imported. `${NAME}` stands for a variable of the program's own environment, so that the
file need not hold secrets; whatever it holds is kept out of logs, exports and errors (`Secrets`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app import paths
from app.printable import printable_name
from runtime.system.foreign import read_json
from runtime.system.hosts import is_loopback

KEYS = ("mcpServers", "servers", "context_servers")
"""Where other programs list their servers."""
MAX_FILE = 2**20
MAX_SERVERS = 64
NAME = re.compile(r"[\w][\w. -]{0,39}")
INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER", "SYSTEMROOT", "TEMP")
"""Variables that every server gets: without them hardly any program starts."""
SHORTEST_SECRET = 6
"""Values with fewer characters are not hidden: they would blacken ordinary words."""
HIDDEN = "•••"
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}")


class ToolsError(Exception):
    """A server or a file of servers is not usable. The message says what, where, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """A server, as mcp.json describes it."""

    name: str
    """Its name in the file."""
    command: str = ""
    """The program to run; empty for a server on the network."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that it gets besides `INHERITED`."""
    cwd: str | None = None
    """Its working folder; None: the user's home folder."""
    url: str = ""
    """Address of a server on the network; empty for a program."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers sent to it."""
    disabled: bool = False
    """Whether it is not started."""
    problem: str = ""
    """What is wrong with its entry, in one sentence; such a server is not started either."""

    @property
    def shown(self) -> str:
        """How it is reached, without secrets: the command's name, or the host."""
        return urlsplit(self.url).netloc if self.url else Path(self.command).name

    @property
    def secrets(self) -> list[str]:
        """Values that must not be shown: of variables and headers, and arguments that look like a token."""
        found = [*self.env.values(), *self.headers.values()]
        found += [value.rpartition(" ")[2] for value in self.headers.values()]
        parts = urlsplit(self.url)
        found += [parts.password or "", *re.findall(r"=([^&]+)", parts.query)]
        for before, argument in zip(("", *self.args), self.args, strict=False):
            if (
                re.search(r"(key|token|secret|password|auth)", before, re.IGNORECASE)
                and before.startswith("-")
                and "=" not in before
            ):
                found.append(argument)
            name, _, value = argument.partition("=")
            if value and re.search(r"(key|token|secret|password|auth)", name, re.IGNORECASE):
                found.append(value)
        return [value for value in dict.fromkeys(found) if len(value) >= SHORTEST_SECRET and not value.isspace()]

    def environment(self, own: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment that its program runs in."""
        own = os.environ if own is None else own
        return {**{key: own[key] for key in INHERITED if key in own}, **self.env}


class Secrets:
    """Hides the values of mcp.json in texts.

    Args:
        servers: Whose values.
    """

    def __init__(self, servers: Iterable[ServerConfig]) -> None:
        values = {value for server in servers for value in server.secrets}
        # As JSON and in URLs the same value may be written with escapes.
        forms = {form for value in values for form in (value, json.dumps(value)[1:-1])}
        self._pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None

    def hide(self, text: str) -> str:
        """The text without them."""
        return self._pattern.sub(HIDDEN, text) if self._pattern is not None else text


def config_file() -> Path:
    """The file of servers, next to the settings."""
    return paths.settings_file().with_name("mcp.json")


def load(file: Path | None = None, *, own: Mapping[str, str] | None = None) -> list[ServerConfig]:
    """The servers of a file, in its order.

    Args:
        file: The file, by default `config_file()`, which need not exist.
        own: Values for `${NAME}`; by default the program's environment.

    Returns:
        All servers; a malformed entry has a `problem`.

    Raises:
        ToolsError: the file can't be read, or lists no servers.
    """
    given = file is not None
    file = file or config_file()
    try:
        if file.stat().st_size > MAX_FILE:
            raise ToolsError(f"{file} is larger than {MAX_FILE:,} bytes, which no file of servers is")
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if given:
            raise ToolsError(f"there is no file {file}: name one with an object mcpServers") from None
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ToolsError(f"{file} can't be read: {error}") from error
    return parse(text, str(file), own=own)


def parse(text: str, where: str, *, own: Mapping[str, str] | None = None) -> list[ServerConfig]:
    """The servers in a file's text; see `load`."""
    try:
        found = read_json(text)
    except ValueError as error:
        raise ToolsError(f"{where} is not JSON: {error}; correct it") from error
    servers = next((found[key] for key in KEYS if isinstance(found, dict) and key in found), None)
    if not isinstance(servers, dict):
        raise ToolsError(f'{where} lists no servers: it needs an object "mcpServers"')
    if len(servers) > MAX_SERVERS:
        raise ToolsError(f"{where} lists {len(servers)} servers; at most {MAX_SERVERS} are used")
    own = os.environ if own is None else own
    read = []
    for name, entry in servers.items():
        try:
            read.append(_server(name, entry, where, own))
        except ToolsError as error:  # the others work
            read.append(ServerConfig(name=printable_name(name)[:40], problem=str(error)))
    return read


def _server(name: str, entry: Any, where: str, own: Mapping[str, str]) -> ServerConfig:
    place = f"{where}: mcpServers.{name}"
    if not NAME.fullmatch(name):
        raise ToolsError(f"{where}: {name!r} is no name for a server: use at most 40 letters, digits, spaces and . _ -")
    if not isinstance(entry, dict):
        raise ToolsError(f"{place} is not an object")

    def text(key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ToolsError(f"{place}.{key} is not text")
        return _expanded(value, own, f"{place}.{key}")

    def texts(key: str) -> dict[str, str]:
        given = entry.get(key) or {}
        if not isinstance(given, dict):
            raise ToolsError(f"{place}.{key} is not an object")
        return {str(one): text(f"{key}.{one}", value) for one, value in given.items()}

    args = entry.get("args") or []
    if not isinstance(args, list):
        raise ToolsError(f"{place}.args is not a list")
    url = text("url", entry.get("url") or entry.get("serverUrl") or "")
    made = ServerConfig(
        name=name,
        command=text("command", entry.get("command") or ""),
        args=tuple(text(f"args[{at}]", one) for at, one in enumerate(args)),
        env=texts("env"),
        cwd=text("cwd", entry["cwd"]) if entry.get("cwd") else None,
        url=url,
        headers=texts("headers"),
        disabled=bool(entry.get("disabled")) or entry.get("enabled") is False,
    )
    if bool(made.command) == bool(made.url):
        raise ToolsError(f"{place} needs either a command or a url")
    if entry.get("type") == "sse":
        raise ToolsError(
            f"{place} uses the transport sse, which MCP has dropped: use the server's streamable HTTP address"
        )
    if (problem := url_problem(made)) is not None:
        raise ToolsError(f"{place}.url: {problem}")
    return made


def url_problem(server: ServerConfig) -> str | None:
    """Why an address is invalid, or unsafe for the headers sent to it; None if it is fine."""
    if not server.url:
        return None
    try:
        parts = urlsplit(server.url)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "it must begin with http:// or https:// and name a host"
    if server.headers and parts.scheme == "http" and not is_loopback(parts.hostname):
        return "its headers would be sent unencrypted; use https://, or a tunnel from localhost"
    return None


def _expanded(text: str, own: Mapping[str, str], where: str) -> str:
    """A text with its variables replaced."""

    def value(found: re.Match[str]) -> str:
        if found[1] in own:
            return own[found[1]]
        if found[2] is None:
            raise ToolsError(
                f"{where} names the variable {found[1]}, which is not set: set it before you start the program"
            )
        return found[2]

    return _VARIABLE.sub(value, text)


def import_from(source: Path, *, file: Path | None = None) -> list[str]:
    """Add the servers of another program's file to ours. Those of the same name are replaced.

    Entries are copied as they stand, variables included.

    Returns:
        Names of the servers.

    Raises:
        ToolsError: the other file is unusable, or ours can't be read or written; nothing has changed then.
    """
    file = file or config_file()
    if wrong := next((server.problem for server in load(source, own=_Anything()) if server.problem), None):
        raise ToolsError(wrong)
    entries = _entries(source)
    known = _entries(file) if file.exists() else {}
    text = json.dumps({KEYS[0]: {**known, **entries}}, indent=2, ensure_ascii=False) + "\n"
    try:
        paths.write_atomically(file, text)
    except OSError as error:
        raise ToolsError(f"{file} can't be written: {error}") from error
    return list(entries)


def _entries(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ToolsError(f"{file} can't be read: {error}") from error
    return next((dict(found[key]) for key in KEYS if isinstance(found, dict) and isinstance(found.get(key), dict)), {})


class _Anything(dict[str, str]):
    """An environment in which every variable is set."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> str:
        return key
