"""Enforceable schemas: the part of a JSON schema that a grammar can enforce.

Servers write schemas for validators, not for grammars. llguidance refuses a whole schema because of a single lookahead,
and a repetition of 10,000 makes an automaton of many megabytes. So what cannot be enforced is left out, keyword by
keyword, and everything around it stays enforced. Whoever runs the call checks the arguments against the whole schema.

Objects are closed: they get the properties that their schema declares, and no others. Where a schema says nothing of
`additionalProperties`, any others are valid, and models invent them until they run out of tokens. What `allOf`,
`anyOf`, `oneOf` and references add to an object counts as declared: objects are closed as
`unevaluatedProperties: false` would close them, which no grammar can enforce.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from runtime.errors import RequestError
from runtime.text.constraint import ANY_OBJECT, WHITE_SPACE, Grammar
from runtime.text.schema_process import TooMuchError, ask

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


_ONE = ("items", "additionalProperties", "contains", "unevaluatedItems")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold a schema, a list of them, and schemas by name."""
_ALTERNATIVES = ("anyOf", "oneOf")
_COMBINED = ("allOf", *_ALTERNATIVES)
_SAID = ("additionalProperties", "$dynamicRef", "$recursiveRef", "const", "enum")
"""Keywords that decide on further properties themselves, or may."""
_CONDITIONAL = ("if", "then", "else")
_BESIDE_REF = frozenset({"$ref", "$defs", "definitions", "$schema", "$id", "$comment", "title", "description"})
"""Keywords beside which a reference is all that a schema says."""
MAX_NODES, MAX_DEPTH = 2000, 48
"""Most schemas within a schema, and deepest nesting, that are looked at; a larger one allows any object."""
MAX_REPEAT = 1000
"""Most repetitions of a pattern, a string or an array: each is a state of the automaton."""
MAX_ENUM = 2000
"""Most values of an enumeration."""
MAX_MULTIPLE = 10_000
"""Largest number whose multiples are enforced: an automaton counts remainders."""
MAX_NUMBER = 2**63
"""Largest whole number that is enforced exactly."""
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
_ALL = "all of it"
logger = logging.getLogger(__name__)
_COUNTED = ("minLength", "maxLength", "minItems", "maxItems")
_REPEAT = re.compile(r"\{(\d{1,9})?(,)?(\d{1,9})?\}")
_AROUND = re.compile(r"\(\?<?[=!]")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects are closed.

    An object stays open if no property of it is declared, or if `additionalProperties` says so.
    """
    return _Closing(schema).whole()


@dataclass(slots=True)
class _Declared:
    """What is declared of an object's properties."""

    names: dict[str, None] = field(default_factory=dict)
    """Names, in order; required ones too."""
    patterns: dict[str, None] = field(default_factory=dict)
    some: bool = False
    """Whether there are `properties` or `patternProperties`."""
    said: bool = False
    """Whether the schema decides on further properties itself."""

    def add(self, other: _Declared) -> None:
        """Add what another schema of the same object declares."""
        self.names |= other.names
        self.patterns |= other.patterns
        self.some, self.said = self.some or other.some, self.said or other.said


class _Closing:
    """The closing of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._copies: dict[str, str] = {}  # names of the open copies, by what they copy
        self._opened: dict[str, Any] = {}  # these copies, by name

    def whole(self) -> dict[str, Any]:
        """The closed schema, with the open copies of what it refers to from within `allOf` and the like."""
        schema: dict[str, Any] = self._close(self._root, _Declared())
        if self._opened:
            definitions = schema.get("$defs")
            schema["$defs"] = {**(definitions if isinstance(definitions, dict) else {}), **self._opened}
        return schema

    def _close(self, node: Any, outer: _Declared) -> Any:
        """A schema with its objects closed.

        Args:
            node: The schema.
            outer: What the schemas around it declare of the same object.
        """
        if node is True and outer.some:
            node = {}
        if not isinstance(node, Mapping):
            return node
        if not (outer.names or outer.patterns) and "$ref" in node and node.keys() <= _BESIDE_REF:
            return inside(node, self._part)  # what it refers to is closed in its own place
        declared = self._declared(node, set(), alternatives=False)
        declared.add(outer)
        around = {key: self._around(node, key, declared) for key in _ALTERNATIVES if _listed(node.get(key))}

        def part(one: Any, place: str) -> Any:
            key = place.partition("[")[0]
            if key in around and not around[key].said:
                return self._close(one, around[key])
            return self._part(one, place)

        schema = self._referring(inside(node, part))
        if declared.some and not declared.said and schema.get("unevaluatedProperties") is False:
            del schema["unevaluatedProperties"]  # that is what closing means
        if declared.some and not declared.said and not around:
            for key, given in (("properties", declared.names), ("patternProperties", declared.patterns)):
                own = schema.get(key)
                own = own if isinstance(own, dict) else {}
                if given:
                    schema[key] = {**own, **{name: True for name in given if name not in own}}
            schema["additionalProperties"] = False
        return schema

    def _around(self, node: Mapping[str, Any], key: str, declared: _Declared) -> _Declared:
        """What is declared around the alternatives under a keyword."""
        found = _Declared()
        found.add(declared)
        for other in _ALTERNATIVES:
            for branch in _listed(node.get(other)) if other != key else ():
                found.add(self._declared(branch, set()))
        return found

    def _part(self, one: Any, place: str) -> Any:
        """A schema inside another: closed, unless it is of the same object, for which the other is."""
        return self._open(one) if place.partition("[")[0] in _COMBINED else self._close(one, _Declared())

    def _open(self, node: Any) -> Any:
        """A schema whose own object is left open, for others to add to it."""
        return self._referring(inside(node, self._part)) if isinstance(node, Mapping) else node

    def _referring(self, found: dict[str, Any]) -> dict[str, Any]:
        """A schema that refers to an open copy of what it referred to."""
        if self._target(found.get("$ref")) is not None:
            found["$ref"] = f"#/$defs/{self._copy(found['$ref'])}"
        return found

    def _copy(self, reference: str) -> str:
        """The name of the open copy of what a reference names."""
        if reference not in self._copies:
            taken = self._root.get("$defs")
            name = f"open-{len(self._copies)}"
            while isinstance(taken, Mapping) and name in taken:
                name += "_"
            self._copies[reference] = name  # first, as it may refer to itself
            target = self._target(reference) or {}
            own = {key: value for key, value in target.items() if key not in ("$defs", "definitions", "$id")}
            self._opened[name] = self._open(own)
        return self._copies[reference]

    def _declared(self, node: Any, seen: set[str], *, alternatives: bool = True) -> _Declared:
        """What a schema declares of an object's properties; with or without what the alternatives in it do."""
        declared = _Declared()
        if not isinstance(node, Mapping):
            return declared
        for key, into in (("properties", declared.names), ("patternProperties", declared.patterns)):
            if isinstance(own := node.get(key), Mapping) and own:
                into.update(dict.fromkeys(own))
                declared.some = True
        declared.names.update(dict.fromkeys(name for name in _listed(node.get("required")) if isinstance(name, str)))
        declared.said = any(key in node for key in _SAID) or node.get("unevaluatedProperties", False) is not False
        for part in self._parts(node, alternatives=alternatives):
            declared.add(self._declared(part, seen))
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            target = self._target(reference)
            declared.said = declared.said or target is None  # who knows what it declares
            declared.add(self._declared(target, seen))
        return declared

    @staticmethod
    def _parts(node: Mapping[str, Any], *, alternatives: bool) -> Iterator[Any]:
        """The schemas in a schema that are of the same object."""
        for key in _COMBINED if alternatives else ("allOf",):
            yield from _listed(node.get(key))
        yield from (node[key] for key in _CONDITIONAL if key in node)
        if isinstance(dependent := node.get("dependentSchemas"), Mapping):
            yield from dependent.values()

    def _target(self, reference: Any) -> Mapping[str, Any] | None:
        """The schema that a reference within this one names; None if there is none."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        target: Any = self._root
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                target = target.get(key) if isinstance(target, Mapping) else None
        return target if isinstance(target, Mapping) else None


def inside(node: Mapping[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """A schema with every schema directly inside it changed."""
    changed = dict(node)
    for key in _ONE:
        if isinstance(changed.get(key), dict):
            changed[key] = change(changed[key], key)
    for key in _LISTED:
        if isinstance(changed.get(key), list):
            changed[key] = [change(one, f"{key}[{at}]") for at, one in enumerate(changed[key])]
    for key in _NAMED:
        if isinstance(changed.get(key), dict):
            changed[key] = {name: change(one, f"{key}.{name}") for name, one in changed[key].items()}
    return changed


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class Enforceable:
    """What a grammar can enforce of a schema of arguments."""

    schema: Mapping[str, Any]
    """The schema that is enforced; anything that fits the whole schema fits it, unknown properties aside."""
    relaxed: tuple[str, ...] = ()
    """Places whose keywords are not enforced, such as `properties.path.pattern`."""


TOO_MUCH = Enforceable(ANY_OBJECT, (f"{_ALL}: reading it takes too much time or memory",))


def enforceable(schema: Mapping[str, Any]) -> Enforceable:
    """The enforceable part of a schema of arguments. Takes milliseconds, or seconds where a lot is refused.

    Objects that list their properties and say nothing of others get no others: small models invent them.
    """
    try:
        return _enforceable(json.dumps(schema))
    except (RequestError, RecursionError, ValueError, TypeError):
        return Enforceable(ANY_OBJECT, (_ALL,))


@lru_cache(maxsize=256)
def _enforceable(text: str) -> Enforceable:
    try:
        schema, relaxed = ask("enforceable", text)
    except TooMuchError as error:
        logger.warning("a tool's schema is not enforced: %s", error)
        return TOO_MUCH
    return Enforceable(schema, tuple(relaxed))


def enforced_part(text: str) -> tuple[Any, list[str]]:
    """See `enforceable`: the schema, and what is relaxed. That may take any time and memory."""
    whole = {**json.loads(text), "type": "object"}
    if not _small(whole):
        return ANY_OBJECT, [f"{_ALL}: it is too large"]
    relaxed: list[str] = []
    schema = _plain(closed(whole), "", relaxed)
    if _wrong(schema):
        schema = _repaired(schema, {}, "", relaxed)
        if _wrong(schema):
            return ANY_OBJECT, [_ALL]
    return schema, relaxed


def schema_grammar(text: str) -> str:
    """The grammar of JSON that fits a schema, whose objects are closed. That may take any time and memory.

    Raises:
        RequestError: it cannot be enforced; says why and where.
    """
    schema = closed(json.loads(text))
    grammar = _grammar(schema)
    if isinstance(grammar, Grammar):
        return grammar.text
    places: list[str] = []
    if _small(schema):
        _repaired(schema, {}, "", places)
    raise RequestError(f"{places[0]}: {grammar}" if places and places != [_ALL] else grammar)


def _small(schema: Any) -> bool:
    """Whether a schema can be taken apart."""
    try:
        return sum(1 for _ in _schemas(schema, 0)) <= MAX_NODES
    except RecursionError:
        return False


def _schemas(node: Any, depth: int) -> Iterator[None]:
    """One item for each value inside a schema."""
    if depth > MAX_DEPTH:
        raise RecursionError
    yield None
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for one in values:
        yield from _schemas(one, depth + 1)


def _grammar(schema: Any) -> Grammar | str:
    """The grammar of a schema, or why it cannot be enforced."""
    from llguidance import LLMatcher

    options: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
    text = json.dumps(schema)  # of numbers that are too large for it, llguidance only reads the text
    try:
        grammar = Grammar(LLMatcher.grammar_from_json_schema(text, overrides=options))
        grammar.check()
    except (RequestError, ValueError) as error:
        return str(error)
    return grammar


def _wrong(schema: Any) -> bool:
    """Whether a schema cannot be enforced."""
    return isinstance(_grammar(schema if isinstance(schema, dict) else {}), str)


def _plain(node: Any, where: str, relaxed: list[str]) -> Any:
    """A schema without keywords that are known not to be enforceable."""
    if not isinstance(node, dict):
        return node if isinstance(node, bool) else {}

    def leave_out(key: str) -> None:
        relaxed.append(f"{where}.{key}".lstrip("."))

    plain: dict[str, Any] = {}
    for key, value in node.items():
        if key in SILENT:
            continue
        if key == "pattern" and isinstance(value, str) and (plainer := _plainer(value)) != value:
            leave_out(key)
            plain[key] = plainer
        elif key not in KNOWN or _too_large(key, value):
            leave_out(key)
        else:
            plain[key] = value
    return inside(plain, lambda one, key: _plain(one, f"{where}.{key}", relaxed))


def _plainer(pattern: str) -> str:
    """A pattern that matches at least as much, without lookarounds and without large repetitions."""
    plain, at = "", 0
    while at < len(pattern):
        around = _AROUND.match(pattern, at)
        if around is not None:
            at = _group_end(pattern, around.end())
        elif pattern[at] == "\\":
            plain, at = plain + pattern[at : at + 2], at + 2
        elif (repeat := _REPEAT.match(pattern, at)) is not None:
            low, most = repeat[1] or "0", repeat[3] if repeat[2] else repeat[1]
            large = max(int(low), int(most or 0)) > MAX_REPEAT
            plain += f"{{{low if int(low) <= MAX_REPEAT else MAX_REPEAT},}}" if large else repeat[0]
            at = repeat.end()
        else:
            plain, at = plain + pattern[at], at + 1
    return plain


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
    if key == "multipleOf":
        return isinstance(value, int | float) and value > MAX_MULTIPLE
    values = value if key == "enum" and isinstance(value, list) else [value] if key == "const" else []
    return len(values) > MAX_ENUM or any(isinstance(one, int) and abs(one) > MAX_NUMBER for one in values)


def _repaired(node: Any, outer: Mapping[str, Any], where: str, relaxed: list[str]) -> Any:
    """A schema that compiles: its innermost parts first, each with as many of its keywords as possible."""
    if not isinstance(node, dict):
        return node
    shared = {key: node[key] for key in ("$defs", "definitions") if key in node} or dict(outer)

    def alone(one: Any) -> bool:
        return not isinstance(one, dict) or not _wrong({**shared, **one})

    if alone(node):
        return node
    repaired = inside(node, lambda one, key: one if alone(one) else _repaired(one, shared, f"{where}.{key}", relaxed))
    if "oneOf" in repaired and "anyOf" not in repaired:  # exactly one of them may be more than a grammar can tell
        repaired["anyOf"] = repaired.pop("oneOf")
        relaxed.append(f"{where}.oneOf".lstrip("."))
    for key in _FRAGILE:
        if alone(repaired):
            return repaired
        if key in repaired:
            del repaired[key]
            if key == "patternProperties" and repaired.get("additionalProperties") is False:
                del repaired["additionalProperties"]  # it would forbid what the patterns allow
            relaxed.append(f"{where}.{key}".lstrip("."))
    if alone(repaired):
        return repaired
    relaxed.append(where.lstrip(".") or _ALL)
    kind = repaired.get("type")
    bare = {"type": kind} if isinstance(kind, str) and alone({"type": kind}) else {}
    return {
        **bare,
        **({key: repaired[key] for key in ("$defs", "definitions") if key in repaired} if not where else {}),
    }
