"""Grammars of tool calls: of an answer that must call, and of the calls in an answer that may.

In an answer that may call, nothing is constrained until the model begins a call in its family's format. From there on,
the name and the arguments are, to the end of the call; then the model is free again. Text costs nothing, not even the
grammar: it is built when the first call begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.errors import RequestError
from runtime.text.call_format import CallFormat
from runtime.text.constraint import ANY_OBJECT, MAX_CHARACTERS, Constraint, Grammar
from runtime.text.enforceable import enforceable
from runtime.text.tool_calls import Tool

Float32Array = npt.NDArray[np.float32]
MOST_CALLS = 16
"""Most calls in a row. A small model may otherwise never stop calling."""
_SPACES = re.compile(r"([ \n]+)")
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What an answer may call, or must."""

    tools: tuple[Tool, ...]
    """The tools."""
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
        found = [enforceable(tool.parameters) for tool in tools]
        for tool, one in zip(tools, found, strict=True):
            if tool.strict and one.relaxed:
                raise RequestError(f"the parameters of {tool.name} cannot be enforced: {', '.join(one.relaxed)}")
        return cls(
            tools=tuple(tools),
            arguments=tuple(one.schema for one in found),
            relaxed={tool.name: one.relaxed for tool, one in zip(tools, found, strict=True) if one.relaxed},
            required=required,
            several=several,
        )

    def answer(self, form: CallFormat, special: int | None) -> Grammar:
        """The grammar of an answer that is nothing but calls.

        Args:
            form: The model's format.
            special: The marker's token, if it is a special one.
        """
        mark = _mark(form, special)
        last = MOST_CALLS - 1 if self.several and form.between else 0
        more = f"({_literal(form.between)} call){{0,{last}}}" if last else ""
        return self._grammar(f"start: {mark} {_literal(form.begin)} call {more} {_literal(form.end)}", form)

    def calls(self, form: CallFormat, special: int | None, *, loose: bool = False) -> Grammar:
        """The grammar of an answer from the beginning of its first call on.

        Args:
            form: The model's format.
            special: The marker's token, if it is a special one.
            loose: Whether arguments may be any object, because the schemas turned out too complex.
        """
        if not form.mark:
            return self._grammar("start: SPACE call\nSPACE: /[ \\n]{0,4}/", form, loose=loose)
        last = MOST_CALLS - 1 if self.several and form.between else 0
        more = f"({_flexible(form.between)} call){{0,{last}}}" if last else ""
        head = f"head[lazy]: TEXT {_literal(form.mark)}" if special is None else f"head: TEXT <[{special}]>"
        lines = [
            f"start: tag{{1,{MOST_CALLS}}} TEXT" if self.several else "start: tag",
            f"tag: head {_flexible(form.begin)} call {more} {_flexible(form.end)}",
            head,
            "TEXT: /(.|\\n)*/",
            "SPACE: /[ \\n]{0,4}/",
        ]
        return self._grammar("\n".join(lines), form, loose=loose)

    def _grammar(self, start: str, form: CallFormat, *, loose: bool = False) -> Grammar:
        kinds = [
            _call(tool, ANY_OBJECT if loose else kind, form)
            for tool, kind in zip(self.tools, self.arguments, strict=True)
        ]
        text = json.dumps({"anyOf": kinds, "x-guidance": _COMPACT})
        if len(text) > MAX_CHARACTERS // 2 and not loose:
            return self._grammar(start, form, loose=True)
        return Grammar.of_lark(f"%llguidance {{}}\n{start}\ncall: %json {text}\n")


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


def _mark(form: CallFormat, special: int | None) -> str:
    return _literal(form.mark) if special is None else f"<[{special}]>"


class WritesCalls(Protocol):
    """The part of a tokenizer used here."""

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls."""
        ...

    def special_token(self, text: str) -> int | None:
        """The token of a special text."""
        ...

    def piece(self, token: int) -> str:
        """The text of a token."""
        ...


def calls_constraint(rules: CallRules, tokenizer: WritesCalls, begin: Begins) -> Constraint | None:
    """The constraint of an answer that may call tools, or must; None if nothing can be enforced.

    Args:
        rules: The tools.
        tokenizer: The model's.
        begin: Begins a constraint with a grammar.

    Raises:
        RequestError: the model's tokenizer is not supported.
    """
    form = tokenizer.call_format
    if rules.required:
        form = form or CallFormat()
        return begin(rules.answer(form, tokenizer.special_token(form.mark)))
    if form is None:
        return None
    return CallConstraint(rules, form, tokenizer.special_token(form.mark), begin, tokenizer.piece)


class Begins(Protocol):
    """Begins a constraint; see `runtime.text.constraint.Constraints.begin`."""

    def __call__(self, grammar: Grammar) -> Constraint:
        """Begin at a grammar's start."""
        ...


class CallConstraint(Constraint):
    """The parser state of an answer that may call."""

    def __init__(
        self, rules: CallRules, form: CallFormat, special: int | None, begin: Begins, piece: Callable[[int], str]
    ) -> None:
        """Start at the beginning of an answer.

        Args:
            rules: The tools.
            form: The model's format.
            special: The marker's token, if it is a special one.
            begin: Begins a constraint.
            piece: Text of a token.
        """
        self._rules, self._form, self._special, self._begin, self._piece = rules, form, special, begin, piece
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._inner: Constraint | None = None
        self._over = False  # whether nothing is enforced any more
        names = "|".join(re.escape(tool.name) for tool in rules.tools)
        self._bare = re.compile(rf'\s*\{{\s*"name"\s*:\s*"(?:{names})"')

    def masked(self, logits: Float32Array) -> Float32Array:
        """Logits float32 [V], with minus infinity for tokens that no call allows."""
        inner = self._inner
        if inner is None or inner.free:
            return logits
        try:
            return inner.masked(logits)
        except RequestError:
            return self._loosened().masked(logits) if self._retreat() else logits

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        if self._over:
            return
        self._tokens.append(token)
        if self._inner is not None:
            try:
                self._inner.take(token)
            except RequestError:
                self._retreat()
            return
        self._texts.append(self._piece(token))
        if (first := self._begins(token)) is not None:
            del self._tokens[:first]
            self._enter(loose=False)

    def _loosened(self) -> Constraint:
        assert self._inner is not None
        return self._inner

    def _begins(self, token: int) -> int | None:
        """Index of the token with which a call begins, if its beginning is complete; None if it is not."""
        if self._form.mark == "":
            if len(self._texts) > 64:
                self._over = True
                return None
            return 0 if self._bare.fullmatch("".join(self._texts)) else None
        if self._special is not None:
            return len(self._tokens) - 1 if token == self._special else None
        tail, at = "", len(self._texts)
        while at and len(tail) < 2 * len(self._form.mark) + len(self._texts[-1]):
            at -= 1
            tail = self._texts[at] + tail
            if self._form.mark in tail:
                return at
        return None

    def _enter(self, *, loose: bool) -> bool:
        """Build the grammar, and follow it through the tokens since the call began. Returns whether that worked."""
        try:
            self._inner = self._begin(self._rules.calls(self._form, self._special, loose=loose))
            for token in self._tokens:
                self._inner.take(token)
        except RequestError:
            self._inner = None
            self._over = loose or not self._enter(loose=True)
        return self._inner is not None

    def _retreat(self) -> bool:
        """Enforce less, because the grammar became too complex, or the model wrote text that no grammar allows."""
        return self._enter(loose=True)
