"""`lowbit-chat chats`: the chat history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli import options
from app.cli.output import CliError, Output, write_output
from app.language import _, ngettext

if TYPE_CHECKING:
    from app.history.store import History

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

SHORT = 8
"""Characters of an id to display; any unique prefix is accepted everywhere."""

Id = Annotated[
    str, typer.Argument(metavar="ID", help="A chat, by its id or a unique beginning of it.", show_default=False)
]


@app.callback(invoke_without_command=True)
def chats(ctx: typer.Context, as_json: options.Json = False) -> None:
    """List, search, export and import the chats of the terminal UI; without a command, list them."""
    if ctx.invoked_subcommand is None:
        list_chats(as_json=as_json)


@app.command("list")
def list_chats(as_json: options.Json = False) -> None:
    """List all chats: pinned ones first, then newest first."""
    from app.history.exchange import about

    output = Output(as_json=as_json)
    with _history() as history:
        listed = history.chats() if history else []
    if as_json:
        output.result({"chats": [about(chat) for chat in listed]})
        return
    rows = [("ID", _("LAST"), _("MODEL"), _("TITLE"))]
    rows += [
        (chat.id[:SHORT], f"{chat.updated:%Y-%m-%d %H:%M}", chat.model or "-", f"{'* ' * chat.pinned}{chat.title}")
        for chat in listed
    ]
    output.table(rows)


@app.command("search")
def search(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Words that a message must contain.")],
    as_json: options.Json = False,
) -> None:
    """Find messages that contain all words of TEXT, the last possibly incomplete; newest first."""
    from app.history.exchange import about

    output = Output(as_json=as_json)
    with _history() as history:
        matches = history.search(text) if history else []
    if as_json:
        entries = [{**about(one.chat), "message": one.message, "snippet": one.snippet} for one in matches]
        output.result({"found": entries})
        return
    output.table(
        [("ID", _("TITLE"), _("FOUND")), *((one.chat.id[:SHORT], one.chat.title, one.snippet) for one in matches)]
    )


@app.command("export")
def export(
    chat: Id,
    form: Annotated[
        Literal["md", "json"],
        typer.Option("--format", help="md: the branch on screen, for reading; json: every branch."),
    ] = "md",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write to instead of the screen.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print a chat, or write it to a file."""
    from app.history import exchange

    with _history() as history:
        if history is None:
            raise CliError(_("there is no chat {chat}: no chats are saved yet", chat=chat))
        kept = history.find(chat)
        messages = history.messages(kept.id)
    if form == "json" or as_json:
        content = json.dumps(exchange.document([exchange.to_json(kept, messages)]), ensure_ascii=False, indent=1) + "\n"
    else:
        content = exchange.to_markdown(kept, messages)
    if out is None:
        Output().stream(content)
    else:
        write_output(out, content.encode("utf-8"))
        Output().note(_("{title} written to {file}", title=kept.title, file=out))


@app.command("import")
def import_chats(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="From `chats export`, or ChatGPT's conversations.json.")],
    as_json: options.Json = False,
) -> None:
    """Import chats from a file; existing ones stay unchanged."""
    from app.history import exchange
    from app.history.store import History
    from app.paths import history_file

    output = Output(as_json=as_json)
    brought = exchange.read_file(file)
    history = History(history_file())
    try:
        new = exchange.import_chats(history, brought)
    finally:
        history.close()
    if as_json:
        output.result({"imported": len(new), "skipped": len(brought) - len(new)})
        return
    told = ngettext("{count} chat imported", "{count} chats imported", len(new))
    if skipped := len(brought) - len(new):
        told = _("{imported}; {count} were there already or empty", imported=told, count=skipped)
    output.note(told)


@contextmanager
def _history() -> Iterator[History | None]:
    """The history; None if there is none yet."""
    from app.history.store import History
    from app.paths import history_file

    if not history_file().is_file():
        yield None
        return
    history = History(history_file())
    try:
        yield history
    finally:
        history.close()
