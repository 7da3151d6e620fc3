"""Chat templates: format a conversation as the text that a model was trained on.

A template is untrusted code from the model's author, so it runs in jinja's sandbox, with the filters and functions that
templates on the hub expect (those of transformers). The sandbox does not limit time or memory: a separate process does
(`runtime.text.template_process`), and runs `serve`.
"""

from __future__ import annotations

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

from runtime.system.limits import limit_memory

MAX_BYTES = 512 << 20
"""Memory limit of the process, where the system supports one."""
MAX_CHARACTERS = 1 << 24
"""Most characters that a template may add to its input."""
_LONGEST_REASON = 300
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to a last message that is to be continued; the space reveals whether the template trims messages."""


class _Generation(Extension):
    """The `{% generation %}` tag, which marks what a model is trained on; here its contents are rendered as usual."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore, which a template could use to escape the sandbox."""

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
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation, ready for the assistant's answer.

    Args:
        template: A jinja template.
        messages: `{"role": ..., "content": ...}` with text contents; an assistant's may have `tool_calls`.
        tokens: Special tokens by their names in templates (`bos_token`, ...).
        continue_final: Whether the last message is to be continued rather than answered.
        tools: Functions that the model may call, in OpenAI's format.
        variables: Further variables of the template; those above go before.

    Raises:
        jinja2.TemplateError: the template is broken, or refuses these messages.
        ValueError: the template does not render the last message, so it cannot be continued.
    """
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    final = str(chat[-1]["content"])
    if continue_final:
        chat[-1]["content"] = final + _MARK
    own = {"messages": chat, "tools": list(tools) or None, "add_generation_prompt": not continue_final}
    text = _compiled(template).render({**(variables or {}), "documents": None, **own, **tokens})
    if not continue_final:
        return text
    place = text.rfind(_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError("it leaves out parts of the last message, which was to be continued")
    return text[:place] if text[place:].startswith(_MARK) else text[:place].rstrip()


def knows_tools(template: str) -> bool:
    """Whether a template renders the tools it is given.

    Raises:
        jinja2.TemplateError: it is broken.
    """
    return "tools" in find_undeclared_variables(_environment().parse(template))


def serve(seconds: float) -> None:
    """Serve requests on standard input, one JSON object a line, until it is closed.

    A request has `template`, and the arguments of `render`, unless it is for `knows_tools`. An answer has `said`, or
    `error`. A request that exceeds the time limit ends the process.

    Args:
        seconds: Time limit of a request.
    """
    limit_memory(MAX_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for line in sys.stdin.buffer:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            sys.stdout.buffer.write(_answer(line))
            sys.stdout.buffer.flush()
            faulthandler.cancel_dump_traceback_later()


def _answer(line: bytes) -> bytes:
    try:
        request = json.loads(line)
        said = knows_tools(request["template"]) if len(request) == 1 else render(**request)
        if isinstance(said, str) and len(said) > MAX_CHARACTERS + 2 * len(line):
            raise ValueError("the text that it writes is far longer than the messages")
        return json.dumps({"said": said}).encode() + b"\n"
    except MemoryError:
        return b'{"error": "it needs too much memory"}\n'
    except RecursionError:
        return b'{"error": "it is nested too deeply"}\n'
    except Exception as error:  # noqa: BLE001  # a template may raise anything
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
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005  # the user's local time
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
    """JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


if __name__ == "__main__":
    serve(float(sys.argv[1]))
