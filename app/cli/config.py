"""`lowbit-chat config`: the settings."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.output import Output
from app.language import _

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def complete_key(incomplete: str) -> list[str]:
    from app.settings import RULES

    return [key for key in RULES if key.startswith(incomplete)]


Key = Annotated[str, typer.Argument(metavar="KEY", autocompletion=complete_key, show_default=False)]


@app.callback(invoke_without_command=True)
def config(ctx: typer.Context) -> None:
    """Show or change settings; without a command, show all. Environment variables LOWBIT_CHAT_* override the file."""
    if ctx.invoked_subcommand is not None:
        return
    from app.settings import RULES, load

    settings, output = load(), Output()
    rows = []
    for key, rule in RULES.items():
        value = _("(set)") if rule.secret and settings.get(key) else _shown(settings.get(key))
        rows.append((f"{key:<19}{value}", f"  {rule.meaning}"))
    output.fields(rows, 31)


@app.command("path")
def path() -> None:
    """Print the path of the settings file."""
    from app.paths import settings_file

    Output().text(str(settings_file()))


@app.command("get")
def get(key: Key) -> None:
    """Print one setting."""
    from app.settings import load, rule_of

    rule_of(key)
    Output().text(_shown(load().get(key)))


@app.command("set")
def set_value(
    key: Key, value: Annotated[str, typer.Argument(metavar="VALUE", help="auto: let the program choose.")]
) -> None:
    """Change one setting in the file."""
    from app.settings import save

    save({key: value})


def _shown(value: object) -> str:
    return "auto" if value is None else str(value)
