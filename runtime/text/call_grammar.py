"""Grammars of tool calls: of an answer that must call, and of the calls in an answer that may.

In an answer that may call, nothing is constrained until the model begins a call in its family's format. From there on,
the name and the arguments are, to the end of the call; then the model is free again (`runtime.text.call_constraint`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import RequestError
from runtime.text.constraint import ANY_OBJECT, COMPACT, MAX_CHARACTERS, Grammar
from runtime.text.enforceable import TOO_MUCH, Enforceable, enforceable
from runtime.text.tool_calls import CallFormat, Tool, written_rules

MOST_CALLS = 16
"""Most calls in a row. A small model may otherwise never stop calling."""
MOST_STOPPED = 2
"""Schemas that may take too much time before the rest of a request's tools is not looked at."""
_SPACES = re.compile(r"([ \n]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What an answer may call, or must."""

    tools: tuple[Tool, ...]
    arguments: tuple[Mapping[str, Any], ...]
    """The enforceable schema of each tool's arguments."""
    relaxed: Mapping[str, tuple[str, ...]]
    """By tool, the places of its schema that no grammar can enforce; only of tools that have any."""
    required: bool = False
    """Whether the answer must be a call."""
    several: bool = True
    """Whether it may have several calls."""

    @classmethod
    def of(cls, tools: Sequence[Tool], *, required: bool, several: bool = True) -> CallRules:
        """The rules of these tools. Reading large schemas takes a while: call it in a worker thread.

        Raises:
            RequestError: a strict tool has parameters that cannot be enforced.
        """
        enforced: list[Enforceable] = []
        for tool in tools:
            patient = enforced.count(TOO_MUCH) < MOST_STOPPED
            enforced.append(enforceable(tool.parameters) if patient else TOO_MUCH)
        rules = cls._of(tools, enforced, required=required, several=several)
        try:
            rules.answer(CallFormat(), {}).checked("tools' schemas")  # each is fine, but all of them may not be
        except RequestError:
            rules = cls._of(tools, [TOO_MUCH] * len(tools), required=required, several=several)
        for tool in tools:
            if tool.strict and (places := rules.relaxed.get(tool.name)):
                raise RequestError(f"the parameters of {tool.name} cannot be enforced: {', '.join(places)}")
        return rules

    @classmethod
    def _of(cls, tools: Sequence[Tool], found: Sequence[Enforceable], *, required: bool, several: bool) -> CallRules:
        return cls(
            tools=tuple(tools),
            arguments=tuple(one.schema for one in found),
            relaxed={tool.name: one.relaxed for tool, one in zip(tools, found, strict=True) if one.relaxed},
            required=required,
            several=several,
        )

    @property
    def fewest(self) -> int:
        """Most arguments that any of the tools requires."""
        lists = (kind.get("required") for kind in self.arguments)
        return max((len(one) for one in lists if isinstance(one, list)), default=0)

    def answer(self, form: CallFormat, tokens: Mapping[str, int], *, loose: bool = False) -> Grammar:
        """The grammar of an answer that is nothing but calls.

        Args:
            form: The model's format.
            tokens: The tokenizer's added tokens by their texts.
            loose: Whether arguments may be any object, because the schemas turned out too complex.
        """
        last = MOST_CALLS - 1 if self.several and form.between else 0
        more = f"({_literal(form.between)} call){{0,{last}}}" if last else ""
        start = f"start: {_literal(form.mark)} {_literal(form.begin)} call {more} {_literal(form.end)}"
        return self._grammar(start, form, tokens, loose=loose)

    def calls(self, form: CallFormat, tokens: Mapping[str, int], *, loose: bool = False) -> Grammar:
        """The grammar of an answer from the beginning of its first call on.

        Args:
            form: The model's format.
            tokens: The tokenizer's added tokens by their texts.
            loose: Whether arguments may be any object, because the schemas turned out too complex.
        """
        if not form.mark:
            return self._grammar("start: SPACE call\nSPACE: /[ \\n]{0,4}/", form, tokens, loose=loose)
        last = MOST_CALLS - 1 if self.several and form.between else 0
        more = f"({_flexible(form.between)} call){{0,{last}}}" if last else ""
        lines = [
            f"start: tag{{1,{MOST_CALLS}}} TEXT" if self.several else "start: tag",
            f"tag: head {_flexible(form.begin)} call {more} {_flexible(form.end)}",
            f"head[lazy]: TEXT {_literal(form.mark)}",
            "TEXT: /(.|\\n)*/",
            "SPACE: /[ \\n]{0,4}/",
        ]
        return self._grammar("\n".join(lines), form, tokens, loose=loose)

    def _grammar(self, start: str, form: CallFormat, tokens: Mapping[str, int], *, loose: bool = False) -> Grammar:
        start = _with_tokens(start, tokens)
        if form.style != "json":
            kinds_of = [ANY_OBJECT if loose else kind for kind in self.arguments]
            text = _with_tokens("\n".join(written_rules(self.tools, kinds_of, form.style)), tokens)
            if len(text) > MAX_CHARACTERS // 2 and not loose:
                return self._grammar(start, form, tokens, loose=True)
            return Grammar.unchecked(f"%llguidance {{}}\n{start}\n{text}\n")
        kinds = [
            _call(tool, ANY_OBJECT if loose else kind, form)
            for tool, kind in zip(self.tools, self.arguments, strict=True)
        ]
        text = json.dumps({"anyOf": kinds, "x-guidance": COMPACT})
        if len(text) > MAX_CHARACTERS // 2 and not loose:
            return self._grammar(start, form, tokens, loose=True)
        return Grammar.unchecked(f"%llguidance {{}}\n{start}\ncall: %json {text}\n")


def _call(tool: Tool, arguments: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    """JSON schema of a call; keeps definitions that the arguments refer to."""
    if any(key in arguments for key in ("$defs", "definitions")) or "$ref" in json.dumps(arguments):
        # References start at the root of the tool's own schema, so it gets an id of its own to resolve them.
        arguments = {**arguments, "$id": f"tool:{tool.name}"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, form.arguments: arguments},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _flexible(text: str) -> str:
    """A text whose white space may differ: models are free where a grammar has not begun yet."""
    parts = [part for part in _SPACES.split(text) if part]
    return "SPACE " + " ".join("SPACE" if part.isspace() else _literal(part) for part in parts).removeprefix("SPACE ")


_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_LAZY = re.compile(r'(\w+)\[lazy\]: (\w+) (?:"(?:[^"\\]|\\.)*" )?(<\[\d+\]>.*)')


def _with_tokens(rules: str, tokens: Mapping[str, int]) -> str:
    """Rules whose texts name added tokens as such: to llguidance, their text is none that a grammar's text can match.

    What runs up to a text that is one need not be lazy.
    """
    # Few of thousands occur, and one pattern of all would be slow.
    texts = [json.loads(text) for line in rules.split("\n") if "%json" not in line for text in _TEXT.findall(line)]
    known = [token for token in tokens if any(token in text for text in texts)]
    if not known:
        return rules
    parts = re.compile(f"({'|'.join(map(re.escape, sorted(known, key=len, reverse=True)))})")

    def named(match: re.Match[str]) -> str:
        found = [part for part in parts.split(json.loads(match[0])) if part]
        return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in found)

    lines = (line if "%json" in line else _TEXT.sub(named, line) for line in rules.split("\n"))
    return "\n".join(_LAZY.sub(r"\1: \2 \3", line) for line in lines)
