"""Servers of tools: what each does, and what is left of it, for reference servers and hostile ones.

    python -m tests.bench.tool_servers --python VENV --npm FOLDER --out tests/bench/results/tool_servers.json

VENV is a virtual environment with mcp-server-time, mcp-server-git and mcp-server-fetch; npm installed
@modelcontextprotocol/server-filesystem in FOLDER. The hostile servers are those of `tests/app/tools/hostile.py`. Of
each: how long it takes to start, one call with its outcome, how long it takes to end, and how many of its processes are
left.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from app.tools import server as server_module
from app.tools.config import ServerConfig, ToolsError
from app.tools.toolbox import Toolbox
from runtime.text.enforceable import enforceable
from tests.bench.reporting.markdown import table
from tests.bench.reporting.run import about_run, write_report

HOSTILE = Path(__file__).parents[1] / "app" / "tools" / "hostile.py"
ROOMS = ("app/tools", "runtime/text")
START_S, CALL_S = 20.0, 5.0
"""Limits of this run; the program's own are a minute and two."""
MARK = "TOOL_SERVERS_RUN"
KINDS = {
    "wrong-json": "answers with half a message and then with one that is no result",
    "endless": "returns a million characters",
    "lookahead": "has a schema with lookaheads",
    "recursion": "has a schema that refers to itself",
    "repeat": "has a pattern of 10,000 repetitions",
    "unicode": "lists names that look like another's",
    "changing": "changes its list of tools with every call",
    "hang-at-start": "never answers the handshake",
    "hang": "never answers a call",
    "exit": "exits in a call",
    "ansi": "returns escape sequences and markup",
    "child": "starts another program and leaves it running",
    "chatter": "sends messages without end instead of a result",
    "one-line": "sends one line without end",
    "lies": "lists a tool that is none",
}
"""What each hostile server does."""
Case = tuple[ServerConfig, str, Mapping[str, Any], str]
"""A server, the tool to call with which arguments, and what the server is."""


def reference(python: Path, npm: Path, folder: Path) -> Iterator[Case]:
    """The reference servers."""
    (folder / "notes.txt").write_text("Buy milk.\n", encoding="utf-8")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "One"],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    files = npm / "node_modules" / "@modelcontextprotocol" / "server-filesystem" / "dist" / "index.js"
    place = str(folder)
    yield (
        ServerConfig(name="time", command=str(python / "bin" / "mcp-server-time"), args=("--local-timezone", "UTC")),
        "convert_time",
        {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
        "mcp-server-time",
    )
    git = ServerConfig(name="git", command=str(python / "bin" / "mcp-server-git"), args=("--repository", place))
    yield git, "git_log", {"repo_path": place}, "mcp-server-git"
    fetch = ServerConfig(name="fetch", command=str(python / "bin" / "mcp-server-fetch"), args=("--ignore-robots-txt",))
    yield fetch, "fetch", {"url": "http://localhost:9/"}, "mcp-server-fetch, without a network"
    filesystem = ServerConfig(name="filesystem", command="node", args=(str(files), place))
    yield filesystem, "read_text_file", {"path": f"{place}/notes.txt"}, "@modelcontextprotocol/server-filesystem"


def hostile() -> Iterator[Case]:
    """The hostile servers."""
    for kind, words in KINDS.items():
        yield (
            ServerConfig(name=kind, command=sys.executable, args=(str(HOSTILE), kind)),
            "echo",
            {"text": "hello"},
            words,
        )


def left_of(mark: str) -> int:
    """How many processes run that were started with a mark in their environment."""
    found = 0
    for process in psutil.process_iter():
        try:
            found += process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
    return found


def tried(case: Case) -> dict[str, Any]:
    """Start a server, call a tool, end it."""
    config, name, arguments, words = case
    mark = uuid.uuid4().hex
    begin = time.monotonic()
    box = Toolbox([replace(config, env={MARK: mark})])
    box.open()
    while not box.settled:
        time.sleep(0.01)
    (server,) = box.servers
    started = time.monotonic() - begin
    tools = list(server.tools)
    tool = next((one for one in tools if one.name == name), tools[0] if tools else None)
    outcome, called = server.problem, 0.0
    if tool is not None:
        begin = time.monotonic()
        try:
            result = box.call(tool, arguments).result(60)
            outcome = ("error: " if result.failed else "") + result.text
        except ToolsError as error:
            outcome = str(error)
        called = time.monotonic() - begin
    notes = list(server.notes)
    begin = time.monotonic()
    box.close()
    ended = time.monotonic() - begin
    time.sleep(0.2)
    relaxed = sum(bool(enforceable(one.schema).relaxed) for one in tools)
    return {
        "name": config.name, "what": words, "tools": len(tools), "relaxed": relaxed, "start_s": round(started, 2),
        "call_s": round(called, 2), "end_s": round(ended, 2), "outcome": " ".join(outcome.split())[:120],
        "notes": notes[:3], "left": left_of(mark),
    }  # fmt: skip


def written(found: Mapping[str, Any]) -> str:
    """The table of docs/tools.md."""
    head = ["server", "tools (relaxed)", "start", "call", "end", "what the chat gets", "processes left"]
    rows = [
        [
            f"{row['name']}: {row['what']}",
            f"{row['tools']} ({row['relaxed']})",
            f"{row['start_s']:.1f} s",
            f"{row['call_s']:.1f} s",
            f"{row['end_s']:.1f} s",
            _cell("; ".join([row["outcome"], *row["notes"]])),
            row["left"],
        ]
        for row in found["rows"]
    ]
    return table(head, rows)


def _cell(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "|<>*_`[]" else letter for letter in text)


def main() -> None:
    """Try all and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--npm", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    server_module.START_S, server_module.CALL_S = START_S, CALL_S
    rows = []
    with tempfile.TemporaryDirectory(prefix="tools-") as place:
        for case in (*reference(asked.python, asked.npm, Path(place)), *hostile()):
            row = tried(case)
            row["outcome"] = row["outcome"].replace(place, "FOLDER")
            rows.append(row)
            print(rows[-1], flush=True)
    write_report(asked.out, {**about_run("python -m tests.bench.tool_servers", ROOMS), "rows": rows})


if __name__ == "__main__":
    main()
