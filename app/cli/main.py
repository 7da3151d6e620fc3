"""The `lowbit-chat` command: its commands, and the exit codes of errors.

Exit codes: 0 done; 1 an error, explained in one line on standard error; 2 wrong usage; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from app.cli import (
    bench,
    chats,
    config,
    doctor,
    evaluate,
    export,
    manual,
    pull,
    quantize,
    run,
    running,
    serve,
    stored,
    tune_device,
)
from app.cli.errors import CliError, explained, in_one_line
from app.cli.output import NAME, at_a_terminal, prepare_streams, sanitize_streams

PIPE_STATUS = 141
"""Exit status when the reader of a pipe left: 128 and the number of SIGPIPE, as a shell reports it."""


class Commands(TyperGroup):
    """The commands; an error caused by the user or a file becomes one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            left_by_reader()
            raise typer.Exit(PIPE_STATUS) from None
        except explained() as error:
            print(f"{NAME}: {in_one_line(error)}", file=sys.stderr)
            raise typer.Exit(1) from error


app = typer.Typer(
    name=NAME,
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"{NAME} {version(NAME)}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def ui(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001  its callback does the work
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Chat with low-bit language models on this machine. Without a command: the terminal UI."""
    if ctx.invoked_subcommand is not None:
        return
    if not at_a_terminal():
        raise CliError("the terminal UI needs a terminal; in a pipe use: lowbit-chat run MODEL PROMPT")
    from app.tui import run as run_ui

    raise typer.Exit(run_ui())


app.command("run")(run.run)
app.command("pull")(pull.pull)
app.command("quantize")(quantize.quantize)
app.command("list")(stored.list_models)
app.command("ls", hidden=True)(stored.list_models)
app.command("show")(stored.show)
app.command("rm")(stored.remove)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("eval")(evaluate.evaluate)
app.command("bench")(bench.bench)
app.command("tune-device")(tune_device.tune_device)
app.command("doctor")(doctor.doctor)
app.command("ps")(running.ps)
app.command("stop")(running.stop)
app.command("man")(manual.man)
app.add_typer(chats.app, name="chats")
app.add_typer(config.app, name="config")


def main() -> None:
    """The command line of the `lowbit-chat` program."""
    prepare_streams()
    sanitize_streams()
    try:
        app(prog_name=NAME)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            left_by_reader()
            sys.exit(PIPE_STATUS)


def left_by_reader() -> None:
    """Discard the rest of the output silently after its reader has left, as `head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tune() -> None:
    """The `tune-device` program."""
    sys.argv[1:1] = ["tune-device"]
    main()
