"""Other programs' newest versions against this server: `python -m tests.lab.clients`, or `make test-clients`.

Each says hi, lets a tool be called, has a schema filled and stops an answer after its first word. The model is
scripted, so what is seen is the interfaces; with `--home`, the model called `small` there is asked too, by those that
are no agents, and its answers are judged by their form. Packages come from the indexes into build/clients, which may be
deleted at any time; what an index lacks is left out. Prints a table; ends with 1 where a client was answered something
else by the script.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.lab.store import ROOT, about_run, columns, parser, write

sys.path.insert(0, str(ROOT / "tests" / "runtime" / "server"))
import fake_engine

from runtime.server.security import Security
from tests.lab.soak import server
from tests.real_models import UnavailableError
from tests.runtime.server import test_clients as clients
from tests.runtime.server.conftest import Listening, wait_until

FOLDER = ROOT / "build" / "clients"
ASKED = ("hi", "tool", "schema", "stop")
PACKAGES = {
    "openai_chat": "openai",
    "openai_responses": "openai",
    "pydantic_ai": "pydantic-ai-slim",
    "langchain": "langchain-openai",
}
"""Python packages by client, where their names differ."""
MODULES = {
    "openai_chat": "openai",
    "openai_responses": "openai",
    "ai_sdk_compatible": "@ai-sdk/openai-compatible",
    "ai_sdk_openai": "@ai-sdk/openai",
    "anthropic": "@anthropic-ai/sdk",
    "claude": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "opencode": "opencode-ai",
}
"""JavaScript packages, likewise."""
Ask = Callable[[str, Path, fake_engine.FakeHouse], Mapping[str, Any]]


def newest(pins: Sequence[str], version: str = "") -> list[str]:
    """Packages without the versions that the tests use."""
    return [re.sub(r"(?<!^)(==|@)[\d.]+$", version, pin) for pin in pins]


def python_environment(name: str, pins: Sequence[str]) -> Path:
    """The interpreter of an environment with the newest packages.

    Raises:
        UnavailableError: they can't be installed.
    """
    folder = FOLDER / name
    if not (folder / "bin" / "python").exists():
        clients.install(sys.executable, "-m", "venv", folder)
    wanted = ("-m", "pip", "install", "--quiet", "--upgrade", "--retries=1", "--only-binary=:all:", *newest(pins))
    clients.install(folder / "bin" / "python", *wanted)
    return folder / "bin" / "python"


def node_environment() -> Path:
    """The folder of the newest JavaScript packages.

    Raises:
        UnavailableError: they can't be installed, or there is no npm.
    """
    try:
        clients.install_modules(FOLDER / "node", newest(clients.NODE, "@latest"))
    except FileNotFoundError as error:
        raise UnavailableError("there is no Node.js with npm") from error
    return FOLDER / "node" / "node_modules"


def aider(python: Path, url: str, home: Path, house: fake_engine.FakeHouse) -> Mapping[str, Any]:
    """What aider is answered; it edits files by the text of answers, without tools."""
    quiet = ("--no-git", "--yes-always", "--no-pretty", "--no-check-update", "--no-show-model-warnings")
    command = (python.with_name("aider"), "--model", "openai/small", *quiet, "--message")
    variables = {"OPENAI_API_BASE": url, "OPENAI_API_KEY": "secret"}
    told = clients.run(*command, "say hi", home=home, **variables)
    stopped = clients.interrupted(*command, clients.LONG, house=house, home=home, **variables)
    return {"hi": "hi" if "hi" in told.splitlines() else told, "stop": stopped}


def everyone() -> Iterator[tuple[str, str, Ask]]:
    """Every client that can be installed: its name, its version, and how it is asked."""
    for kind, pins in (("python", clients.PYTHON), ("instructor", clients.INSTRUCTOR), ("aider", ("aider-chat",))):
        try:
            python = python_environment(kind, pins)
        except UnavailableError as error:
            print(f"left out: {', '.join(newest(pins))}: {error}")
            continue
        if kind == "aider":
            told = subprocess.run([python.with_name("aider"), "--version"], capture_output=True, text=True, check=True)
            yield "aider", told.stdout.split()[-1], partial(aider, python)
            continue
        for name in clients.PYTHON_CLIENTS:
            if (name == "instructor") == (kind == "instructor"):
                version = f"from importlib.metadata import version; print(version({PACKAGES.get(name, name)!r}))"
                told = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout

                def ask(url: str, home: Path, _: Any, python: Path = python, name: str = name) -> Mapping[str, Any]:
                    return clients.python_answers(python, name, url, home)

                yield f"{name} (Python)", told.strip(), ask
    try:
        modules = node_environment()
    except UnavailableError as error:
        print(f"left out: {', '.join(newest(clients.NODE))}: {error}")
        return
    for name in (*clients.NODE_CLIENTS, *clients.AGENTS):
        about = json.loads((modules / MODULES.get(name, name) / "package.json").read_text(encoding="utf-8"))

        def ask_node(url: str, home: Path, house: fake_engine.FakeHouse, name: str = name) -> Mapping[str, Any]:
            if name in clients.AGENTS:
                return clients.AGENTS[name](modules, url, home, house)
            return clients.node_answers(modules, name, url, home)

        yield name if name in clients.AGENTS else f"{name} (JavaScript)", about["version"], ask_node


@contextmanager
def served() -> Iterator[tuple[str, fake_engine.FakeHouse]]:
    """Context manager: a server of the scripted model, its URL, and what it was asked."""
    fake_engine.FakeEngine = clients.Scripted  # type: ignore[misc]
    service, house = fake_engine.make_service()
    server = Listening(service, Security(token="secret"))
    try:
        yield f"{server.url}/v1", house
    finally:
        server.close()
        service.close()


def stopped(house: fake_engine.FakeHouse) -> int:
    """How many answers were stopped; Ollama's clients have the model unloaded after five minutes."""
    return sum(engine.cancellations for engine in house.engines)


def told(ask: Ask, url: str, house: fake_engine.FakeHouse) -> dict[str, Any]:
    """What a client was answered, in a home of its own; or the error with which it failed."""
    with tempfile.TemporaryDirectory() as home:
        try:
            return dict(ask(url, Path(home), house))
        except Exception as error:  # noqa: BLE001 -- the others are still worth trying
            return {"hi": error}


def judged(answers: Mapping[str, Any], fits: Callable[[str, Any], bool]) -> dict[str, str]:
    """What works, by what was asked; else what was answered instead."""
    return {
        name: "yes" if fits(name, answer) else " ".join(str(answer).split())[:200] for name, answer in answers.items()
    }


def asked(ask: Ask, url: str, house: fake_engine.FakeHouse) -> dict[str, str]:
    """What works with the script."""
    before = stopped(house)
    answers = told(ask, url, house)
    if "stop" in answers:
        try:
            wait_until(lambda: stopped(house) > before)
        except AssertionError:
            answers["stop"] = "goes on"
    return judged(answers, lambda name, answer: answer == clients.ANSWERS[name])


FORMS: Mapping[str, Callable[[Any], bool]] = {
    "hi": lambda answer: isinstance(answer, str) and "Error" not in answer and answer.strip() != "",
    "tool": lambda answer: clients.ANSWERS["tool"] in str(answer),
    "schema": lambda answer: isinstance(answer, dict) and answer.keys() == clients.PET.keys(),
}
"""Whether an answer of a real model has the form that was asked for."""


def asked_for_real(ask: Ask, url: str, house: fake_engine.FakeHouse) -> dict[str, str]:
    """What works with a real model."""
    found = judged(told(ask, url, house), lambda name, answer: FORMS.get(name, FORMS["hi"])(answer))
    return {name: "not called" if name == "tool" and what != "yes" else what for name, what in found.items()}


def main() -> int:
    """Ask every client, print and store what works."""
    options, rows = parser(__doc__, "clients"), []
    options.add_argument("--home", type=Path, help="a folder of the program's with a model called `small`")
    given = options.parse_args()
    with served() as (url, house), contextlib.ExitStack() as real:
        everyone_asks = [("script", url, asked)]
        if given.home is not None:
            base, _ = real.enter_context(server("small", given.home))
            everyone_asks.append(("small", base, asked_for_real))
        for name, version, ask in everyone():
            for model, base, asks in everyone_asks:
                if model == "script" or name not in (*clients.AGENTS, "aider"):
                    works = asks(ask, base, house)
                    own = {what: works.get(what, "") for what in ASKED}
                    rows.append({"client": name, "version": version, "model": model, **own})
                    print(f"{name} {version}: {works}", flush=True)
    print(columns(rows))
    write(given.out, {**about_run("python -m tests.lab.clients", ("runtime/server",)), "rows": rows})
    return int(any(row[what] not in ("yes", "") for row in rows if row["model"] == "script" for what in ASKED))


if __name__ == "__main__":
    sys.exit(main())
