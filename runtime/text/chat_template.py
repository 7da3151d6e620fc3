"""Chat templates: a conversation as the text that a model was trained on.

A template is a program of whoever made the model, so it runs in jinja's sandbox, with the filters and functions that
templates on the hub expect (those that transformers gives them). The sandbox does not limit time or memory: a process
of its own does that (`runtime.text.template_process`), and `serve` is what it runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_BYTES = 512 << 20
"""Memory that the process may map, where the system can limit it."""
MOST_CHARACTERS = 1 << 24
"""The most that a template may write beside what it is given."""
_LONGEST_REASON = 300
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands after a last message that is to be continued; the space shows whether the template trims messages."""


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; here its inside is text like any other."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, behind which a template could reach for more."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **values):
            _refuse_private(name)
        Namespace.__init__(self, *rest, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tokens: Mapping[str, str],
    continue_final: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The conversation as text, ready for the assistant's answer.

    Args:
        template: A jinja template.
        messages: `{"role": ..., "content": ...}`, content being text; an assistant's may have `tool_calls`.
        tokens: Special tokens by the names that a template knows (`bos_token`, ...).
        continue_final: Whether the last message is to be continued rather than answered.
        tools: Functions that the model may ask for, as OpenAI's interface writes them.

    Raises:
        jinja2.TemplateError: the template is broken, or refuses these messages.
        ValueError: the template does not write the last message down, so it cannot be continued.
    """
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    final = str(chat[-1]["content"])
    if continue_final:
        chat[-1]["content"] = final + _MARK
    text = _compiled(template).render(
        messages=chat, tools=list(tools) or None, documents=None, add_generation_prompt=not continue_final, **tokens
    )
    if not continue_final:
        return text
    place = text.rfind(_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError("it leaves out parts of the last message, which was to be continued")
    return text[:place] if text[place:].startswith(_MARK) else text[:place].rstrip()


def knows_tools(template: str) -> bool:
    """Whether a template writes down the tools that it is given.

    Raises:
        jinja2.TemplateError: it is broken.
    """
    return "tools" in find_undeclared_variables(_environment().parse(template))


def serve(seconds: float) -> None:
    """Answer the requests on standard input, a JSON object a line, until it is closed.

    A request has `template`, and the arguments of `render` unless it asks what `knows_tools` answers. An answer has
    `said`, or `error`. A request that takes too long ends the process, whatever it is busy with.

    Args:
        seconds: The longest that a request may take.
    """
    _limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that asks
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for line in sys.stdin.buffer:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            sys.stdout.buffer.write(_answer(line))
            sys.stdout.buffer.flush()
            faulthandler.cancel_dump_traceback_later()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limit, macOS refuses it
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def _answer(line: bytes) -> bytes:
    try:
        request = json.loads(line)
        said = knows_tools(request["template"]) if len(request) == 1 else render(**request)
        if isinstance(said, str) and len(said) > MOST_CHARACTERS + 2 * len(line):
            raise ValueError("the text that it writes is far longer than the messages")
        return json.dumps({"said": said}).encode() + b"\n"
    except MemoryError:
        return b'{"error": "it needs too much memory"}\n'
    except RecursionError:
        return b'{"error": "it is nested too deeply"}\n'
    except Exception as error:  # noqa: BLE001  # whatever a template does is its own fault
        return json.dumps({"error": str(error)[:_LONGEST_REASON] or repr(error)}).encode() + b"\n"


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005  # the person's own clock
        "dict": lambda *args, **values: dict(*args, **values),
        "namespace": _PlainNamespace,
    }
    return environment


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter escapes what HTML would."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


if __name__ == "__main__":
    serve(float(sys.argv[1]))
