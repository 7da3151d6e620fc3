"""`lowbit-chat serve`: the OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import options
from app.cli.model import open_model
from app.cli.output import Output
from app.cli.services import services_of


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
    k_chunk: options.KChunk = None,
    budget: options.Budget = None,
    prompt_budget: options.PromptBudget = None,
    speculation: options.Speculation = None,
    gamma: options.Gamma = None,
) -> None:
    """Serve the stored models to OpenAI clients, on this machine only by default."""
    asked = options.compensation(budget, k_chunk)
    options.check_speculation(speculation, gamma, kv)
    output, services = Output(), services_of(ctx)

    from app.settings import load
    from runtime.server import serve as server
    from runtime.server.store.loading import LoadDefaults
    from runtime.wire.requests import LoadRequest

    speculate = options.speculate_setting(speculation)
    settings = load(
        {
            "model": model,
            "kv": kv,
            "context": context,
            "experts_on_device": experts_on_device,
            "speculate": speculate,
            "gamma": gamma,
        }
    )
    defaults = LoadDefaults(
        compensation=settings.compensation(asked, prompt_budget),
        speculation=settings.drafts,
        kv=settings.cache(kv),
        context=settings.context,
        backend=settings.backend,
        experts_on_device=settings.experts_on_device,
        num_parallel=settings.num_parallel,
    )
    first = None if settings.model is None else open_model(settings.model, services, output).name
    with output.progress() as progress:
        code = server.run(
            services.service(defaults),
            host=host,
            port=port,
            token=token,
            model=None if first is None else LoadRequest(model=first),
            progress=progress,
            ready=lambda url: output.note(f"serving {url}; Ctrl-C ends"),
        )
    raise typer.Exit(code)
