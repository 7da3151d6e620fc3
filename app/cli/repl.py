"""Interactive conversation of `lowbit-chat run MODEL` on a terminal."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.output import CliError, Output
from app.cli.serve import result_of
from models.files import private_folder
from runtime.errors import byte_count

if TYPE_CHECKING:
    from app.cli.talk import Talk

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
PASTE_S = 0.05
"""Lines that arrive closer together than this are pasted, not typed."""

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
        talk: The conversation; its runtime is a `LocalRuntime`.
        output: Gets the answers and notes.
        note: What the user should know of the model's tokenizer.
        read: Shows a prompt and returns the user's line; raises EOFError at the end.
    """

    def __init__(
        self, talk: Talk, output: Output, *, note: str | None = None, read: Callable[[str], str] | None = None
    ) -> None:
        self._talk, self._output, self._note = talk, output, note
        self._read = read or _typed_line
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
        self._output.note(f"{self._talk.status.model}; /help lists the commands, /bye leaves")
        if self._note and not self._talk.raw:
            self._output.note(self._note)
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
        """Read one line, or several that were pasted or stand between triple quotes."""
        line = self._read(">>> ")
        if not line.lstrip().startswith(_FENCE):
            lines = [line]
            with suppress(EOFError):
                while not line.lstrip().startswith("/") and _more_is_pasted():
                    lines.append(self._read("... "))
            return "\n".join(lines)
        lines = [line.lstrip().removeprefix(_FENCE)]
        while _FENCE not in lines[-1]:
            lines.append(self._read("... "))
        lines[-1] = lines[-1].partition(_FENCE)[0]
        return "\n".join(lines)

    def _answer(self, text: str) -> None:
        talk = self._talk
        if result_of(talk.ask(text))[-1].state == "stopped":
            self._output.note("stopped")
        elif talk.ending:
            self._output.note(f"{talk.ending}; /clear empties it" if talk.cut else talk.ending)

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        value = value.strip()
        if name == "system":
            self._talk.choose("system_prompt", value)
        elif name == "stop":
            self._talk.choose("stop", (value,) if value else None)
        elif name in _KINDS and value:
            self._talk.choose(name, _read_setting(name, value))
        else:
            raise CliError(f"use /set NAME VALUE with one of: {', '.join(_names())}")

    def _show(self, _rest: str) -> None:
        talk, status = self._talk, self._talk.status
        sampling = {**(status.sampling or {}), **talk.sampling()}
        rows = [
            ("model", status.model or ""),
            ("backend", f"{status.backend} ({status.reason})"),
            ("kv", f"{status.kv}, {byte_count(status.kv_bytes or 0)}"),
            ("context", f"{status.context} tokens"),
            ("system", talk.system_prompt or "none"),
            ("stop", " ".join(map(repr, sampling.get("stop") or ())) or "none"),
            ("tools", " ".join(talk.tools) or "none"),
            *((name, _value(sampling.get(name))) for name in _KINDS),
        ]
        for name, value in rows:
            self._output.text(f"{name:<20}{value}")

    def _attach(self, rest: str) -> None:
        if not rest or self._talk.raw:
            raise CliError("--raw reads no documents" if rest else "use /attach PATH with a file or folder")
        result_of(self._talk.attach(Path(rest.strip("'\"")).expanduser().absolute()))

    def _clear(self, _rest: str) -> None:
        self._talk.conversation.head = None

    def _stats(self, _rest: str) -> None:
        timings = self._talk.timings
        if timings is None:
            raise CliError("there is no answer yet")
        used = timings.prompt_tokens + timings.completion_tokens
        self._output.text(
            f"first token after {timings.ttft_s:.2f} s, {timings.decode_tokens_per_s:.1f} tokens/s; "
            f"{timings.prompt_tokens} prompt tokens ({timings.cached_tokens} reused), "
            f"{timings.completion_tokens} generated; context {used} of {self._talk.status.context}"
        )
        if (drafted := timings.speculation) is not None:
            does = f"{drafted.gamma} tokens drafted per round" if drafted.gamma else "speculation does not pay here"
            accepted = f"{100 * drafted.acceptance_rate:.0f} % accepted"
            self._output.text(f"{does}; {accepted}, {drafted.tokens_per_verify:.1f} tokens per verify")

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
        raise CliError(f"{name} can't be {text!r}; it must be {allowed}") from None


def _names() -> list[str]:
    return ["system", "stop", *_KINDS]


def _value(value: object) -> str:
    return "auto" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _typed_line(prompt: str) -> str:
    """Read a line from the terminal, with line editing if Python supports it."""
    if sys.platform != "win32":
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return input(prompt)


def _more_is_pasted() -> bool:
    """Whether the line just read was followed at once by more, as in a paste that the terminal does not mark."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        return False
    return bool(select.select([sys.stdin], [], [], PASTE_S)[0])


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
