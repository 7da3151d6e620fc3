"""The commands that begin with a slash: one table, for `run` on a terminal and for the terminal UI's composer.

Each of the two has a method for every name of the table. What is not a command by `parse` is sent as text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from app.errors import CommandError, hint
from app.language import _
from app.settings import RULES

if TYPE_CHECKING:
    from app.chat.prompt_files import PromptFile
    from app.conversation import Conversation
    from app.history.exchange import ImportedChat
    from runtime.compensation import Exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command."""

    name: str
    """Without the slash."""
    help: str
    """In half a sentence."""
    argument: str = ""
    """Its argument as help shows it; empty if it takes none."""
    takes: Literal["", "model", "path", "budget", "setting"] = ""
    """What its argument is completed with."""
    aliases: tuple[str, ...] = ()
    prompt: PromptFile | None = None
    """What is sent in its place, if it is a prompt from a file."""

    @property
    def usage(self) -> str:
        """`/attach PATH`."""
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def line(self) -> str:
        """Its usage and its help, in columns."""
        from rich.cells import cell_len

        return f"{self.usage}{' ' * (18 - cell_len(self.usage))} {self.help}"


SETTINGS: Mapping[str, Callable[[str], object]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": lambda text: None if text == "auto" else int(text),
    "seed": lambda text: None if text == "auto" else int(text),
}
"""Sampling settings of `/set` with parsers of their values; `system` and `stop` take the text unchanged."""
SETTING_NAMES = ("system", "stop", *SETTINGS)
BUDGETS = ("off", "2.5", "5", "10", "20", "exact", "auto")
COMMANDS = (
    Command(
        name="model", argument=_("[NAME]"), takes="model", help=_("go on with another model; alone: which there are")
    ),
    Command(name="system", argument=_("[TEXT]"), help=_("this chat's system prompt; alone: the general one again")),
    Command(
        name="attach", argument=_("PATH"), takes="path", help=_("attach a document; a folder or a long one is searched")
    ),
    Command(name="tools", help=_("the tools that this chat may use")),
    Command(
        name="budget",
        argument=_("PERCENT"),
        takes="budget",
        help=_("how much slower compensation may make answers; off; or exact ones"),
    ),
    Command(
        name="set",
        argument=_("NAME VALUE"),
        takes="setting",
        help=_("this chat's {names}", names=", ".join(SETTING_NAMES)),
    ),
    Command(name="save", argument=_("FILE"), takes="path", help=_("write this chat to a Markdown file")),
    Command(name="load", argument=_("FILE"), takes="path", help=_("go on with a chat from a file")),
    Command(name="new", help=_("begin a new chat"), aliases=("clear",)),
    Command(name="show", help=_("the model and this chat's settings")),
    Command(name="stats", help=_("speed of the last answer")),
    Command(name="help", help=_("these commands"), aliases=("?",)),
    Command(name="bye", help=_("leave"), aliases=("quit", "exit")),
)
_NAMED = {name: one for one in COMMANDS for name in (one.name, *one.aliases)}


def known() -> list[Command]:
    """The commands of the table, and the prompts of files, which are read anew; no file takes a name of the table."""
    from app.chat.prompt_files import prompt_files

    files = [one for one in prompt_files() if one.name not in _NAMED]
    return [
        *COMMANDS,
        *(Command(name=one.name, argument=_("[TEXT]"), help=one.description, prompt=one) for one in files),
    ]


def parse(text: str) -> tuple[Command, str] | None:
    """The command of a text, and its argument; None if the text is to be sent. It looks into folders.

    A text is sent that begins with `//`, with a path of several parts, or with one that exists.

    Raises:
        CommandError: there is no such command, or it lacks its argument.
    """
    word, *others = text.strip().split(" ", 1)
    if not re.fullmatch(r"/([\w-]+|\?)", word) or (word[1:] not in _NAMED and os.path.exists(word)):  # noqa: PTH110  no error
        return None
    found = _NAMED.get(word[1:].lower())
    if found is None:
        named = {one.name: one for one in known()}
        found = named.get(word[1:].lower())
        if found is None:
            near = hint(word[1:], [*_NAMED, *named], _("/help lists them"), "/")
            raise CommandError(_("there is no command {word}; {near}", word=word, near=near))
    rest = "".join(others).strip()
    if not rest and found.argument and not found.argument.startswith("["):
        raise CommandError(_("use {usage}: {help}", usage=found.usage, help=found.help))
    return found, rest


def completions(text: str, models: Iterable[str]) -> list[tuple[str, str]]:
    """What a text that begins with a slash may become, each with its help. It looks into folders.

    Args:
        text: What was typed.
        models: Names of the models that there are.
    """
    word, space, rest = text.partition(" ")
    if not space:
        named = [one for one in known() if one.name.startswith(word[1:].lower())]
        return [(f"/{one.name}{' ' if one.argument else ''}", one.line) for one in named]
    takes = _NAMED[word[1:]].takes if word[1:] in _NAMED else ""
    if takes == "path":
        from app.documents.folders import names

        head = rest[: len(rest) - len(rest.rpartition(os.sep)[2])]
        return [(f"{word} {head}{name}", "") for name in names(rest)]
    found = {"model": models, "budget": BUDGETS, "setting": [f"{name} " for name in SETTING_NAMES]}.get(takes, ())
    return [(f"{word} {one}", "") for one in found if one.lower().startswith(rest.lower())]


def path_of(text: str) -> Path:
    """The path that was typed.

    Raises:
        CommandError: it names the folder of an unknown user.
    """
    try:
        return Path(text.strip("'\"")).expanduser().absolute()
    except RuntimeError as error:
        raise CommandError(f"{text}: {error}") from error


def budget_of(text: str) -> float | Exact | None:
    """The budget of `/budget`; None: the usual one.

    Raises:
        CommandError: it is none.
    """
    return cast("float | Exact | None", _read("budget", "0" if text == "off" else text, RULES["budget"].parse))


def with_setting(own: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A chat's own settings after `/set NAME VALUE`.

    Raises:
        CommandError: the name is unknown or the value invalid.
    """
    name, *others = text.split(" ", 1)
    value = "".join(others).strip()
    if name == "system":
        return with_system(own, value)
    if name == "stop":
        return {**own, "stop": value or None}
    if name in SETTINGS and value:
        return {**own, name: _read(name, value, SETTINGS[name])}
    raise CommandError(_("use /set NAME VALUE with one of: {names}", names=", ".join(SETTING_NAMES)))


def with_system(own: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A chat's own settings with another system prompt; empty: the general one."""
    others = {key: value for key, value in own.items() if key not in ("system_prompt", "preset")}
    return {**others, "system_prompt": text} if text else others


def _read(name: str, text: str, parse: Callable[[str], object]) -> object:
    """Parse a value, with the same range as elsewhere."""
    try:
        value = parse(text)
        return RULES[name].parse(value) if name in RULES else value
    except (ValueError, OverflowError):
        allowed = RULES[name].allowed if name in RULES else _("a number")
        raise CommandError(
            _("{name} can't be {text!r}; it must be {allowed}", name=name, text=text, allowed=allowed)
        ) from None


def save(conversation: Conversation, file: Path) -> None:
    """Write the branch on screen to a new Markdown file that only the user can read.

    Raises:
        CommandError: there is nothing to write, or the file can't be made.
    """
    from app.history import markdown
    from app.history.store import title_of

    path = [message for message in conversation.path() if message.state != "streaming"]
    if not path:
        raise CommandError(_("there is nothing to save yet"))
    try:
        with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as stream:
            stream.write(markdown.write(title_of(path[0].text), path))
    except FileExistsError:
        raise CommandError(_("{file} exists already: give another name", file=file)) from None
    except OSError as error:
        raise CommandError(_("{file} can't be written: {strerror}", file=file, strerror=error.strerror)) from error


def load(file: Path) -> ImportedChat:
    """The one chat of a file that `/save` or `lowbit-chat chats export` wrote, with new ids.

    Raises:
        CommandError: it has several.
        HistoryError: it can't be read.
    """
    from app.history import exchange

    found = exchange.read_file(file)
    if len(found) != 1 or not found[0].messages:
        raise CommandError(
            _(
                "{name} has {count} chats: `lowbit-chat chats import` takes all of them",
                name=file.name,
                count=len(found),
            )
        )
    return found[0].renewed()
