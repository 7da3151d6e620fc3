"""`lowbit-chat serve`, `ps` and `stop`: the OpenAI-compatible server, and the runtime process in the background."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from app.amounts import byte_count
from app.cli import options
from app.cli.model import open_model
from app.cli.output import CliError, Output
from app.cli.services import Services, services_of
from app.language import _

if TYPE_CHECKING:
    from app.client import RuntimeClient
    from runtime.server.lock import LockRecord
    from runtime.wire.answers import Caches, Status


END_S = 20.0
"""Longest wait in seconds for a runtime to exit."""
ANSWER_S = 2.0
"""A runtime that does not report its status within this time is not asked for an answer."""
_POLL_S = 0.1

T = TypeVar("T")


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Imports asyncio here: other commands start 40 ms sooner without it."""
    import asyncio

    return asyncio.run(work)


def ps(ctx: typer.Context, as_json: options.Json = False) -> None:
    """Show the running runtime: its model, its memory, the saved caches of chats, its start time."""
    output, services = Output(as_json=as_json), services_of(ctx)
    record = running(services)
    if record is None:
        if as_json:
            output.result({"running": False})
        else:
            output.text(_("no runtime is running"))
        return
    status, caches = result_of(_asked(record))
    since = datetime.fromtimestamp(record.create_time).astimezone()
    if as_json:
        output.result(
            {
                "running": True,
                "pid": record.pid,
                "version": record.version,
                "state": status.state,
                "model": status.model,
                "also_loaded": list(status.also_loaded),
                "backend": status.backend,
                "exact": status.exact,
                "context": status.context,
                "memory_bytes": status.memory_bytes,
                "answering": status.running,
                "waiting": status.waiting,
                "saved_chats": caches.files,
                "saved_bytes": caches.bytes,
                "since": since.isoformat(timespec="seconds"),
            }
        )
        return
    rows = [("PID", _("STATE"), _("MODEL"), "BACKEND", _("MEMORY"), _("SAVED CHATS"), _("SINCE"))]
    memory = "-" if status.memory_bytes is None else byte_count(status.memory_bytes)
    saved = f"{caches.files} ({byte_count(caches.bytes)})"
    when = f"{since:%Y-%m-%d %H:%M}"
    state = _(status.state)
    state += f", {_('{count} answered', count=status.running)}" if status.running else ""
    state += f", {_('{count} waiting', count=status.waiting)}" if status.waiting else ""
    answers = f"{status.model} ({_('exact')})" if status.exact else status.model
    models = ", ".join(filter(None, (answers, *status.also_loaded)))
    rows.append((str(record.pid), state, models or "-", status.backend or "-", memory, saved, when))
    output.table(rows)


def stop(ctx: typer.Context, as_json: options.Json = False) -> None:
    """Stop the running runtime cleanly: answers end, the model is unloaded. A terminal UI restarts it."""
    output, services = Output(as_json=as_json), services_of(ctx)
    record = running(services)
    if record is not None:
        result_of(_ended(record))
    if as_json:
        output.result({"stopped": None if record is None else record.pid})
    else:
        output.text(
            _("no runtime is running") if record is None else _("the runtime (process {pid}) has ended", pid=record.pid)
        )


def running(services: Services) -> LockRecord | None:
    """The lock record of the running runtime; None if there is none."""
    from runtime.server.lock import running_record

    return running_record(services.home())


async def loaded_model(services: Services) -> str | None:
    """The model loaded in the running runtime; None if there is none, or it does not respond."""
    from app.errors import ClientError

    record = running(services)
    if record is None:
        return None
    try:
        async with _client(record) as client:
            return (await client.status()).model
    except ClientError:
        return None


async def running_client(model: str, services: Services) -> RuntimeClient | None:
    """A client of the running runtime; None if it has not loaded this model, is of another version, or too busy."""
    from asyncio import timeout

    from app.client import RuntimeClient
    from app.errors import ClientError
    from runtime import program_version

    record = running(services)
    if record is None or record.version != program_version():
        return None
    client = RuntimeClient(record.base_url, record.token)
    try:
        async with timeout(ANSWER_S):
            status = await client.status()
        if status.model == model and status.state in ("ready", "generating"):
            return client
    except (ClientError, TimeoutError):
        pass
    await client.aclose()
    return None


async def unload(services: Services) -> None:
    """Ask the running runtime to unload its model.

    Raises:
        ClientError: it refused.
    """
    record = running(services)
    if record is not None:
        async with _client(record) as client:
            await client.unload()


@asynccontextmanager
async def _client(record: LockRecord) -> AsyncIterator[RuntimeClient]:
    from app.client import RuntimeClient

    client = RuntimeClient(record.base_url, record.token)
    try:
        yield client
    finally:
        await client.aclose()


async def _asked(record: LockRecord) -> tuple[Status, Caches]:
    async with _client(record) as client:
        return await client.status(), await client.caches()


async def _ended(record: LockRecord) -> None:
    """Ask it to exit, and wait for it."""
    from asyncio import sleep

    from runtime.server.lock import is_alive

    async with _client(record) as client:
        await client.shutdown()
    deadline = time.monotonic() + END_S
    while is_alive(record):
        if time.monotonic() > deadline:
            raise CliError(_("the runtime (process {pid}) does not exit: stop it with `kill -9 {pid}`", pid=record.pid))
        await sleep(_POLL_S)


def serve(
    ctx: typer.Context,
    host: Annotated[
        str,
        typer.Option("--host", metavar="H", help="Address to listen on; addresses beyond loopback require a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=0, max=65535, help="TCP port; 0 chooses a free one.")
    ] = 8080,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            metavar="T",
            envvar="LOWBIT_CHAT_TOKEN",
            help="API key required of every request.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model to load at the start; others are loaded when a request names them.",
            autocompletion=options.complete_model,
            show_default=False,
        ),
    ] = None,
    kv: options.KVOption = None,
    context: options.Context = None,
    experts_on_device: options.ExpertsOnDevice = None,
    layers_on_device: options.LayersOnDevice = None,
    k_chunk: options.KChunk = None,
    budget: options.BudgetOrExact = None,
    prompt_budget: options.PromptBudget = None,
    speculation: options.Speculation = None,
    gamma: options.Gamma = None,
) -> None:
    """Serve the stored models to clients of OpenAI's, Anthropic's and Ollama's APIs, on this machine by default."""
    asked = options.compensation(budget, k_chunk, prompt_budget)
    options.check_speculation(speculation, gamma, kv)
    output, services = Output(), services_of(ctx)

    from app.settings import load
    from runtime.load.plan import LoadOptions
    from runtime.server import serve as server
    from runtime.wire.requests import LoadRequest

    speculate = options.speculate_setting(speculation)
    settings = load(
        {
            "model": model,
            "kv": kv,
            "context": context,
            "experts_on_device": experts_on_device,
            "layers_on_device": layers_on_device,
            "speculate": speculate,
            "gamma": gamma,
        }
    )
    defaults = LoadOptions(
        compensation=settings.compensation(asked, prompt_budget),
        speculation=settings.drafts,
        kv=settings.cache(kv),
        context=settings.context,
        backend=settings.backend,
        experts_on_device=settings.experts_on_device,
        layers_on_device=settings.layers_on_device,
        num_parallel=settings.num_parallel,
    )
    first = None if settings.model is None else open_model(settings.model, services, output).name
    with output.progress() as progress:
        code = server.run(
            services.service(defaults, keeps=settings.history == "on", max_models=settings.max_models),
            host=host,
            port=port,
            token=token,
            model=None if first is None else LoadRequest(model=first),
            progress=progress,
            ready=lambda url: output.note(_("serving {url}; Ctrl-C stops", url=url)),
        )
    raise typer.Exit(code)
