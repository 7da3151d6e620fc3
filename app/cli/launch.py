"""`lowbit-chat launch`: starts a coding agent, or any other client, on the local runtime.

The program gets variables and, where it reads none, arguments, for this one run; its own configuration stays as it is.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options
from app.cli.model import open_model
from app.cli.output import CliError, Output
from app.cli.serve import result_of, running
from app.cli.services import Services, services_of
from app.language import _

if TYPE_CHECKING:
    from app.client import RuntimeClient
    from app.settings import Settings
    from runtime.wire.answers import Status

CONTEXT = 32_768
"""Tokens of context that a program gets where they fit, unless another number is set."""
FEW = 16_384
"""Tokens of context below which agents hardly work: their instructions and tools alone take ten thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The runtime that a program is started on."""

    url: str
    """Without a path."""
    token: str
    model: str
    context: int
    """Tokens of context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a program is told of its server."""

    variables: Mapping[str, str | None]
    """Set for the program; None: unset."""
    arguments: tuple[str, ...] = ()
    """What stands before the user's own arguments."""


def _claude(to: Target) -> Launch:
    """Claude Code. A key would be preferred to the token, and its billing line only costs."""
    names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "SMALL_FAST_MODEL")
    return Launch(
        variables={
            "ANTHROPIC_BASE_URL": to.url,
            "ANTHROPIC_AUTH_TOKEN": to.token,
            "ANTHROPIC_API_KEY": None,
            **{f"ANTHROPIC_{name}": to.model for name in names},
            "CLAUDE_CODE_SUBAGENT_MODEL": to.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(to.context),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(to: Target) -> Launch:
    """Codex CLI, which takes another server only from its configuration, or from arguments in that form."""
    server = {"name": "lowbit-chat", "base_url": f"{to.url}/v1", "wire_api": "responses", "env_key": "OPENAI_API_KEY"}
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in server.items())
    given = {
        "model": json.dumps(to.model),
        "model_provider": '"lowbit-chat"',
        "model_providers.lowbit-chat": f"{{{table}}}",
        "model_context_window": str(to.context),
    }
    arguments = [part for name, value in given.items() for part in ("-c", f"{name}={value}")]
    return Launch(variables={"OPENAI_API_KEY": to.token}, arguments=tuple(arguments))


def _opencode(to: Target) -> Launch:
    """opencode, whose configuration may stand in a variable."""
    limit = {"context": to.context, "output": to.context // 2}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "lowbit-chat",
        "options": {"baseURL": f"{to.url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {to.model: {"limit": limit}},
    }
    config = {"model": f"lowbit-chat/{to.model}", "provider": {"lowbit-chat": provider}}
    return Launch(variables={"OPENAI_API_KEY": to.token, "OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _other(to: Target) -> Launch:
    """Any other program: the variables that clients of the three interfaces commonly read."""
    return Launch(
        variables={
            "OPENAI_BASE_URL": f"{to.url}/v1",
            "OPENAI_API_BASE": f"{to.url}/v1",
            "OPENAI_API_KEY": to.token,
            "OPENAI_MODEL": to.model,
            "ANTHROPIC_BASE_URL": to.url,
            "ANTHROPIC_AUTH_TOKEN": to.token,
            "ANTHROPIC_MODEL": to.model,
            "OLLAMA_HOST": to.url,
            "OLLAMA_API_KEY": to.token,
        }
    )


PROGRAMS: Mapping[str, Callable[[Target], Launch]] = {"claude": _claude, "codex": _codex, "opencode": _opencode}


def launch(
    ctx: typer.Context,
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help=f"{', '.join(PROGRAMS)}, or any other program.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The program's own arguments.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The model that answers; else that of the settings, or the one that is loaded.",
            autocompletion=options.complete_model,
            show_default=False,
        ),
    ] = None,
    context: options.Context = None,
    shown: Annotated[
        bool, typer.Option("--print", help="Print the variables and the command instead of starting the program.")
    ] = False,
) -> None:
    """Start a coding agent on the local runtime, which is started if none is running; its own settings stay."""
    output, services = Output(), services_of(ctx)
    executable = program if shown else shutil.which(program)
    if executable is None:
        raise CliError(_("{program} is not installed, or its folder is not in PATH", program=program))

    from app.settings import load

    settings = load({"model": model, "context": context})
    name = None if settings.model is None else open_model(settings.model, services, output).name

    async def work() -> int:
        import asyncio

        from app.supervisor import supervisor_of

        supervisor = supervisor_of(services.home(), settings)
        try:
            to = await _target(await supervisor.ensure(), name, settings, services, output)
            own = not supervisor.attached
            output.note(
                _("the server is {url}, until this command ends", url=to.url)
                if own
                else _("the server is {url}, which another program started", url=to.url)
            )
            asked = PROGRAMS.get(program, _other)(to)
            command = [executable, *asked.arguments, *(arguments or ())]
            if not shown:
                with _deaf_to_ctrl_c():
                    return await asyncio.to_thread(_run, command, asked.variables)
            _show(command, asked.variables, output)
            if own:
                await asyncio.Event().wait()  # until Ctrl-C
            return 0
        finally:
            await supervisor.close()

    raise typer.Exit(result_of(work()))


async def _target(
    client: RuntimeClient, model: str | None, settings: Settings, services: Services, output: Output
) -> Target:
    """The runtime with its model loaded."""
    status = await _loaded(client, model, settings, output)
    record = running(services)
    if record is None or status.model is None or status.context is None:
        raise CliError(_("the runtime has ended; try again"))
    told = _("the model is {model}, with {count:,} tokens of context", model=status.model, count=status.context)
    output.note(told if status.context >= FEW else _("{context}; coding agents need more", context=told))
    return Target(url=record.base_url, token=record.token, model=status.model, context=status.context)


def _show(command: Sequence[str], variables: Mapping[str, str | None], output: Output) -> None:
    """Print what would be set and run, as a shell takes it."""
    for name, value in variables.items():
        output.text(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    output.text(shlex.join(command))
    sys.stdout.flush()


async def _loaded(client: RuntimeClient, model: str | None, settings: Settings, output: Output) -> Status:
    """Load the model, unless it is loaded with as much context as wanted, or as fits."""
    status = await client.status()
    model = model or status.model
    if model is None:
        raise CliError(_("no model is loaded and the settings name none: say which with --model"))
    asked = settings.load_request(model)

    async def load(context: int | None) -> Status:
        with output.progress() as progress:
            async for report in client.load(replace(asked, context=context)):
                progress(report)
        return await client.status()

    ready = status.model == model and status.state in ("ready", "generating")
    if not ready or (status.context or 0) < (asked.context or 0):
        status = await load(asked.context)
    if asked.context is None and (status.context or 0) < CONTEXT:
        facts = (await client.caches()).kinds.get(status.kv or "")
        fitting = 0 if facts is None else min(CONTEXT, facts.context)
        if fitting > (status.context or 0):
            status = await load(fitting)
    return status


def _run(command: Sequence[str], variables: Mapping[str, str | None]) -> int:
    """Run a program in this terminal. Returns its exit code; of one that a signal ended, as a shell has it."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    with subprocess.Popen(command, env=environment) as process:
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Context manager: Ctrl-C is for the program that runs in this terminal."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
