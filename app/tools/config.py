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
from urllib.parse import quote, unquote, urlsplit

from app import paths
from app.language import _
from app.printable import printable_name
from runtime.system.foreign import read_json
from runtime.system.hosts import is_loopback
from runtime.system.private_files import read_trusted

KEYS = ("mcpServers", "servers", "context_servers")
"""Where other programs list their servers."""
MAX_FILE = 2**20
MAX_SERVERS = 64
NAME = re.compile(r"[\w][\w. -]{0,39}")
INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER", "SYSTEMROOT", "TEMP")
"""Variables that every server gets: without them hardly any program starts."""
SHORTEST_SECRET = 6
"""Values with fewer characters are not hidden: they would blacken ordinary words."""
MAX_VALUE = 2**13
"""Characters of a value in which secrets are looked for."""
HIDDEN = "•••"
_TELLING = re.compile(r"key|token|secret|pass|pwd|auth|credential|cookie|signature", re.IGNORECASE)
_PAIRS = ("-e", "--env", "-H", "--header")
"""Options whose argument is a name and a value."""
_NAMED = re.compile(
    rf"""(?:{_TELLING.pattern})[\w.-]*["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token)\s+)?([^\s"'&,;}}]+)""",
    re.IGNORECASE,
)
_LOGGED = re.compile(
    r"""(?:api_?key|access_?key|token|secret|password|passwd|signature)=["']?([^\s"'&,;]+)""", re.IGNORECASE
)
"""The same in a log, where `KeyError: name` is no secret."""
_QUERY = re.compile(r"://[^\s?#]*\?([^\s#]+)")
_USER = re.compile(r"://([^/?#\s@:]*)(?::([^/?#\s]*))?@")
_BEARER = re.compile(r"\b(?:bearer|basic)\s+([\w.~+/=-]{6,})", re.IGNORECASE)
_TOKEN = re.compile(r"\b((?:sk-|gh[a-z]_|github_pat_|xox[a-z]-|glpat-|hf_|AKIA|eyJ)[\w.-]{8,})")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.~-]{16,}")
"""A part of a path that may be one."""
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
    args: tuple[str, ...] = field(default=(), repr=False)
    """Its arguments."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that it gets besides `INHERITED`."""
    cwd: str | None = None
    """Its working folder; None: the user's home folder."""
    url: str = field(default="", repr=False)
    """Address of a server on the network; empty for a program."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers sent to it."""
    disabled: bool = False
    """Whether it is not started."""
    problem: str = ""
    """What is wrong with its entry, in one sentence; such a server is not started either."""

    @property
    def shown(self) -> str:
        """How it is reached, without secrets: the command's name, or the host."""
        return urlsplit(self.url).netloc.rpartition("@")[2] if self.url else Path(self.command).name

    @property
    def identity(self) -> list[Any]:
        """What makes it this server: where a yes to one of its tools was given, it is not a yes to another's."""
        program = [self.command, self.args, sorted(self.env.items()), self.cwd]
        return [self.name, *program, self.url, sorted(map(str.lower, self.headers))]

    @property
    def secrets(self) -> list[str]:
        """What must not be shown: values of variables and headers, and whatever else looks like a secret."""
        found = [*self.env.values(), *self.headers.values()]
        found += [value.rpartition(" ")[2] for value in self.headers.values()]
        found += [one for text in (*found, *self.args, self.url) for one in _secrets_in(text)]
        found += [part for part in urlsplit(self.url).path.split("/") if _RANDOM.fullmatch(part)]
        for before, argument in zip(("", *self.args), self.args, strict=False):
            name, _sign, value = before.partition("=") if before.startswith("-") else ("", "", "")
            if not value and _TELLING.search(name):
                found.append(argument)
            elif name in _PAIRS:
                found.append(re.split("[=:] *", argument, maxsplit=1)[-1])
        found += [line for value in found if "\n" in value for line in value.splitlines()]
        return [value for value in dict.fromkeys(found) if len(value) >= SHORTEST_SECRET and not value.isspace()]

    def environment(self, own: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment that its program runs in."""
        own = os.environ if own is None else own
        return {**{key: own[key] for key in INHERITED if key in own}, **self.env}


def _secrets_in(text: str) -> list[str]:
    """Passwords and queries of addresses, tokens after their names, and what has the form of a token."""
    text = text[:MAX_VALUE]
    found = [one for pattern in (_NAMED, _BEARER, _TOKEN) for one in pattern.findall(text)]
    found += [pair.rpartition("=")[2] for query in _QUERY.findall(text) for pair in query.split("&")]
    for user, password in _USER.findall(text):
        found += [password or user, f"{user}:{password}@" if password else f"{user}@"]
    return found


class Secrets:
    """Hides the values of mcp.json in texts."""

    def __init__(self, servers: Iterable[ServerConfig]) -> None:
        values = {value for server in servers for value in server.secrets}
        # As JSON and in URLs the same value may be written with escapes.
        forms = {
            form for value in values for form in (value, json.dumps(value)[1:-1], quote(value, ""), unquote(value))
        }
        forms = {form for form in forms if len(form) >= SHORTEST_SECRET}
        self._pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None

    def hide(self, text: str) -> str:
        """The text without them."""
        return self._pattern.sub(HIDDEN, text) if self._pattern is not None else text

    def hide_all(self, text: str) -> str:
        """A log or an error without them, and without whatever else looks like a secret."""
        text = _USER.sub(f"://{HIDDEN}@", text)
        for pattern in (_BEARER, _TOKEN, _LOGGED):
            text = pattern.sub(lambda found: found[0].replace(found[1], HIDDEN), text)
        return self.hide(text)


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
        ToolsError: the file can't be read or trusted, or lists no servers.
    """
    if file is None and not config_file().exists():
        return []
    file = file or config_file()
    return parse(_text(file), str(file), own=own)


def _text(file: Path) -> str:
    """The text of a file of servers, which nobody else can have written."""
    try:
        content = read_trusted(file, MAX_FILE)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ToolsError(_("there is no file {file}: name one with an object mcpServers", file=file)) from None
    except PermissionError as error:
        raise ToolsError(_("{file} names programs to run, and is not used: {error}", file=file, error=error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ToolsError(_("{file} can't be read: {error}", file=file, error=error)) from error
    if len(content) > MAX_FILE:
        raise ToolsError(
            _("{file} is larger than {most:,} bytes: that is not a list of servers", file=file, most=MAX_FILE)
        )
    return text


def parse(text: str, where: str, *, own: Mapping[str, str] | None = None) -> list[ServerConfig]:
    """The servers in a file's text; see `load`."""
    try:
        found = read_json(text)
    except ValueError as error:
        raise ToolsError(_("{where} is not JSON: {error}; correct it", where=where, error=error)) from error
    servers = next((found[key] for key in KEYS if isinstance(found, dict) and key in found), None)
    if not isinstance(servers, dict):
        raise ToolsError(_('{where} lists no servers: it needs an object "mcpServers"', where=where))
    if len(servers) > MAX_SERVERS:
        raise ToolsError(
            _(
                "{where} lists {count} servers; at most {most} are used",
                where=where,
                count=len(servers),
                most=MAX_SERVERS,
            )
        )
    own = os.environ if own is None else own
    read = []
    for name, entry in servers.items():
        try:
            read.append(_server(name, entry, where, own))
        except ToolsError as error:  # the others work
            read.append(ServerConfig(name=printable_name(name)[:40], problem=str(error)))
    return read


def _server(name: str, entry: Any, where: str, own: Mapping[str, str]) -> ServerConfig:
    place = _("{where}: mcpServers.{name}", where=where, name=name)
    if not NAME.fullmatch(name):
        raise ToolsError(
            _(
                "{where}: {name!r} is not a valid server name: use at most 40 letters, digits, spaces and . _ -",
                where=where,
                name=name,
            )
        )
    if not isinstance(entry, dict):
        raise ToolsError(_("{place} is not an object", place=place))

    def text(key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ToolsError(_("{place}.{key} is not text", place=place, key=key))
        return _expanded(value, own, f"{place}.{key}")

    def texts(key: str) -> dict[str, str]:
        given = entry.get(key) or {}
        if not isinstance(given, dict):
            raise ToolsError(_("{place}.{key} is not an object", place=place, key=key))
        return {str(one): text(f"{key}.{one}", value) for one, value in given.items()}

    args = entry.get("args") or []
    if not isinstance(args, list):
        raise ToolsError(_("{place}.args is not a list", place=place))
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
        raise ToolsError(_("{place} needs either a command or a url", place=place))
    if entry.get("type") == "sse":
        raise ToolsError(
            _(
                "{place} uses the transport sse, which MCP has dropped: use the server's streamable HTTP address",
                place=place,
            )
        )
    if (problem := url_problem(made)) is not None:
        raise ToolsError(_("{place}.url: {problem}", place=place, problem=problem))
    return made


def url_problem(server: ServerConfig) -> str | None:
    """Why an address is invalid, or unsafe for the headers sent to it; None if it is fine."""
    if not server.url:
        return None
    try:
        parts = urlsplit(server.url)
        _port = parts.port
    except ValueError:
        return _("it is not an address; correct the host and port")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return _("it must begin with http:// or https:// and name a host")
    if not all(text.isascii() and text.isprintable() for header in server.headers.items() for text in header):
        return _("its headers may contain only visible ASCII characters")
    if (server.headers or parts.password) and parts.scheme == "http" and not is_loopback(parts.hostname):
        return _("its headers or password would be sent unencrypted; use https://, or a tunnel from localhost")
    return None


def _expanded(text: str, own: Mapping[str, str], where: str) -> str:
    """A text with its variables replaced."""

    def value(found: re.Match[str]) -> str:
        if found[1] in own:
            return own[found[1]]
        if found[2] is None:
            raise ToolsError(
                _(
                    "{where} names the variable {found}, which is not set: set it before you start the program",
                    where=where,
                    found=found[1],
                )
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
    text = _text(source)
    if wrong := next((one.problem for one in parse(text, str(source), own=_Anything()) if one.problem), None):
        raise ToolsError(wrong)
    entries = _entries(text, source)
    known = _entries(_text(file), file) if file.exists() else {}
    text = json.dumps({KEYS[0]: {**known, **entries}}, indent=2, ensure_ascii=False) + "\n"
    try:
        paths.write_atomically(file, text)
    except OSError as error:
        raise ToolsError(_("{file} can't be written: {error}", file=file, error=error)) from error
    return list(entries)


def _entries(text: str, file: Path) -> dict[str, Any]:
    try:
        found = read_json(text)
    except ValueError as error:
        raise ToolsError(_("{file} can't be read: {error}", file=file, error=error)) from error
    return next((dict(found[key]) for key in KEYS if isinstance(found, dict) and isinstance(found.get(key), dict)), {})


class _Anything(dict[str, str]):
    """An environment in which every variable is set."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> str:
        return key
