"""The parser's texts in another language than English: help, usage, and errors about options.

typer has its own copy of click, most of whose texts are fixed: they are replaced where they are written.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import typer

from app.language import _, use_for_parser
from app.printable import cells
from app.reports import reported

_SHOWN_BY_PARSER = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""The base of the parser's errors. Where it is defined differs between versions of typer."""
_ERROR = re.compile(r"^(?=Error: )", re.MULTILINE)
_CLOSING = "，。；：、！？）」》,.;:!?)"
"""What no line begins with."""


def in_users_language(group: Any, main: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the commands."""
    use_for_parser()
    for told in helps(group):
        told.help = _(told.help)
    group.context_class.formatter_class = _formatter(group.context_class.formatter_class)
    try:
        code = main(*args, **{**kwargs, "standalone_mode": False})
    except _SHOWN_BY_PARSER as error:
        shown: Any = error
        written = io.StringIO()
        shown.show(written)
        usage, *wrong = _ERROR.split(written.getvalue(), maxsplit=1)
        print(*map(reported, [*usage.splitlines(), *map(str.rstrip, wrong)]), sep="\n", file=sys.stderr)
        code = shown.exit_code
    except typer.Abort:
        print(_("Aborted!"), file=sys.stderr)
        code = 1
    sys.exit(code or 0)


def helps(command: Any) -> Iterator[Any]:
    """A command, its parameters, and all commands below it, as far as they have help."""
    seen = (command, *command.params)
    yield from (one for one in seen if getattr(one, "help", None))
    for below in getattr(command, "commands", {}).values():
        yield from helps(below)


def _formatter(known: Any) -> type[Any]:
    """A formatter of help that counts cells, made from the parser's own."""

    class Formatter(known):  # type: ignore[misc]
        def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
            prefix = _("Usage: {usage}", usage=prog) if prefix is None else f"{prefix}{prog}"
            self.write(_wrapped(f"{prefix} {args}", self.width, " " * (cells(prefix) + 1)) + "\n")

        def write_text(self, text: str) -> None:
            indent = " " * self.current_indent
            paragraphs = (" ".join(one.split()) for one in text.split("\n\n"))
            self.write("\n\n".join(indent + _wrapped(one, self.width, indent) for one in paragraphs) + "\n")

        def write_heading(self, heading: str) -> None:
            self.write(f"{'':>{self.current_indent}}{_('{heading}:', heading=heading)}\n")

        def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
            column = min(max(cells(first) for first, _help in rows), col_max) + col_spacing
            for first, told in rows:
                begin = " " * self.current_indent + first
                space = column + self.current_indent
                begin += "\n" + " " * space if cells(first) > column - col_spacing else " " * (space - cells(begin))
                self.write(
                    f"{begin}{_wrapped(_(told) if told else '', self.width, ' ' * space, space)}".rstrip() + "\n"
                )

    return Formatter


def _wrapped(text: str, width: int, indent: str, taken: int = 0) -> str:
    """A text in lines, broken at spaces or between characters that are two cells wide.

    Args:
        text: The text.
        width: Cells in a line.
        indent: What all lines but the first begin with.
        taken: Cells of the first line that are taken.
    """
    lines, line, used = list[str](), "", taken
    for piece in _pieces(text):
        if line and used + cells(piece.rstrip()) > width:
            lines.append(line.rstrip())
            line, used = "", cells(indent)
        line += piece
        used += cells(piece)
    return f"\n{indent}".join([*lines, line.rstrip()])


def _pieces(text: str) -> Iterable[str]:
    """What stays on one line: words with the spaces behind them, and wide characters with what closes a clause."""
    piece = ""
    for letter, following in zip(text, text[1:] + " ", strict=True):
        piece += letter
        ends = letter == " " or cells(letter) == 2 or cells(following) == 2
        if ends and following not in _CLOSING and following != " ":
            yield piece
            piece = ""
    yield piece
