"""Chat templates: format a conversation as the text that a model was trained on.

A template is untrusted code from the model's author, so it runs in jinja's sandbox, with the filters and functions that
templates on the hub expect (those of transformers). The sandbox does not limit time or memory: a separate process does
(`runtime.text.template_process`), which runs this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from runtime.system.child_process import serve

MAX_BYTES = 512 << 20
"""Memory limit of the process, where the system supports one."""
MAX_CHARACTERS = 1 << 24
"""Most characters that a template may add to its input."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's reasoning in templates: Qwen's and most others', gpt-oss's."""
_NINE = re.compile("[0-9A-Za-z]{9}")
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

    What a template refuses, and a later system message that it leaves out, is tried in the forms of `_forms`; then
    with tools as functions alone and arguments of calls as JSON texts (Apertus).

    Args:
        template: A jinja template.
        messages: `{"role": ..., "content": ...}` with text contents; an assistant's may have `tool_calls`, and
            `reasoning_content`, which the template gets by the name that it uses.
        tokens: Special tokens by their names in templates (`bos_token`, ...).
        continue_final: Whether the last message is to be continued rather than answered.
        tools: Functions that the model may call, in OpenAI's format.
        variables: Further variables of the template; those above go before.

    Raises:
        jinja2.TemplateError: the template is broken, or refuses these messages.
        ValueError: the template does not render the last message, so it cannot be continued.
    """
    thought = next((name for name in _THOUGHTS if name in template), None)
    chat = [_filled(message, thought) for message in messages]
    final = str(chat[-1]["content"])
    if continue_final:
        chat[-1]["content"] = final + _MARK
    values = {**(variables or {}), "documents": None, "add_generation_prompt": not continue_final, **tokens}
    begun = next((index for index, message in enumerate(chat) if message["role"] != "system"), len(chat))
    told = {message["content"].strip() for message in chat[begun:] if message["role"] == "system"}
    refusal: Exception | None = None
    partial: str | None = None
    for form, told_of in _attempts(chat, tools):
        try:
            text = _compiled(template).render({**values, "tools": told_of or None, "messages": form})
        except (TemplateError, TypeError) as error:
            refusal = refusal or error
            continue
        if all(one in text for one in told):
            break
        partial = partial or text
    else:
        if partial is None:
            raise refusal or TemplateError("it refuses them")
        text = partial
    if not continue_final:
        return text
    place = text.rfind(_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError("it leaves out parts of the last message, which was to be continued")
    return text[:place] if text[place:].startswith(_MARK) else text[:place].rstrip()


def _filled(message: Mapping[str, Any], thought: str | None) -> dict[str, Any]:
    """A message without empty fields, with its reasoning by the name of the template."""
    filled = {key: value for key, value in message.items() if value is not None and key != _THOUGHTS[0]}
    if thought is not None and message.get(_THOUGHTS[0]):
        filled[thought] = message[_THOUGHTS[0]]
    return filled


def _attempts(
    chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[list[dict[str, Any]], list[Mapping[str, Any]]]]:
    """The messages and tools to render, one after the other until a template takes them."""
    yield from ((form, list(tools)) for form in _forms(chat))
    if tools or any(message.get("tool_calls") for message in chat):
        functions = [tool.get("function", tool) for tool in tools]
        yield from ((form, functions) for form in _forms(list(map(_written, chat))))


def _written(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as texts."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _forms(chat: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """A conversation as it is, and as stricter templates take it.

    System messages at the beginning are one. Then, in turn: later system messages stand before the next user message,
    turns alternate, calls have ids of nine letters and digits; the first system message stands before the first user
    message, too.
    """
    own = list(chat)
    while len(own) > 1 and own[0]["role"] == own[1]["role"] == "system":
        own[:2] = [_merged(own[0], own[1])]
    yield own
    for first in (1, 0):
        strict = own[:first] if own[0]["role"] == "system" else []
        waiting: dict[str, Any] | None = None
        for message in own[len(strict) :]:
            if message["role"] == "system":
                waiting = message if waiting is None else _merged(waiting, message)
                continue
            message = _renamed(message)
            if waiting is not None and message["role"] == "user":
                message, waiting = _merged(waiting, message), None
            alike = strict and strict[-1]["role"] == message["role"] and message["role"] != "tool"
            if alike and not strict[-1].get("tool_calls"):
                message = _merged(strict.pop(), message)
            elif message["role"] == "assistant" and (not strict or strict[-1]["role"] == "system"):
                strict.append({"role": "user", "content": ""})
            strict.append(message)
        if waiting is not None:
            asked = strict.pop() if strict and strict[-1]["role"] == "user" else None
            waiting = {**waiting, "role": "user"}
            strict.append(waiting if asked is None else _merged(asked, waiting))
        yield strict


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two messages as one, of the role of the second."""
    texts = [text for text in (one["content"], other["content"]) if text]
    return {**one, **other, "content": "\n\n".join(texts)}


def _renamed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls, and the call that it answers, have ids of nine letters and digits."""

    def short(own: object) -> str:
        return own if isinstance(own, str) and _NINE.fullmatch(own) else sha256(str(own).encode()).hexdigest()[:9]

    renamed = dict(message)
    if calls := message.get("tool_calls"):
        renamed["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in calls]
    if message["role"] == "tool":
        renamed["tool_call_id"] = short(message.get("tool_call_id"))
    return renamed


def knows_tools(template: str) -> bool:
    """Whether a template renders the tools it is given.

    Raises:
        jinja2.TemplateError: it is broken.
    """
    return "tools" in find_undeclared_variables(_environment().parse(template))


def _answer(line: bytes) -> str | bool:
    """What the process says to a request: `template`, and the arguments of `render`, unless it is for `knows_tools`."""
    request = json.loads(line)
    said = knows_tools(request["template"]) if len(request) == 1 else render(**request)
    if isinstance(said, str) and len(said) > MAX_CHARACTERS + 2 * len(line):
        raise ValueError("the text that it writes is far longer than the messages")
    return said


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
    serve(_answer, memory=MAX_BYTES)
