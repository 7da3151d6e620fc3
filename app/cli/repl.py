"""Interactive conversation of `lowbit-chat run MODEL` on a terminal."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from app.amounts import byte_count
from app.chat.commands import (
    SETTINGS,
    budget_of,
    completions,
    known,
    load,
    parse,
    path_of,
    save,
    with_setting,
    with_system,
)
from app.cli.output import CliError, Output, in_one_line, plain
from app.cli.serve import result_of
from app.conversation import DRAFTS, Conversation
from app.errors import CommandError
from app.language import _, ngettext, number
from app.reports import reported
from models.files import private_folder
from runtime.wire.answers import CONTINUES

if TYPE_CHECKING:
    from app.cli.talk import Talk
    from runtime.compensation import Exact

KEYS = (
    ('"""', _("begin and end a text of several lines")),
    ("Ctrl-C", _("stop the answer; Tab completes a command")),
)
"""What helps besides commands."""

LINES_KEPT = 1000
"""Lines saved for the next conversation."""
_FENCE = '"""'
PASTE_S = 0.05
"""Lines that arrive closer together than this are pasted, not typed."""


class Repl:
    """An interactive conversation.

    Args:
        talk: The conversation; its runtime is a `LocalRuntime`.
        output: Gets the answers and notes.
        models: Names of the models that there are.
        change: Loads a model, or the present one with a budget in percent, in place of the present one.
        read: Shows a prompt and returns the user's line; raises EOFError at the end.
    """

    def __init__(
        self,
        talk: Talk,
        output: Output,
        *,
        models: Callable[[], Sequence[str]] = tuple,
        change: Callable[[str | None, float | Exact | None], None] | None = None,
        read: Callable[[str], str] | None = None,
    ) -> None:
        self._talk, self._output = talk, output
        self._models, self._change = models, change
        self._read = read or self._typed_line
        self._ways: list[str] = []

    def loop(self) -> None:
        """Run until `/bye` or the end of the input."""
        self._output.note(_("{model}; /help lists the commands, /bye leaves", model=self._talk.status.model))
        while True:
            try:
                text = self._text()
            except EOFError:
                self._output.text()
                return
            except KeyboardInterrupt:
                self._output.text()
                self._output.note(_("/bye or Ctrl-D leaves"))
                continue
            if not self._handle(text):
                return

    def _handle(self, text: str) -> bool:
        """Run a command or answer a text; errors are shown and the conversation continues. False ends it."""
        from app.errors import DocumentError, HistoryError
        from models.errors import ModelError
        from runtime.errors import RuntimeFailure

        try:
            if (found := parse(text)) is not None:
                command, argument = found
                if command.name == "bye":
                    return False
                if command.prompt is not None:
                    self._answer(command.prompt.text(argument))
                    return True
                getattr(self, f"_{command.name}")(argument)
            elif text.strip():
                self._answer(text)
        except (CliError, CommandError, DocumentError, HistoryError, ModelError, RuntimeFailure) as error:
            self._output.note(in_one_line(error))
        return True

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
            self._output.note(_("stopped"))
        elif talk.ending:
            self._output.note(_("{ending}; /new empties it", ending=talk.ending) if talk.cut else talk.ending)

    def _model(self, name: str) -> None:
        if name:
            self._other(name, None)
            return
        for one in self._models():
            self._output.text(f"{'*' if one == self._talk.status.model else ' '} {one}")

    def _budget(self, percent: str) -> None:
        self._other(None, budget_of(percent))

    def _other(self, name: str | None, budget: float | Exact | None) -> None:
        if self._change is None:
            raise CommandError(_("the model can't be changed here"))
        try:
            self._change(name, budget)
        except KeyboardInterrupt:
            raise CommandError(_("stopped; {model} is back", model=self._talk.status.model)) from None
        status = self._talk.status
        told = _("{model} answers from here on", model=status.model)
        self._output.note(_("{told}; it is {kind}", told=told, kind=_(CONTINUES)) if status.base else told)

    def _system(self, text: str) -> None:
        self._talk.choose(with_system(self._talk.own, text))

    def _set(self, rest: str) -> None:
        self._talk.choose(with_setting(self._talk.own, rest))

    def _tools(self, _rest: str) -> None:
        self._output.text(" ".join(self._talk.tools) or _("none; --mcp FILE offers the tools of a file"))

    def _save(self, file: str) -> None:
        path = path_of(file)
        save(self._talk.conversation, path)
        self._output.note(_("written to {file}", file=path))

    def _load(self, file: str) -> None:
        if self._talk.raw:
            raise CommandError(_("--raw continues plain text, which is no chat"))
        found, conversation = load(path_of(file)), Conversation()
        conversation.restore(found.id, found.messages, found.head)
        self._talk.go_on(conversation)
        self._output.note(
            ngettext(
                "{title}: {count} message", "{title}: {count} messages", len(conversation.path()), title=found.title
            )
        )

    def _show(self, _rest: str) -> None:
        talk, status = self._talk, self._talk.status
        sampling = {**(status.sampling or {}), **talk.sampling()}
        rows = [
            (_("model"), status.model or ""),
            (_("backend"), f"{status.backend} ({reported(status.reason or '')})"),
            ("kv", f"{status.kv}, {byte_count(status.kv_bytes or 0)}"),
            (_("context"), _("{count} tokens", count=status.context)),
            (_("system"), talk.system_prompt or _("none")),
            ("stop", " ".join(map(repr, sampling.get("stop") or ())) or _("none")),
            (_("tools"), " ".join(talk.tools) or _("none")),
            *((name, _value(sampling.get(name))) for name in SETTINGS),
        ]
        self._output.fields(rows, 20)

    def _attach(self, rest: str) -> None:
        if self._talk.raw:
            raise CommandError(_("--raw reads no documents"))
        result_of(self._talk.attach(path_of(rest)))

    def _new(self, _rest: str) -> None:
        self._talk.begin()

    def _stats(self, _rest: str) -> None:
        timings = self._talk.timings
        if timings is None:
            raise CliError(_("there is no answer yet"))
        used = timings.prompt_tokens + timings.completion_tokens
        self._output.text(
            _(
                "first token after {ttft:.2f} s, {speed:.1f} tokens/s; {prompt} prompt tokens ({cached} reused), "
                "{generated} generated; context {used} of {context}",
                ttft=timings.ttft_s,
                speed=timings.decode_tokens_per_s,
                prompt=timings.prompt_tokens,
                cached=timings.cached_tokens,
                generated=timings.completion_tokens,
                used=used,
                context=self._talk.status.context,
            )
        )
        if (drafted := timings.speculation) is not None:
            gamma, drafts = drafted.gamma, DRAFTS.get(drafted.source or "", _("drafts"))
            self._output.text(
                _(
                    "{does}; {rate:.0f} % of {drafts} accepted, {tokens:.1f} tokens per verify",
                    does=_("{count} tokens drafted per round", count=gamma)
                    if gamma
                    else _("speculation does not pay here"),
                    rate=100 * drafted.acceptance_rate,
                    drafts=drafts,
                    tokens=drafted.tokens_per_verify,
                )
            )

    def _help(self, _rest: str) -> None:
        for one in known():
            self._output.text(one.line)
        self._output.fields(KEYS, 19)

    def _typed_line(self, prompt: str) -> str:
        """Read a line from the terminal, with line editing and completion if Python supports it."""
        if sys.platform != "win32" and not plain():
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
            libedit = "libedit" in (readline.__doc__ or "")
            readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
            readline.set_completer_delims("")
            readline.set_completer(self._completed)
        return input(prompt)

    def _completed(self, text: str, number: int) -> str | None:
        """The line completed in one of several ways; None: there are no more. Readline calls it with 0, 1, …."""
        if number == 0:
            self._ways = [way for way, _ in completions(text, self._models())] if text.startswith("/") else []
        return self._ways[number] if number < len(self._ways) else None


def _value(value: object) -> str:
    return "auto" if value is None else number(value, "g") if isinstance(value, float) else str(value)


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
    if sys.platform == "win32" or plain():  # line editing draws again
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
