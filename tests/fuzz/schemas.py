"""Reader of JSON schemas: of an answer, and of a tool with the arguments of a call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from assets import demo_path
from runtime.errors import RequestError
from runtime.system.child_process import LimitedProcess
from runtime.system.foreign import read_json
from runtime.text.call_constraint import AnswerConstraints
from runtime.text.call_grammar import CallRules
from runtime.text.constraint import Constraint, Grammar
from runtime.text.schema_process import problem_of
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import Tool
from tests.fuzz.mutation import altered_json, mostly, written
from tests.fuzz.reader import Reader

STEPS = 24
"""Tokens of an answer that are tried."""
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[A-Z]"},
            "age": {"type": ["integer", "null"], "minimum": 0, "exclusiveMaximum": 150, "multipleOf": 1},
            "score": {"type": "number", "exclusiveMinimum": -0.5, "maximum": 1e3},
            "tags": {
                "type": "array",
                "items": {"enum": ["a", 1, None]},
                "minItems": 1,
                "maxItems": 3,
                "uniqueItems": True,
            },
            "born": {"type": "string", "format": "date"},
            "kind": {"const": "person"},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    {
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "value": True}}},
        "allOf": [{"$ref": "#/$defs/Node"}, {"properties": {"more": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}],
        "patternProperties": {"^x-": {"oneOf": [{"type": "string"}, {"type": "boolean"}]}},
        "propertyNames": {"pattern": "^[a-z-]+$"},
        "minProperties": 0,
        "maxProperties": 9,
    },
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/pair",
        "$dynamicAnchor": "pair",
        "properties": {
            "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"$dynamicRef": "#pair"}], "items": False}
        },
        "if": {"required": ["pair"]},
        "then": {"properties": {"side": {"not": {"const": 3}}}},
        "else": {
            "properties": {
                "list": {"contains": {"const": 1}, "minContains": 1, "maxContains": 2, "unevaluatedItems": {}}
            }
        },
        "dependentRequired": {"side": ["pair"]},
        "dependentSchemas": {"side": {"minProperties": 2}},
        "unevaluatedProperties": False,
    },
)
"""Schemas that together have every keyword."""
ARGUMENTS = {"name": "Ann", "age": 3, "tags": ["a", 1], "pair": [1, {}], "next": {"value": 1.5}, "x-a": True}
PARTS: tuple[Any, ...] = (
    *("^(a|a)+$", "(.*a){20}", "^(?=x)(?!y).{0,9999}$", ".{1,900}b.{1,900}", "[", "\\p{L}\\1", "a" * 40 + "!"),
    *("object", "array", "string", "integer", "number", "null"),
    *("#", "#/$defs/Node", "#/allOf/0", "#/properties", "uuid"),
    *(10**40, 12_345_679, 9973, 0.1, 10**12, -(10**9)),
    *({"$ref": "#"}, {"$dynamicRef": "#pair"}, {"type": "object"}, {"pattern": ".*a.*"}, {"multipleOf": 97}),
    *({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"anyOf": [{"$ref": "#/$defs/Node"}] * 9}, {"patternProperties": {}}),
    {"properties": {"a": {"minLength": 500, "maxLength": 900}}, "required": ["a", "b"]},
    {"enum": list(range(3000))},
)


def try_constraint(constraint: Constraint | None, V: int, eos: int) -> None:
    """Draw some tokens, the same for the same constraint."""
    random = np.random.default_rng(0)
    for _ in range(STEPS if constraint is not None else 0):
        assert constraint is not None
        token = int(constraint.masked(random.normal(0, 1, V).astype(np.float32)).argmax())
        constraint.take(token)
        if token == eos:
            return


@contextmanager
def schemas(_folder: Path) -> Iterator[Reader]:
    """A schema and arguments: an answer in its form, calls of a tool with it, and the check of the arguments."""
    process = LimitedProcess("runtime.text.schema_reading", 1.0)
    tokenizer = Tokenizer(demo_path())
    V, eos = tokenizer.vocab_size, tokenizer.eos_token_id or 0
    constraints = AnswerConstraints(tokenizer, vocab_size=V, eos=[eos])

    def read(content: bytes) -> None:
        try:
            given = read_json(content)
        except ValueError:
            return  # schemas have come through the server's or a tool server's reader, which refuses these
        schema = given.get("schema") if isinstance(given, dict) else None
        if not isinstance(schema, dict):
            return
        problem_of(json.dumps(given.get("arguments")), schema)
        rules = CallRules.of([Tool(name="f", parameters=schema), Tool(name="g", parameters={})], required=False)
        try_constraint(constraints.of(None, rules, 40), V, eos)
        try_constraint(constraints.of(Grammar.of_schema(schema), rules, 40), V, eos)

    inputs = [altered_json({"schema": schema, "arguments": ARGUMENTS}, PARTS) for schema in SCHEMAS]
    sound = (written({"schema": {"type": "object", "properties": {"a": {}}}, "arguments": {"a": 1}}),)
    with patch("runtime.text.schema_process.schema_process", lambda: process):
        yield Reader(sound=sound, inputs=mostly(inputs[0] | inputs[1] | inputs[2]), read=read, errors=(RequestError,))
    process.close()
