"""Other programs with their defaults, against this server: each says hi, lets a tool be called, has a schema filled,
and stops an answer.

They are installed from package indexes into environments that the tests' cache keeps, away from the program's own.
`tests.lab.clients` asks the same of the newest versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeHouse

from app.cli.launch import PROGRAMS, Target
from runtime.engine.generation import Piece
from runtime.text.sampling import SamplingOptions
from runtime.text.tool_calls import Tool
from tests.real_models import UnavailableError, kept
from tests.runtime.server.conftest import wait_until

PYTHON = (
    "anthropic==2.14.0",
    "langchain==1.5.2",
    "langchain-openai==1.7.4",
    "litellm==1.110.2",
    "llm==0.36",
    "ollama==0.6.3",
    "openai==3.57.0",
    "pydantic-ai-slim[openai]==2.68.0",
)
INSTRUCTOR = ("instructor==1.17.0",)
"""It excludes the newest openai."""
NODE = (
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@anthropic-ai/claude-code@2.1.332",
    "@anthropic-ai/sdk@1.14.0",
    "@openai/codex@0.171.0",
    "ai@7.0.173",
    "ollama@0.6.4",
    "openai@7.59.0",
    "opencode-ai@1.18.33",
    "zod@4.6.7",
)
PYTHON_CLIENTS = (
    *("openai_chat", "openai_responses", "anthropic", "ollama"),
    *("pydantic_ai", "langchain", "litellm", "llm", "instructor"),
)
NODE_CLIENTS = ("openai_chat", "openai_responses", "ai_sdk_compatible", "ai_sdk_openai", "anthropic", "ollama")
SCRIPTS_OF_MODULES = ("opencode-ai/postinstall.mjs", "@anthropic-ai/claude-code/install.cjs")
SCRIPTS = Path(__file__).parent / "clients"
PET = {"name": "Rex", "kind": "dog"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}

LONG = "slow 20000"
VERBS = ("say", "call", "fill", "slow")
ANSWERS = {"hi": "hi", "tool": "sunny in Rome", "schema": PET, "stop": "0"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class Scripted(FakeEngine):
    """Does what the last message says: `say WORDS`, `call TOOL ARGUMENTS`, `fill JSON`. It repeats a tool's result."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.context = 100_000

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Tool] = (), **_: Any) -> list[int]:
        text = messages[-1]["content"].strip()
        if messages[-1]["role"] != "tool":  # agents put reminders around what was typed
            lines = (line for turn in messages if turn["role"] == "user" for line in turn["content"].splitlines())
            text = next((line for line in reversed([*lines]) if line.split(" ")[0] in VERBS), text)
        verb, _, rest = text.partition(" ")
        name, _, arguments = rest.partition(" ")
        if messages[-1]["role"] == "tool":
            text = f"echo {text}"
        elif verb == "call" and name in {tool.name for tool in tools}:
            text = f'echo <tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        elif verb == "say":
            text = f"echo {rest}"
        tokens = [1] * (len(self._texts) + 1)  # a length of its own: prompts are told apart by it
        self._texts[len(tokens)] = text
        return tokens

    def submit(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        receive: Callable[[Piece | Exception], None],
        *rest: Any,
        **more: Any,
    ) -> None:
        if options.grammar is not None:
            self._texts[len(prompt)] = self._texts[len(prompt)].replace("fill", "echo", 1)
        super().submit(prompt, options, receive, *rest, **more)


@pytest.fixture
def url(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("fake_engine.FakeEngine", Scripted)
    return f"{serve(token='secret').url}/v1"


@pytest.mark.parametrize("client", PYTHON_CLIENTS)
def test_python(client: str, url: str, tmp_path: Path, house: FakeHouse) -> None:
    pins = INSTRUCTOR if client == "instructor" else PYTHON

    def make(folder: Path) -> None:
        install(sys.executable, "-m", "venv", folder)
        install(folder / "bin/python", "-m", "pip", "install", "--retries=1", "--only-binary=:all:", *pins)

    told = python_answers(installed("python", pins, make) / "bin/python", client, url, tmp_path)
    assert told == ANSWERS
    wait_until(lambda: house.engine.cancellations == 1)


@pytest.mark.parametrize("client", NODE_CLIENTS)
def test_node(client: str, url: str, tmp_path: Path, house: FakeHouse) -> None:
    assert node_answers(node_modules(), client, url, tmp_path) == ANSWERS
    wait_until(lambda: house.engine.cancellations == 1)


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_agents(agent: str, url: str, tmp_path: Path, house: FakeHouse) -> None:
    assert AGENTS[agent](node_modules(), url, tmp_path, house) == ANSWERS
    wait_until(lambda: house.engine.cancellations)


def python_answers(python: Path, client: str, url: str, home: Path) -> dict[str, Any]:
    """What a Python client is answered."""
    told: dict[str, Any] = json.loads(run(python, SCRIPTS / "python_clients.py", client, url, home=home))
    return told


def node_answers(modules: Path, client: str, url: str, home: Path) -> dict[str, Any]:
    """What a JavaScript client is answered."""
    (home / "node_modules").symlink_to(modules)
    script = shutil.copy(SCRIPTS / "node_clients.mjs", home)  # packages are looked for beside it
    told: dict[str, Any] = json.loads(run("node", script, client, url, home=home))
    return told


def launched(program: str, url: str) -> tuple[dict[str, str], Sequence[str]]:
    """Variables and arguments by which `launch` tells a program of the server."""
    to = Target(url=url.removesuffix("/v1"), token="secret", model="small", context=100_000)
    asked = PROGRAMS[program](to)
    return {name: value for name, value in asked.variables.items() if value is not None}, asked.arguments


def claude_answers(modules: Path, url: str, home: Path, house: FakeHouse) -> dict[str, Any]:
    """What Claude Code is answered."""
    variables, _ = launched("claude", url)
    (home / "note.txt").write_text("sunny in Rome\n")

    claude = (modules / ".bin/claude", "-p")

    def ask(prompt: str, *options: str) -> str:
        return run(*claude, *options, "--", prompt, home=home, **variables).strip()

    form = ("--output-format", "json", "--json-schema", json.dumps(SCHEMA))
    return {
        "hi": ask("say hi"),
        "tool": ask('call Bash {"command": "cat note.txt", "description": "Reads."}', "--allowedTools", "Bash"),
        "schema": json.loads(ask(f"call StructuredOutput {json.dumps(PET)}", *form))["structured_output"],
        "stop": interrupted(*claude, "--", LONG, house=house, home=home, **variables),
    }


def codex_answers(modules: Path, url: str, home: Path, house: FakeHouse) -> dict[str, Any]:
    """What Codex CLI is answered."""
    variables, arguments = launched("codex", url)
    (home / "note.txt").write_text("sunny in Rome\n")
    (home / "schema.json").write_text(json.dumps(SCHEMA))

    # Not every container allows the sandbox in which it runs commands.
    codex = (modules / ".bin/codex", *arguments, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access")

    def ask(prompt: str, *options: str) -> str:
        return run(*codex, *options, prompt, home=home, **variables).strip()

    result = ask('call exec_command {"cmd": "cat note.txt"}')  # with the time that it took, and the like
    return {
        "hi": ask("say hi"),
        "tool": "sunny in Rome" if "sunny in Rome" in result else result,
        "schema": json.loads(ask(f"fill {json.dumps(PET)}", "--output-schema", "schema.json")),
        "stop": interrupted(*codex, LONG, house=house, home=home, **variables),
    }


def opencode_answers(modules: Path, url: str, home: Path, house: FakeHouse) -> dict[str, Any]:
    """What opencode is answered."""
    variables, _ = launched("opencode", url)
    (home / "opencode.json").write_text('{"autoupdate": false}')
    note = home / "note.txt"
    note.write_text("sunny in Rome\n")
    opencode = modules / ".bin/opencode"

    def ask(prompt: str) -> str:
        return run(opencode, "run", home=home, stdin=prompt, **variables).strip()

    result = ask(f'call read {{"filePath": "{note}"}}')  # with the file's name and the lines' numbers
    told: dict[str, Any] = {"hi": ask("say hi"), "tool": "sunny in Rome" if "sunny in Rome" in result else result}
    told["stop"] = interrupted(opencode, "run", house=house, home=home, stdin=LONG, **variables)
    # `run` takes no schema; its own server does.
    command = [opencode, "serve", "--port", "0"]
    with subprocess.Popen(
        command, cwd=home, env=environment(home, **variables), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
                session = client.post("/session", json={}).json()["id"]
                body = {
                    "model": {"providerID": "lowbit-chat", "modelID": "small"},
                    "parts": [{"type": "text", "text": f"call StructuredOutput {json.dumps(PET)}"}],
                    "format": {"type": "json_schema", "schema": SCHEMA},
                }
                answer = client.post(f"/session/{session}/message", json=body).json()
                return {**told, "schema": answer["info"]["structured"]}
        finally:
            server.terminate()


AGENTS = {"claude": claude_answers, "codex": codex_answers, "opencode": opencode_answers}


def node_modules() -> Path:
    """The folder of the JavaScript packages, or a skip."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node.js with npm")
    return installed("node", NODE, lambda folder: install_modules(folder, NODE)) / "node_modules"


def install_modules(folder: Path, packages: Sequence[str]) -> None:
    """Install JavaScript packages into a folder. No scripts run but those that put a program where it belongs.

    Raises:
        UnavailableError: they can't be installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true}')
    install(
        "npm", "install", "--ignore-scripts", "--prefer-offline", "--fetch-retries=0", "--prefix", folder, *packages
    )
    for script in SCRIPTS_OF_MODULES:
        install("node", folder / "node_modules" / script)


def installed(kind: str, pins: Sequence[str], make: Callable[[Path], None]) -> Path:
    """The folder with these packages, which `make` fills once, or a skip."""
    name = f"{kind}-clients-{zlib.crc32(' '.join(pins).encode()):08x}"
    try:
        return kept(name, lambda scratch: make(scratch / name))
    except UnavailableError as error:
        pytest.skip(str(error))


def install(*command: str | Path) -> None:
    """Run a step of an installation.

    Raises:
        UnavailableError: it failed, or took too long.
    """
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    except subprocess.SubprocessError as error:
        lines = (getattr(error, "stderr", None) or str(error)).splitlines()
        reason = next((line for line in lines if line.startswith(("ERROR", "npm error"))), lines[-1])
        raise UnavailableError(f"the clients can't be installed: {reason}") from error


def run(*command: str | Path, home: Path, stdin: str = "", **variables: str) -> str:
    """What a program writes that runs in its own home."""
    done = subprocess.run(
        command, cwd=home, env=environment(home, **variables), input=stdin, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def interrupted(*command: str | Path, house: FakeHouse, home: Path, stdin: str = "", **variables: str) -> str:
    """Press Ctrl-C once a program is being answered. Returns the answer's first word, for the program shows none."""

    def steps() -> int:
        return sum(engine.steps for engine in house.engines)

    before = steps()
    own = {"cwd": home, "env": environment(home, **variables), "start_new_session": True}
    own |= dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, **own) as program:
        assert program.stdin is not None
        program.stdin.write(stdin)
        program.stdin.close()
        try:
            wait_until(lambda: steps() > before)
        finally:
            while program.poll() is None:  # some want to be asked twice
                os.killpg(program.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(5)
    return ANSWERS["stop"]


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Variables of a person without settings. litellm is not to fetch prices."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True", **variables}
