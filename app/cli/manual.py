"""`lowbit-chat man`: the manual page, generated from `--help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from app.cli.output import NAME, Output

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILES = (
    ("settings.toml", "The settings; `lowbit-chat config path` prints where it is."),
    ("LOWBIT_CHAT_HOME", "A single folder for everything that the program writes."),
    ("LOWBIT_CHAT_KEY", "The setting KEY, in capitals; overrides the file, and is overridden by options."),
)


def man(ctx: typer.Context) -> None:
    """Print the manual page; `lowbit-chat man | man -l -` reads it."""
    assert ctx.parent is not None
    Output().text("\n".join(page(ctx.parent.command, ctx.parent)))


def page(command: Any, ctx: Any) -> Iterator[str]:
    """The page in roff, line by line."""
    yield f'.TH {NAME.upper()} 1 "" "{NAME}" "User Commands"'
    yield from (".SH NAME", rf"{NAME} \- chat with low-bit language models on this machine")
    yield from (".SH SYNOPSIS", f".B {NAME}", r"[\fICOMMAND\fR] [\fIOPTIONS\fR]")
    yield from (".SH DESCRIPTION", *_text(command.help or ""))
    yield ".SH COMMANDS"
    yield from _commands(command, ctx, NAME)
    yield ".SH ENVIRONMENT AND FILES"
    for name, words in _FILES:
        yield from (".TP", f".B {_escaped(name)}", *_text(words))
    yield from (
        ".SH EXIT STATUS",
        *_text("0; 1 for an error that is explained in one line; 2 for wrong usage; 130 for"),
    )
    yield from _text("Ctrl-C; 141 if the reader of a pipe left.")


def _commands(group: Any, ctx: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        own = type(ctx)(command, info_name=name, parent=ctx)
        if getattr(command, "commands", None):
            yield from (f".SS {path} {name}", *_text(command.help or ""))
            yield from _commands(command, own, f"{path} {name}")
            continue
        usage = " ".join(command.collect_usage_pieces(own))
        yield from (f".SS {path} {name} {_escaped(usage)}", *_text(command.help or ""))
        for parameter in command.params:
            if (record := parameter.get_help_record(own)) is not None:
                yield from (".TP", f".B {_escaped(record[0])}", *_text(record[1] or ""))


def _text(words: str) -> Iterator[str]:
    """Words as roff lines; escapes those that would be requests."""
    for line in words.splitlines():
        if line.strip():
            yield rf"\&{_escaped(line.strip())}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\e").replace("-", r"\-")
