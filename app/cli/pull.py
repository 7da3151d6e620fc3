"""`lowbit-chat pull`: downloads a checkpoint into the Hugging Face cache."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from app.cli import options
from app.cli.model import fetched, pulled
from app.cli.output import Output
from app.cli.services import services_of
from models.catalogue import KNOWN


def pull(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name on the hub: owner/name or owner/name:TYPE; or smollm2-135m.", show_default=False
        ),
    ],
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Download a checkpoint into the Hugging Face cache; an interrupted download resumes."""
    output, services = Output(as_json=as_json), services_of(ctx)
    begin = time.perf_counter()
    if name in KNOWN:
        if revision is not None:
            raise typer.BadParameter(f"{name} is a single file without revisions", param_hint="--revision")
        path = fetched(KNOWN[name], services, output)
    else:
        path = pulled(name, revision, services, output)
    if as_json:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        output.result(
            {
                "name": name,
                "revision": KNOWN[name].hub.commit if name in KNOWN else (path if path.is_dir() else path.parent).name,
                "path": str(path),
                "bytes": sum(file.stat().st_size for file in files),
                "seconds": time.perf_counter() - begin,
            }
        )
    else:
        output.text(str(path))
