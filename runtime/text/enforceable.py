"""Enforceable schemas: the part of a JSON schema that a grammar can enforce.

Servers write schemas for validators, not for grammars. llguidance refuses a whole schema because of a single lookahead,
and a repetition of 10,000 makes an automaton of many megabytes. So what cannot be enforced is left out, keyword by
keyword, and everything around it stays enforced. Whoever runs the call checks the arguments against the whole schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from runtime.errors import RequestError
from runtime.text.constraint import ANY_OBJECT, Grammar

MAX_NODES, MAX_DEPTH = 2000, 48
"""Most schemas within a schema, and deepest nesting, that are looked at; a larger one allows any object."""
MAX_REPEAT = 1000
"""Most repetitions of a pattern, a string or an array: each is a state of the automaton."""
MAX_ENUM = 2000
"""Most values of an enumeration."""
KNOWN = frozenset(
    {
        "$ref", "$defs", "definitions", "$id", "type", "const", "enum", "anyOf", "oneOf", "allOf", "properties",
        "required", "additionalProperties", "patternProperties", "items", "prefixItems", "minItems", "maxItems",
        "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "multipleOf", "minProperties", "maxProperties",
    }
)  # fmt: skip
"""Keywords that llguidance enforces."""
SILENT = frozenset(
    {"$schema", "$comment", "$anchor", "title", "description", "default", "examples", "deprecated", "readOnly",
     "writeOnly", "contentMediaType", "contentEncoding"}
)  # fmt: skip
"""Keywords that restrict nothing."""
_FRAGILE = (
    "pattern", "format", "patternProperties", "multipleOf", "minProperties", "maxProperties", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems",
)  # fmt: skip
"""Keywords whose values may be refused, in the order in which they are given up."""
_INSIDE_ONE = ("items", "additionalProperties")
_INSIDE_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_INSIDE_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_COUNTED = ("minLength", "maxLength", "minItems", "maxItems")
_REPEAT = re.compile(r"\{(\d{1,9})?(,)?(\d{1,9})?\}")
_AROUND = re.compile(r"\(\?<?[=!]")


@dataclass(frozen=True, slots=True)
class Enforceable:
    """What a grammar can enforce of a schema of arguments."""

    schema: Mapping[str, Any]
    """The schema that is enforced; anything that fits the whole schema fits it, unknown properties aside."""
    relaxed: tuple[str, ...] = ()
    """Places whose keywords are not enforced, such as `properties.path.pattern`."""


def enforceable(schema: Mapping[str, Any]) -> Enforceable:
    """The enforceable part of a schema of arguments. Takes milliseconds, or seconds where a lot is refused.

    Objects that list their properties and say nothing of others get no others: small models invent them.
    """
    try:
        return _enforceable(json.dumps(schema))
    except (RecursionError, ValueError, TypeError):
        return Enforceable(ANY_OBJECT, ("all of it",))


@lru_cache(maxsize=256)
def _enforceable(text: str) -> Enforceable:
    whole = {**json.loads(text), "type": "object"}
    relaxed: list[str] = []
    if sum(1 for _ in _schemas(whole, 0)) > MAX_NODES:
        return Enforceable(ANY_OBJECT, ("all of it: it is too large",))
    found = _plain(whole, "", relaxed)
    if not _compiles(found):
        found = _repaired(found, {}, "", relaxed)
        if not _compiles(found):
            return Enforceable(ANY_OBJECT, ("all of it",))
    return Enforceable(found, tuple(relaxed))


def _schemas(node: Any, depth: int) -> Iterator[None]:
    """One item for each value inside a schema."""
    if depth > MAX_DEPTH:
        raise RecursionError
    yield None
    inside = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for one in inside:
        yield from _schemas(one, depth + 1)


def _compiles(schema: Any) -> bool:
    try:
        Grammar.of_schema(schema if isinstance(schema, dict) else {})
    except RequestError:
        return False
    return True


def _inside(node: Mapping[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """A schema with every schema directly inside it changed."""
    found = dict(node)
    for key in _INSIDE_ONE:
        if isinstance(found.get(key), dict):
            found[key] = change(found[key], key)
    for key in _INSIDE_LIST:
        if isinstance(found.get(key), list):
            found[key] = [change(one, f"{key}[{at}]") for at, one in enumerate(found[key])]
    for key in _INSIDE_NAMED:
        if isinstance(found.get(key), dict):
            found[key] = {name: change(one, f"{key}.{name}") for name, one in found[key].items()}
    return found


def _plain(node: Any, where: str, relaxed: list[str], *, closed: bool = True) -> Any:
    """A schema without keywords that are known not to be enforceable."""
    if not isinstance(node, dict):
        return node if isinstance(node, bool) else {}

    def leave_out(key: str) -> None:
        relaxed.append(f"{where}.{key}".lstrip("."))

    found: dict[str, Any] = {}
    for key, value in node.items():
        if key in SILENT:
            continue
        if key == "pattern" and isinstance(value, str) and (plainer := _plainer(value)) != value:
            leave_out(key)
            found[key] = plainer
        elif key not in KNOWN or _too_large(key, value):
            leave_out(key)
        else:
            found[key] = value
    combined = any(key in found for key in ("allOf", "anyOf", "oneOf", "$ref"))
    loose = ("additionalProperties", "patternProperties", "unevaluatedProperties")
    if closed and not combined and found.get("properties") and not any(key in node for key in loose):
        found["additionalProperties"] = False
    return _inside(found, lambda one, key: _plain(one, f"{where}.{key}", relaxed, closed=not key.startswith("allOf")))


def _plainer(pattern: str) -> str:
    """A pattern that matches at least as much, without lookarounds and without large repetitions."""
    found, at = "", 0
    while at < len(pattern):
        around = _AROUND.match(pattern, at)
        if around is not None:
            at = _group_end(pattern, around.end())
        elif pattern[at] == "\\":
            found, at = found + pattern[at : at + 2], at + 2
        elif (repeat := _REPEAT.match(pattern, at)) is not None:
            low, most = repeat[1] or "0", repeat[3] if repeat[2] else repeat[1]
            large = max(int(low), int(most or 0)) > MAX_REPEAT
            found += f"{{{low if int(low) <= MAX_REPEAT else MAX_REPEAT},}}" if large else repeat[0]
            at = repeat.end()
        else:
            found, at = found + pattern[at], at + 1
    return found


def _group_end(pattern: str, at: int) -> int:
    """Where a group ends whose contents begin at a place."""
    depth, inside = 1, False
    while at < len(pattern) and depth:
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif inside:
            inside = letter != "]"
        elif letter == "[":
            inside = True
        else:
            depth += (letter == "(") - (letter == ")")
        at += 1
    return at


def _too_large(key: str, value: Any) -> bool:
    if key in _COUNTED:
        return not isinstance(value, int) or value > MAX_REPEAT
    return key == "enum" and isinstance(value, list) and len(value) > MAX_ENUM


def _repaired(node: Any, outer: Mapping[str, Any], where: str, relaxed: list[str]) -> Any:
    """A schema that compiles: its innermost parts first, each with as many of its keywords as possible."""
    if not isinstance(node, dict):
        return node
    shared = {key: node[key] for key in ("$defs", "definitions") if key in node} or dict(outer)

    def alone(one: Any) -> bool:
        return not isinstance(one, dict) or _compiles({**shared, **one})

    if alone(node):
        return node
    found = _inside(node, lambda one, key: one if alone(one) else _repaired(one, shared, f"{where}.{key}", relaxed))
    if "oneOf" in found and "anyOf" not in found:  # exactly one of them may be more than a grammar can tell
        found["anyOf"] = found.pop("oneOf")
        relaxed.append(f"{where}.oneOf".lstrip("."))
    for key in _FRAGILE:
        if alone(found):
            return found
        if key in found:
            del found[key]
            relaxed.append(f"{where}.{key}".lstrip("."))
    if alone(found):
        return found
    relaxed.append(where.lstrip(".") or "all of it")
    kind = found.get("type")
    bare = {"type": kind} if isinstance(kind, str) and alone({"type": kind}) else {}
    return {**bare, **({key: found[key] for key in ("$defs", "definitions") if key in found} if not where else {})}
