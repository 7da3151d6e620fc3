"""Answers that a grammar constrains: on random logits, and by the bundled model through the engine."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from assets import demo_path
from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.engine.engine import Engine
from runtime.errors import RequestError
from runtime.load.plan import open_engine
from runtime.text.constraint import ANY_OBJECT, Constraint, Constraints, Grammar
from runtime.text.enforceable import enforceable
from runtime.text.sampling import Sampler, SamplingOptions
from runtime.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_path())


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    assert tokenizer.eos_token_id is not None
    return Constraints(tokenizer, vocab_size=tokenizer.vocab_size + 3, eos=[tokenizer.eos_token_id])


def drawn(constraint: Constraint, tokenizer: Tokenizer, seed: int, most: int = 300, **options: Any) -> str | None:
    """A text drawn from random logits; None where it did not end."""
    random = np.random.default_rng(seed)
    sampler = Sampler(SamplingOptions(**{"temperature": 1.0, "seed": seed, **options}), [], constraint)
    tokens: list[int] = []
    while len(tokens) < most:
        logits = random.normal(0, 2, tokenizer.vocab_size + 3).astype(np.float32)
        before = logits.copy()
        token = sampler.draw(logits)
        np.testing.assert_array_equal(logits, before)
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(tokens)
        tokens.append(token)
    return None


def fits(value: Any) -> bool:
    return (
        set(value) == {"name", "age", "kind"}
        and len(value["name"]) <= 12
        and 0 <= value["age"] <= 150
        and value["kind"] in ("cat", "dog")
    )


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 5, "min_p": 0.1}, {"repetition_penalty": 1.3}])
def test_random_logits_give_json_that_fits_the_schema(
    constraints: Constraints, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    grammar = Grammar.of_schema(PERSON)
    texts = [drawn(constraints.begin(grammar), tokenizer, seed, **options) for seed in range(8)]
    assert None not in texts
    assert all(fits(json.loads(str(text))) for text in texts), texts


def test_a_regular_expression_and_a_grammar(constraints: Constraints, tokenizer: Tokenizer) -> None:
    date = Grammar.of_regex(r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]")
    text = drawn(constraints.begin(date), tokenizer, 1)
    assert text is not None
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", text)
    assert Grammar.of_lark("start: <|special|> <[9]>")
    sums = Grammar.of_lark('start: term ("+" term){3}\nterm: /[1-9][0-9]?/')
    text = drawn(constraints.begin(sums), tokenizer, 2)
    assert text is not None
    assert re.fullmatch(r"\d+(\+\d+){3}", text)


def test_the_end_may_come_when_the_grammar_is_complete_and_not_before(
    constraints: Constraints, tokenizer: Tokenizer
) -> None:
    constraint, eos = constraints.begin(Grammar.of_schema(ANY_OBJECT)), tokenizer.eos_token_id
    logits = np.zeros(tokenizer.vocab_size + 3, np.float32)
    assert constraint.masked(logits)[eos] == -np.inf
    for token in tokenizer.encode("{}", special=False):
        constraint.take(token)
    last = constraint.masked(logits)
    assert last[eos] == 0
    assert not np.isfinite(last[tokenizer.vocab_size :]).any()  # what the vocabulary is padded with


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.of_schema({"type": "nonsense"}), "JSON schema cannot be enforced: .*nonsense"),
        (lambda: Grammar.of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: Grammar.of_schema({"$ref": "http://example.com/schema"}), "cannot be enforced"),
        (lambda: Grammar.of_schema({"type": "string", "pattern": "["}), "cannot be enforced"),
        (lambda: Grammar.of_regex("[0-9"), "regular expression cannot be enforced: .*unclosed"),
        (lambda: Grammar.of_lark("start: nowhere"), "grammar cannot be enforced: .*nowhere"),
        (lambda: Grammar.of_lark(""), "grammar cannot be enforced"),
    ],
)
def test_what_cannot_be_enforced_is_refused(make: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        make()


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
KINDS = [{**B, "properties": {"b": {"const": kind}, kind: {"type": "integer"}}} for kind in "xy"]
OBJECTS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": (A, ['{"a":1}'], ['{"a":1,"z":1}']),
    "nested": ({"properties": {"o": A}}, ['{"o":{"a":1}}'], ['{"o":{"a":1,"z":1}}']),
    "items": ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"a":1,"z":1}]']),
    "prefixItems": ({"type": "array", "prefixItems": [A]}, ['[{"a":1}]'], ['[{"a":1,"z":1}]']),
    "values": ({"additionalProperties": A}, ['{"q":{"a":1}}'], ['{"q":{"a":1,"z":1}}']),
    "a list of types": ({**A, "type": ["object", "null"]}, ['{"a":1}', "null"], ['{"a":1,"z":1}']),
    "$defs": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"a":1}'], ['{"a":1,"z":1}']),
    "itself": ({"properties": {"n": {"$ref": "#"}}}, ['{"n":{"n":{}}}'], ['{"n":{"z":1}}']),
    "beside $ref": (
        {"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": A}},
        ['{"a":1,"b":1}'],
        ['{"a":1,"z":1}', '{"b":1}'],
    ),
    "allOf": ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"z":3}', '{"a":1}']),
    "allOf of what is used alone, too": (
        {"allOf": [{"$ref": "#/$defs/A"}, B], "properties": {"o": {"$ref": "#/$defs/A"}}, "$defs": {"A": A}},
        ['{"a":1,"b":2,"o":{"a":1}}', '{"a":1,"b":2}'],
        ['{"a":1,"b":2,"o":{"a":1,"b":1}}', '{"a":1,"b":2,"z":3}'],
    ),
    "anyOf": ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"z":1}', '{"a":1,"b":1}']),
    "oneOf": ({"oneOf": KINDS}, ['{"b":"x","x":1}', '{"b":"y"}'], ['{"b":"x","y":1}', '{"b":"x","z":1}']),
    "beside anyOf": (
        {**A, "anyOf": [B, {"properties": {"c": {}}, "required": ["c"]}]},
        ['{"a":1,"b":1}', '{"a":1,"c":1}'],
        ['{"a":1,"b":1,"c":1}', '{"a":1,"b":1,"z":1}', '{"a":1}'],
    ),
    "beside anyOf of references": (
        {"properties": {"a": {}}, "anyOf": [{"$ref": "#/$defs/B"}, {"type": "null"}], "$defs": {"B": B}},
        ['{"a":1,"b":1}', "null"],
        ['{"a":1,"b":1,"z":1}'],
    ),
    "anyOf of what is required": (
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"a":1,"b":1}'],
        ["{}", '{"a":1,"z":1}'],
    ),
    "anyOf in allOf": ({"allOf": [{"anyOf": [A, B]}, {"properties": {"c": {}}}]}, ['{"a":1,"c":1}'], ['{"a":1,"z":1}']),
    "what is required, but not declared": ({**A, "required": ["a", "n"]}, ['{"a":1,"n":[2]}'], ['{"a":1,"z":1}']),
    "patterns": ({**A, "patternProperties": {"^x": {}}}, ['{"a":1,"x1":1}'], ['{"a":1,"z":1}']),
    "closed by itself": (
        {"allOf": [A, B], "unevaluatedProperties": False},
        ['{"a":1,"b":2}'],
        ['{"a":1,"b":2,"z":3}'],
    ),
    "patterns alone": ({"patternProperties": {"^x": {}}}, ['{"x1":1}', "{}"], ['{"z":1}']),
    "open: nothing is declared": ({"properties": {"m": {"type": "object"}}}, ['{"m":{"z":1}}'], ['{"z":1}']),
    "open: it says so": ({**A, "additionalProperties": True}, ['{"a":1,"z":1}'], []),
    "open: beside anyOf": ({"additionalProperties": {"type": "integer"}, "anyOf": [A, B]}, ['{"a":1,"z":1}'], []),
    "open: in anyOf": ({"anyOf": [{**A, "additionalProperties": True}, B]}, ['{"a":1,"z":1}'], ['{"b":1,"z":1}']),
}


def takes(grammar: Grammar, text: str) -> bool:
    matcher, letters = LLMatcher(LLTokenizer("byte"), grammar.text, log_level=0), list(text.encode())
    return matcher.try_consume_tokens(letters) == len(letters) and matcher.is_accepting()


@pytest.mark.parametrize("of", ["an answer", "arguments"])
@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_have_the_declared_properties_only(kind: str, of: str) -> None:
    schema, fitting, others = OBJECTS[kind]
    grammar = Grammar.of_schema(schema if of == "an answer" else enforceable(schema).schema)
    assert all(takes(grammar, text) == (of == "an answer" or text[0] == "{") for text in fitting)
    assert not any(takes(grammar, text) for text in others)


NUMBERS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 10**40},
    {"type": "integer", "maximum": -(10**40)},
    {"type": "number", "exclusiveMinimum": 1e308},
    {"type": "integer", "multipleOf": 30_011},
    {"type": "string", "minLength": 10**12},
    {"type": "string", "maxLength": 10**30},
    {"type": "array", "minItems": 10**30},
    {"type": "array", "maxItems": 10**9},
    {"const": 10**400},
    {"enum": [1, -(10**40)]},
]


@pytest.mark.parametrize("own", NUMBERS, ids=lambda own: list(own)[-1])
def test_a_number_of_any_size_is_enforced_relaxed_or_refused(own: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": own}, "required": ["a"]}
    with contextlib.suppress(RequestError):
        Grammar.of_schema(schema)
    found = enforceable(schema)
    assert found.schema["required"] == ["a"]
    assert found.relaxed == (f"properties.a.{list(own)[-1]}",)


def test_a_refusal_names_the_place() -> None:
    schema = {"properties": {"a": {"anyOf": [{"type": "integer", "minimum": 10**40}, {"type": "null"}]}}}
    with pytest.raises(RequestError, match=r"cannot be enforced: properties\.a\.anyOf\[0\]\.minimum: .*range"):
        Grammar.of_schema(schema)


def test_an_unusual_tokenizer_is_refused(tokenizer: Tokenizer) -> None:
    made = json.loads(tokenizer.to_json())
    made["decoder"] = None
    unusual = Constraints(SimpleNamespace(to_json=lambda: json.dumps(made)), vocab_size=tokenizer.vocab_size, eos=[0])
    with pytest.raises(RequestError, match="cannot be constrained"):
        unusual.begin(Grammar.of_schema(ANY_OBJECT))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = StoredModel.open_folder(demo_path(), "demo")
    opened = open_engine(model, DecoderOptions(context=512, kv="hierarchical"), "cpu")
    yield opened
    opened.close()


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_bundled_model_answers_in_json(engine: Engine, temperature: float) -> None:
    prompt = engine.chat_prompt([{"role": "user", "content": "Describe a cat as JSON."}])
    options = SamplingOptions(temperature=temperature, seed=3, max_tokens=200, grammar=Grammar.of_schema(PERSON))
    engine.speculate(3)  # what a grammar decides is not drafted
    pieces = list(engine.generate(prompt, options))
    engine.speculate(None)
    assert pieces[-1].finish_reason == "stop"
    assert fits(json.loads("".join(piece.text for piece in pieces)))
    usage = pieces[-1].usage
    assert usage is not None
    assert usage.speculation is not None
    assert usage.speculation.gamma == 0


def test_a_grammar_that_cannot_be_enforced_is_refused_before_the_answer(engine: Engine) -> None:
    options = SamplingOptions(grammar=Grammar("{}"))
    with pytest.raises(RequestError, match="grammar"):
        engine.generate([5], options)


LEVELS = 3000
CHAINS: dict[str, Any] = {
    "rules": lambda: Grammar.of_lark(
        "\n".join(["start: r0", *(f"r{i}: [r{i + 1}]" for i in range(LEVELS)), f'r{LEVELS}: "a"'])
    ),
    "references": lambda: Grammar.of_schema(
        {
            "$ref": "#/r0",
            **{f"r{i}": {"items": {"$ref": f"#/r{i + 1}"}} for i in range(LEVELS)},
            f"r{LEVELS}": {"type": "integer"},
        }
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_rules_does_not_end_the_process(constraints: Constraints, chain: str) -> None:
    """llguidance goes down one in a recursion of its own: on the stack of a usual thread it ended the server."""
    constraints.begin(CHAINS[chain]())


def test_a_grammar_is_not_read_at_any_length() -> None:
    with pytest.raises(RequestError, match=r"it has 200,\d+ characters, and at most 131,072 are read"):
        Grammar.of_regex("a" * 200_000)
