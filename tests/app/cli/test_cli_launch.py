"""`launch`: a program is told of the runtime, whose model is loaded with as much context as it needs."""

from __future__ import annotations

import json
import signal
import stat
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli.launch import PROGRAMS, Target
from app.settings import Settings
from models.progress import Progress
from runtime.server.lock import LockRecord
from runtime.wire.answers import CacheFacts, Caches, Status
from runtime.wire.requests import LoadRequest

Run = Callable[..., Any]
TO = Target(url="http://127.0.0.1:4321", token="secret", model="org/small", context=20_000)
TELLS = """#!{python}
import json, os, signal, sys
if sys.argv[1:] == ["interrupted"]:
    os.kill(os.getppid(), signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
told = {{name: value for name, value in os.environ.items() if value in ("secret", "small") or "4321" in value}}
print(json.dumps([sys.argv[1:], told, os.environ.get("ANTHROPIC_API_KEY")]))
sys.exit(7)
"""


class Runtime:
    """A runtime and its supervisor: 100,000 tokens fit, and a load that names no context takes 8192."""

    attached = True

    def __init__(self) -> None:
        self.status_ = Status(state="empty")
        self.loads: list[LoadRequest] = []
        self.closed = False

    async def ensure(self) -> Runtime:
        return self

    async def close(self) -> None:
        self.closed = True

    async def status(self) -> Status:
        return self.status_

    async def caches(self) -> Caches:
        return Caches(kinds={"int4": CacheFacts(bytes_per_token=9.0, context=100_000)})

    async def load(self, request: LoadRequest) -> AsyncIterator[Progress]:
        self.loads.append(request)
        yield Progress(phase="load", done=0, total=1, unit="", message="loading")
        self.status_ = Status(state="ready", model=request.model, kv="int4", context=request.context or 8192)


@pytest.fixture
def runtime(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    record = LockRecord(pid=1, create_time=1.0, host="127.0.0.1", port=4321, token="secret", version="1")

    def supervisor(home: Path, _settings: Settings) -> Runtime:
        assert home == isolated_home
        return found

    monkeypatch.setattr("app.supervisor.supervisor_of", supervisor)
    monkeypatch.setattr("app.cli.launch.running", lambda _services: record)
    return found


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program of a name into PATH that prints its arguments and what it is told, and ends with 7."""

    def put(name: str) -> None:
        file = tmp_path / name
        file.write_text(TELLS.format(python=sys.executable))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))

    return put


def test_a_program_runs_with_its_variables(
    run: Run, runtime: Runtime, program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    program("claude")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-other")
    result = run("launch", "--model", "demo", "claude", "-p", "--model", "x", code=7)
    arguments, told, key = json.loads(capfd.readouterr().out)
    assert arguments == ["-p", "--model", "x"]
    assert (told["ANTHROPIC_BASE_URL"], told["ANTHROPIC_AUTH_TOKEN"], key) == ("http://127.0.0.1:4321", "secret", None)
    assert [(load.model, load.context) for load in runtime.loads] == [("demo", None), ("demo", 32_768)]
    assert result.stderr.splitlines()[-2:] == [
        "lowbit-chat: the model is demo, with 32,768 tokens of context",
        "lowbit-chat: the server is http://127.0.0.1:4321, which another program started",
    ]
    assert runtime.closed


@pytest.mark.parametrize(
    ("options", "status", "loads"),
    [
        ((), Status(state="ready", model="small", kv="int4", context=40_000), []),
        ((), Status(state="ready", model="small", kv="int4", context=9_000), [32_768]),
        (("--context", "9000"), Status(state="ready", model="small", kv="int4", context=9_000), []),
        (("--context", "9001"), Status(state="ready", model="small", kv="int4", context=9_000), [9001]),
        ((), Status(state="failed", model="small"), [None, 32_768]),
    ],
)
def test_a_model_is_loaded_again_only_for_more_context(
    run: Run, runtime: Runtime, options: tuple[str, ...], status: Status, loads: list[int | None]
) -> None:
    runtime.status_ = status
    printed = run("launch", *options, "--print", "anything").stdout.splitlines()
    assert [load.context for load in runtime.loads] == loads
    assert "export OLLAMA_HOST=http://127.0.0.1:4321" in printed
    assert printed[-1] == "anything"


def test_ctrl_c_is_for_the_program(run: Run, runtime: Runtime, program: Callable[[str], None]) -> None:
    """As from a terminal, which sends it to both."""
    program("agent")
    before = signal.getsignal(signal.SIGINT)
    run("launch", "--model", "demo", "agent", "interrupted", code=130)
    assert runtime.closed
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_wrong_is_said(error: Callable[..., str], runtime: Runtime) -> None:
    assert "nothing-of-this-name is not installed" in error("launch", "nothing-of-this-name")
    assert "say which with --model" in error("launch", "--print", "claude")
    assert runtime.loads == []


def test_what_agents_are_told() -> None:
    claude = PROGRAMS["claude"](TO).variables
    models = ("MODEL", "DEFAULT_HAIKU_MODEL", "DEFAULT_OPUS_MODEL", "SMALL_FAST_MODEL")
    assert {claude[f"ANTHROPIC_{name}"] for name in models} == {TO.model}
    assert claude["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "20000"
    codex = PROGRAMS["codex"](TO)
    config = tomllib.loads("\n".join(codex.arguments[1::2]))
    assert set(codex.arguments[::2]) == {"-c"}
    assert config["model_providers"][config["model_provider"]]["base_url"] == "http://127.0.0.1:4321/v1"
    assert codex.variables == {config["model_providers"]["lowbit-chat"]["env_key"]: "secret"}
    opencode = json.loads(PROGRAMS["opencode"](TO).variables["OPENCODE_CONFIG_CONTENT"] or "")
    provider, _, model = opencode["model"].partition("/")
    assert opencode["provider"][provider]["models"][model] == {"limit": {"context": 20_000, "output": 10_000}}
    for launch in (how(TO) for how in PROGRAMS.values()):
        assert not any("secret" in argument for argument in launch.arguments)  # other users see a program's arguments
