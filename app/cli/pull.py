"""`lowbit-chat pull`: a checkpoint from the hub into the Hugging Face cache."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from app.cli import options
from app.cli.model import pulled
from app.cli.output import Output
from app.cli.services import services_of


def pull(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name on the hub: owner/name.", show_default=False)],
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Download a checkpoint into the Hugging Face cache; an interrupted download goes on where it was."""
    output = Output(as_json=as_json)
    begin = time.perf_counter()
    folder = pulled(name, revision, services_of(ctx), output)
    if as_json:
        output.result(
            {
                "name": name,
                "revision": folder.name,
                "path": str(folder),
                "bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
                "seconds": time.perf_counter() - begin,
            }
        )
    else:
        output.text(str(folder))
