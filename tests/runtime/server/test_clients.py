"""Other programs with their defaults, against this server: each says hi, lets a tool be called, has a schema filled.

They are installed from package indexes into environments that the tests' cache keeps, away from the program's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from runtime.engine.generation import Piece
from runtime.text.sampling import SamplingOptions
from runtime.text.tool_calls import Tool
from tests.smollm2 import UnavailableError, kept

PYTHON = (
    "langchain==1.5.2",
    "langchain-openai==1.7.4",
    "litellm==1.110.2",
    "llm==0.36",
    "openai==3.57.0",
    "pydantic-ai-slim[openai]==2.68.0",
)
INSTRUCTOR = ("instructor==1.17.0",)
"""It excludes the newest openai."""
NODE = (
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@openai/codex@0.171.0",
    "ai@7.0.173",
    "openai@7.59.0",
    "opencode-ai@1.18.33",
    "zod@4.6.7",
)
SCRIPTS = Path(__file__).parent / "clients"
PET = {"name": "Rex", "kind": "dog"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class Scripted(FakeEngine):
    """Does what the last message says: `say WORDS`, `call TOOL ARGUMENTS`, `fill JSON`. It repeats a tool's result."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.context = 100_000

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Tool] = (), **_: Any) -> list[int]:
        text = messages[-1]["content"].strip()
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


@pytest.mark.parametrize(
    "client", ["openai_chat", "openai_responses", "pydantic_ai", "langchain", "litellm", "llm", "instructor"]
)
def test_python(client: str, url: str, tmp_path: Path) -> None:
    pins = INSTRUCTOR if client == "instructor" else PYTHON

    def make(folder: Path) -> None:
        install(sys.executable, "-m", "venv", folder)
        install(folder / "bin/python", "-m", "pip", "install", "--retries=1", "--only-binary=:all:", *pins)

    python = installed("python", pins, make) / "bin/python"
    told = json.loads(run(python, SCRIPTS / "python_clients.py", client, url, home=tmp_path))
    assert told == {"hi": "hi", "tool": "sunny in Rome", "schema": PET}


@pytest.mark.parametrize("client", ["openai_chat", "openai_responses", "ai_sdk_compatible", "ai_sdk_openai"])
def test_node(client: str, url: str, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(node_modules())
    script = shutil.copy(SCRIPTS / "node_clients.mjs", tmp_path)  # packages are looked for beside it
    told = json.loads(run("node", script, client, url, home=tmp_path))
    assert told == {"hi": "hi", "tool": "sunny in Rome", "schema": PET}


def test_codex(url: str, tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex/config.toml").write_text(
        'model = "small"\nmodel_provider = "local"\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{url}"\nwire_api = "responses"\nenv_key = "KEY"\n'
    )
    (tmp_path / "note.txt").write_text("sunny in Rome\n")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))

    def ask(prompt: str, *options: str) -> str:
        # Not every container allows the sandbox in which it runs commands.
        command = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", *options, prompt)
        return run(node_modules() / ".bin/codex", *command, home=tmp_path, KEY="secret")

    assert ask("say hi").strip() == "hi"
    assert "sunny in Rome" in ask('call exec_command {"cmd": "cat note.txt"}')
    assert json.loads(ask(f"fill {json.dumps(PET)}", "--output-schema", "schema.json")) == PET


def test_opencode(url: str, tmp_path: Path) -> None:
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": url, "apiKey": "secret"}}
    config = {"autoupdate": False, "provider": {"local": provider | {"models": {"small": {}}}}}
    (tmp_path / "opencode.json").write_text(json.dumps(config))
    note = tmp_path / "note.txt"
    note.write_text("sunny in Rome\n")
    opencode = node_modules() / ".bin/opencode"

    def ask(prompt: str) -> str:
        return run(opencode, "run", "--model", "local/small", home=tmp_path, stdin=prompt)

    assert ask("say hi").strip() == "hi"
    assert "sunny in Rome" in ask(f'call read {{"filePath": "{note}"}}')
    # `run` takes no schema; its own server does.
    command = [opencode, "serve", "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
                session = client.post("/session", json={}).json()["id"]
                body = {
                    "model": {"providerID": "local", "modelID": "small"},
                    "parts": [{"type": "text", "text": f"call StructuredOutput {json.dumps(PET)}"}],
                    "format": {"type": "json_schema", "schema": SCHEMA},
                }
                assert client.post(f"/session/{session}/message", json=body).json()["info"]["structured"] == PET
        finally:
            server.terminate()


def node_modules() -> Path:
    """The folder of the JavaScript packages, or a skip."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node.js with npm")

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "package.json").write_text('{"private": true}')
        install(
            "npm", "install", "--ignore-scripts", "--prefer-offline", "--fetch-retries=0", "--prefix", folder, *NODE
        )
        install("node", folder / "node_modules/opencode-ai/postinstall.mjs")

    return installed("node", NODE, make) / "node_modules"


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


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Variables of a person without settings. litellm is not to fetch prices."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True", **variables}
