"""`lowbit-chat export`: writes a stored model for another program."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from app.amounts import byte_count
from app.cli import options
from app.cli.errors import CliError
from app.cli.interrupt import Interrupt
from app.cli.model import is_stored, unknown
from app.cli.output import Output
from app.cli.services import DEMO, services_of
from models.export.formats import ExportFormat


def export(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=options.complete_model, show_default=False)],
    kind: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="gguf: a file for llama.cpp, 4-bit groups as Q4_1. awq, gptq, compressed-tensors: a folder for vLLM "
            "or SGLang, blocks in 4-bit groups, embedding and head in 16 bits.",
            show_default=False,
        ),
    ],
    path: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="PATH", help="The file or folder to make; default: NAME.gguf or NAME-FORMAT, here."
        ),
    ] = None,
    residuals: Annotated[
        bool,
        typer.Option(
            "--residuals",
            help="Add all residuals to the weights first, and round the sums anew: to 8 bits in gguf, to 4 in the "
            "others.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write a stored model in the format of llama.cpp, vLLM or SGLang. The stored model stays as it is."""
    from models.export.export import default_target
    from models.export.export import export as write

    output, services = Output(as_json=as_json), services_of(ctx)
    if name != DEMO and not is_stored(name, services):
        raise CliError(unknown(name, services))
    model = services.demo() if name == DEMO else services.store().open(name)
    begin = time.perf_counter()
    target = path or default_target(name, kind)
    with Interrupt() as interrupt, output.progress() as progress:
        made = write(model, target, kind, residuals=residuals, progress=progress, cancelled=interrupt.cancelled)
    for note in made.notes:
        output.note(note)
    if as_json:
        output.result(
            {
                "name": name,
                "format": kind,
                "path": str(made.path),
                "bytes": made.bytes,
                "weights": made.weights,
                "notes": list(made.notes),
                "seconds": time.perf_counter() - begin,
            }
        )
        return
    total = sum(made.weights.values())
    shares = ", ".join(f"{type_} {100 * count / total:.0f} %" for type_, count in made.weights.items())
    output.text(f"{made.path}: {byte_count(made.bytes)}, weights in {shares}")
