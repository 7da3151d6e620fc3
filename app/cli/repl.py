"""Interactive conversation of `lowbit-chat run MODEL` on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.amounts import byte_count
from app.cli.errors import CliError
from app.cli.interrupt import Interrupt
from app.cli.output import Output
from models.files import private_folder

if TYPE_CHECKING:
    from app.cli.attachments import Attachments
    from app.cli.tools import RunTools
    from runtime.engine.engine import Engine
    from runtime.engine.generation import Usage
    from runtime.text.sampling import SamplingOptions

HELP = """\
/set NAME VALUE   change a setting: {names}
/show             show the model and the settings
/attach PATH      attach a document; a folder or a long one is searched
/clear            forget the conversation
/stats            speed of the last answer
/bye              leave (also Ctrl-D)
\"\"\"               begin and end a text of several lines
Ctrl-C            stop the answer"""

LINES_KEPT = 1000
"""Lines saved for the next conversation."""
_FENCE = '"""'

_KINDS: Mapping[str, Callable[[str], object]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": lambda text: None if text == "auto" else int(text),
    "seed": lambda text: None if text == "auto" else int(text),
}
"""Sampling settings with parsers of their values; `system` and `stop` take the text unchanged."""


class Repl:
    """An interactive conversation.

    Args:
        engine: The loaded model.
        sampling: Initial sampling options, changed by `/set`.
        attachments: The documents, to which `/attach` adds.
        tools: The tools that the model may call.
        variables: Further variables of the chat template.
        system: The system prompt; empty for none.
        raw: Whether each line is continued as plain text, without a chat template.
        read: Shows a prompt and returns the user's line; raises EOFError at the end.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingOptions,
        attachments: Attachments,
        tools: RunTools,
        variables: Mapping[str, bool | str] | None = None,
        *,
        system: str = "",
        raw: bool = False,
        read: Callable[[str], str] | None = None,
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._attachments = attachments
        self._tools = tools
        self._variables = variables
        self._system = system
        self._raw = raw
        self._read = read or _typed_line
        self._output = Output()
        self._messages: list[Mapping[str, Any]] = []
        self._usage: Usage | None = None
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/set": self._set,
            "/show": self._show,
            "/attach": self._attach,
            "/clear": self._clear,
            "/stats": self._stats,
            "/help": self._help,
            "/?": self._help,
        }

    def loop(self) -> None:
        """Run until `/bye` or the end of the input."""
        self._output.note(f"{self._engine.name}; /help lists the commands, /bye leaves")
        if self._engine.tokenizer.note and not self._raw:
            self._output.note(self._engine.tokenizer.note)
        while True:
            try:
                text = self._text()
            except EOFError:
                self._output.text()
                return
            except KeyboardInterrupt:
                self._output.text()
                self._output.note("/bye or Ctrl-D leaves")
                continue
            if text.strip() == "/bye":
                return
            self._handle(text)

    def _handle(self, text: str) -> None:
        """Run a command or answer a text; errors are shown and the conversation continues."""
        from app.errors import DocumentError
        from runtime.errors import RuntimeFailure

        word, _, rest = text.strip().partition(" ")
        try:
            if word.startswith("/"):
                if word not in self._commands:
                    raise CliError(f"there is no command {word}; /help lists them")
                self._commands[word](rest.strip())
            elif word:
                self._answer(text)
        except (CliError, DocumentError, RuntimeFailure) as error:
            self._output.note(str(error))

    def _text(self) -> str:
        """Read one line, or several between triple quotes."""
        line = self._read(">>> ")
        if not line.lstrip().startswith(_FENCE):
            return line
        lines = [line.lstrip().removeprefix(_FENCE)]
        while _FENCE not in lines[-1]:
            lines.append(self._read("... "))
        lines[-1] = lines[-1].partition(_FENCE)[0]
        return "\n".join(lines)

    def _answer(self, text: str) -> None:
        from app.cli.tools import continued, converse

        told, passages = (text, None) if self._raw else self._attachments.prompt(text)
        sampling, show = self._sampling, self._output.stream
        with Interrupt() as interrupt:
            if self._raw:
                found = continued(self._engine, text, sampling, interrupt.cancelled, show)
            else:
                system = [{"role": "system", "content": self._system}] if self._system else []
                asked = [*system, *self._messages, {"role": "user", "content": told}]
                found = converse(self._engine, asked, sampling, interrupt.cancelled, show, self._tools, self._variables)
                self._messages = list(found.messages[len(system) :])
        piece = found.last
        self._output.text()
        self._attachments.tell(passages)
        self._usage = piece.usage
        if piece.finish_reason == "cancelled":
            self._output.note("stopped")
        elif piece.finish_reason == "length" and sampling.max_tokens is None:
            self._output.note(
                f"the answer was cut: the context of {self._engine.context} tokens is full; /clear empties it"
            )

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        value = value.strip()
        if name == "system":
            self._system = value
        elif name == "stop":
            self._sampling = replace(self._sampling, stop=(value,) if value else ())
        elif name in _KINDS and value:
            change = _read_setting(name, value)
            self._sampling = replace(self._sampling, **{name: change})  # type: ignore[arg-type]  # parsed to the field's type
        else:
            raise CliError(f"use /set NAME VALUE with one of: {', '.join(_names())}")

    def _show(self, _rest: str) -> None:
        decoder = self._engine.decoder
        rows = [
            ("model", self._engine.name),
            ("backend", f"{decoder.backend} ({self._engine.reason})"),
            ("kv", f"{decoder.options.kv}, {byte_count(decoder.kv_bytes)}"),
            ("context", f"{self._engine.context} tokens"),
            ("system", self._system or "none"),
            ("stop", " ".join(map(repr, self._sampling.stop)) or "none"),
            ("tools", " ".join(self._tools.named) or "none"),
            *((name, _value(getattr(self._sampling, name))) for name in _KINDS),
        ]
        for name, value in rows:
            self._output.text(f"{name:<20}{value}")

    def _attach(self, rest: str) -> None:
        if not rest or self._raw:
            raise CliError("--raw reads no documents" if rest else "use /attach PATH with a file or folder")
        self._attachments.add(Path(rest.strip("'\"")))

    def _clear(self, _rest: str) -> None:
        self._messages = []

    def _stats(self, _rest: str) -> None:
        usage = self._usage
        if usage is None:
            raise CliError("there is no answer yet")
        used = usage.prompt_tokens + usage.completion_tokens
        self._output.text(
            f"first token after {usage.ttft_s:.2f} s, {usage.decode_tokens_per_s:.1f} tokens/s; "
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} reused), {usage.completion_tokens} generated; "
            f"context {used} of {self._engine.context}"
        )
        if usage.speculation is not None:
            found = usage.speculation
            does = f"{found.gamma} tokens drafted per round" if found.gamma else "speculation does not pay here"
            self._output.text(
                f"{does}; {100 * found.acceptance_rate:.0f} % accepted, {found.tokens_per_verify:.1f} tokens per verify"
            )

    def _help(self, _rest: str) -> None:
        self._output.text(HELP.format(names=", ".join(_names())))


def _read_setting(name: str, text: str) -> object:
    """Parse a value of `/set`, with the same range as elsewhere.

    Raises:
        CliError: it is invalid.
    """
    from app.settings import RULES

    try:
        value = _KINDS[name](text)
        return RULES[name].parse(value) if name in RULES else value
    except (ValueError, OverflowError):
        allowed = RULES[name].allowed if name in RULES else "a number"
        raise CliError(f"{name} can't be {text!r}; allowed: {allowed}") from None


def _names() -> list[str]:
    return ["system", "stop", *_KINDS]


def _value(value: object) -> str:
    return "auto" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _typed_line(prompt: str) -> str:
    """Read a line from the terminal, with line editing if Python supports it."""
    if sys.platform != "win32":
        import readline  # noqa: F401  enables line editing in input()
    return input(prompt)


@contextmanager
def line_history(file: Path) -> Iterator[None]:
    """Context manager: the arrow keys recall lines of earlier conversations, from a private file.

    Args:
        file: The file. If it cannot be read or written, nothing is saved.
    """
    if sys.platform == "win32":
        yield
        return
    import readline

    readline.clear_history()
    readline.set_history_length(LINES_KEPT)
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        with suppress(OSError):
            private_folder(file.parent)
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(file)
