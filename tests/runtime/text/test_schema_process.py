"""Schemas whose reading would never end, or would fill memory, are given up; the process that reads them is ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.errors import RequestError
from runtime.system.child_process import LimitedProcess
from runtime.text import schema_process
from runtime.text.call_grammar import CallRules
from runtime.text.constraint import Grammar
from runtime.text.enforceable import TOO_MUCH, enforceable
from runtime.text.schema_process import problem_of
from runtime.text.tool_calls import Tool

SLOW, LETTERS = "^(a|a)+$", "a" * 40 + "!"
ANY: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def levels(of: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Thirty definitions, each of which refers to the next one twice."""
    parts = {f"d{at}": of({"$ref": f"#/$defs/d{at + 1}"}) for at in range(30)}
    return {"$ref": "#/$defs/d0", "$defs": {**parts, "d30": {"type": "object"}}}


ENDLESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "patternProperties": ({"patternProperties": {SLOW: {}}}, {LETTERS: 1}),
    "additionalProperties": ({"patternProperties": {SLOW: {}}, "additionalProperties": False}, {LETTERS: 1}),
    "dependentSchemas": ({"dependentSchemas": {"a": {"patternProperties": {SLOW: {}}}}}, {"a": 1, LETTERS: 1}),
    "allOf": (levels(lambda one: {"allOf": [one, one]}), {}),
    "anyOf": (levels(lambda one: {"anyOf": [{"allOf": [one, False]}, {"allOf": [one, False]}]}), {}),
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "multiples": {
        "type": "array",
        "items": {"anyOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949)]},
    },
    "patterns": {"type": "string", "allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvw"]},
}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    process = LimitedProcess("runtime.text.schema_reading", 0.5)
    monkeypatch.setattr(schema_process, "schema_process", lambda: process)
    yield
    process.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_check_that_does_not_end_restricts_nothing(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    schema, arguments = ENDLESS[kind]
    assert problem_of(json.dumps(arguments), schema) is None
    assert "takes more than 0.5 s" in caplog.text


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_schema_that_takes_too_much_is_refused(kind: str) -> None:
    with pytest.raises(RequestError, match=r"cannot be enforced: reading it takes more than 0\.5 s"):
        Grammar.of_schema(GRAMMARS[kind])
    assert enforceable({"properties": {"a": GRAMMARS[kind]}}) is TOO_MUCH


@pytest.mark.usefixtures("hasty")
def test_a_grammar_that_takes_too_much_is_refused() -> None:
    with pytest.raises(RequestError, match=r"grammar cannot be enforced: reading it takes more than 0\.5 s"):
        Grammar.of_lark(f"start: <|end|> <[7]> slow\nslow: %json {json.dumps(GRAMMARS['multiples'])}")
    with pytest.raises(RequestError, match=r"schema cannot be enforced: reading it takes more than 0\.5 s"):
        Grammar.of_schema({"properties": {"a": {"type": "integer", "multipleOf": 12_345_679}}})


@pytest.mark.usefixtures("hasty")
def test_tools_that_take_too_much_are_given_up_together() -> None:
    asked = [{"properties": {name: GRAMMARS["patterns"]}} for name in "abcdefgh"]
    rules = CallRules.of([Tool(name=f"t{at}", parameters=one) for at, one in enumerate(asked)], required=False)
    assert set(rules.relaxed.values()) == {TOO_MUCH.relaxed}


@pytest.mark.parametrize(
    ("arguments", "schema", "problem"),
    [
        ('{"a": 1}', ANY, None),
        ('{"a": "x"}', ANY, "a: 'x' is not of type 'integer'"),
        ('{"a": 1', ANY, "the arguments are not JSON"),
        ("[1]", ANY, "the arguments are not a JSON object"),
        ('{"a": "é"}', {"properties": {"a": {"pattern": r"^\p{L}$"}}}, None),
        ('{"a": 5}', {"properties": {"a": {"minimum": 10**40}}}, "a: 5 is less than the minimum"),
        ('{"a": 5}', {"properties": {"a": {"multipleOf": 0}}}, None),
        ('{"a": 5}', {"type": 3}, None),
        ("{}", {"$ref": "#"}, None),
        ("{}", {"$ref": "https://example.org/"}, None),
    ],
)
def test_what_is_wrong_with_arguments(arguments: str, schema: dict[str, Any], problem: str | None) -> None:
    found = problem_of(arguments, schema)
    assert found == problem or (problem is not None and str(found).startswith(problem))


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    process = LimitedProcess("runtime.text.schema_reading", 1.0)
    monkeypatch.setattr(schema_process, "schema_process", lambda: process)
    with pytest.raises(RequestError, match="no process could be started"):
        Grammar.of_regex("never asked for before")
    assert problem_of("{}", ANY) is None
