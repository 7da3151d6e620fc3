"""The `lowbit-chat` command: its commands, and the exit codes of errors.

Exit codes: 0 done; 1 an error, explained in one line on standard error; 2 wrong usage; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from app.cli import bench, chats, config, doctor, evaluate, launch, models, run, serve, tune_device
from app.cli.output import (
    NAME,
    CliError,
    Output,
    at_a_terminal,
    explained,
    in_one_line,
    prepare_streams,
    sanitize_streams,
)
from app.language import _, english

if TYPE_CHECKING:
    from collections.abc import Iterator


_FILES = (
    ("settings.toml", _("The settings; `lowbit-chat config path` prints where it is.")),
    ("LOWBIT_CHAT_HOME", _("A single folder for everything that the program writes.")),
    ("LOWBIT_CHAT_KEY", _("The setting KEY, in capitals; overrides the file, and is overridden by options.")),
)
PIPE_STATUS = 141
"""Exit status when the reader of a pipe left: 128 and the number of SIGPIPE, as a shell reports it."""


def man(ctx: typer.Context) -> None:
    """Print the manual page; `lowbit-chat man | man -l -` reads it."""
    assert ctx.parent is not None
    Output().text("\n".join(page(ctx.parent.command, ctx.parent)))


def page(command: Any, ctx: Any) -> Iterator[str]:
    """The page in roff, line by line."""
    yield f'.TH {NAME.upper()} 1 "" "{NAME}" "{_("User Commands")}"'
    yield from (f".SH {_('NAME')}", rf"{NAME} \- {_('chat with low-bit language models on this machine')}")
    yield from (f".SH {_('SYNOPSIS')}", f".B {NAME}", r"[\fICOMMAND\fR] [\fIOPTIONS\fR]")
    yield from (f".SH {_('DESCRIPTION')}", *_text(command.help or ""))
    yield f".SH {_('COMMANDS')}"
    yield from _commands(command, ctx, NAME)
    yield f".SH {_('ENVIRONMENT AND FILES')}"
    for name, words in _FILES:
        yield from (".TP", f".B {_escaped(name)}", *_text(words))
    yield f".SH {_('EXIT STATUS')}"
    yield from _text(
        _(
            "0; 1 for an error that is explained in one line; 2 for wrong usage; 130 for\n"
            "Ctrl-C; 141 if the reader of a pipe left."
        )
    )


def _commands(group: Any, ctx: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        context = type(ctx)(command, info_name=name, parent=ctx)
        if getattr(command, "commands", None):
            yield from (f".SS {path} {name}", *_text(command.help or ""))
            yield from _commands(command, context, f"{path} {name}")
            continue
        usage = " ".join(command.collect_usage_pieces(context))
        yield from (f".SS {path} {name} {_escaped(usage)}", *_text(command.help or ""))
        for parameter in command.params:
            if (record := parameter.get_help_record(context)) is not None:
                yield from (".TP", f".B {_escaped(record[0])}", *_text(record[1] or ""))


def _text(words: str) -> Iterator[str]:
    """Words as roff lines; escapes those that would be requests."""
    for line in words.splitlines():
        if line.strip():
            yield rf"\&{_escaped(line.strip())}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\e").replace("-", r"\-")


class Group(TyperGroup):
    """Commands that are listed with the whole first sentence of their help, however long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for command in self.commands.values():
            command.short_help = re.split(r"\.\s|\.$|。", command.help or "")[0]
        super().format_commands(ctx, formatter)


class Commands(Group):
    """The commands; an error caused by the user or a file becomes one line and exit code 1."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Parse and run. The parser's own texts, and those that were given to it, are in the user's language."""
        if english():
            return super().main(*args, **kwargs)
        from app.cli.parser import in_users_language

        return in_users_language(self, super().main, *args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
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
        raise CliError(_("the terminal UI needs a terminal; in a pipe use: lowbit-chat run MODEL PROMPT"))
    from app.tui import run as run_ui

    raise typer.Exit(run_ui())


app.command("run")(run.run)
app.command("pull")(models.pull)
app.command("quantize")(models.quantize)
app.command("list")(models.list_models)
app.command("ls", hidden=True)(models.list_models)
app.command("show")(models.show)
app.command("verify")(models.verify)
app.command("rm")(models.remove)
app.command("export")(models.export)
app.command("serve")(serve.serve)
app.command("launch", context_settings={"allow_interspersed_args": False})(launch.launch)
app.command("eval")(evaluate.evaluate)
app.command("bench")(bench.bench)
app.command("tune-device")(tune_device.tune_device)
app.command("doctor")(doctor.doctor)
app.command("ps")(serve.ps)
app.command("stop")(serve.stop)
app.command("man")(man)
app.add_typer(chats.app, name="chats", cls=Group)
app.add_typer(config.app, name="config", cls=Group)


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
