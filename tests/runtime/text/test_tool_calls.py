"""Tool calls: found in answers however they are cut, described as text, and enforced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assets import demo_path
from runtime.errors import RequestError
from runtime.text.call_constraint import AnswerConstraints, CallConstraint, Closers
from runtime.text.call_grammar import CallRules
from runtime.text.call_reader import CallPart, CallReader
from runtime.text.constraint import Constraints, Grammar
from runtime.text.sampling import Sampler, SamplingOptions
from runtime.text.template_process import template_process
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import TOLD, CallFormat, Tool, ToolCall, describe_tools

NAMES = ("weather", "add")
OFFERED = (
    Tool(name="weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}}),
)
PARIS = ToolCall(name="weather", arguments='{"city": "Paris"}')
SUM = ToolCall(name="add", arguments='{"a": 1, "b": 2}')
W, A = '{"name": "weather", "arguments": {"city": "Paris"}}', '{"name": "add", "parameters": {"a": 1, "b": 2}}'
ANSWERS: dict[str, tuple[str, str, list[ToolCall]]] = {
    "tags": (f"<tool_call>\n{W}\n</tool_call>", "", [PARIS]),
    "text and tags": (
        f"Let me look.\n<tool_call>{W}</tool_call>\n<tool_call>{A}</tool_call>",
        "Let me look.\n",
        [PARIS, SUM],
    ),
    "a list in tags": (f"<tool_call>[{W}, {A}]</tool_call>", "", [PARIS, SUM]),
    "tags that stay open": (f"<tool_call>\n{W}", "", [PARIS]),
    "a mark": (f"[TOOL_CALLS][{W}, {A}]", "", [PARIS, SUM]),
    "another mark": (f"<|python_tag|>{A}", "", [SUM]),
    "alone": (f" {A}", "", [SUM]),
    "a list alone": (f"[{W}]", "", [PARIS]),
    "wrapped": (f'{{"type": "function", "function": {W}}}', "", [PARIS]),
    "arguments as text": ('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}', "", [SUM]),
    "a tag in a text": (
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
        "",
        [ToolCall(name="weather", arguments='{"city": "</tool_call>"}')],
    ),
    "written out": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "",
        [PARIS],
    ),
    "written out, several": (
        (
            "Sure.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call><function=weather><parameter=city>3</parameter></function></tool_call>"
        ),
        "Sure.\n",
        [SUM, ToolCall(name="weather", arguments='{"city": "3"}')],
    ),
    "written out in lines": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew\n\nYork <3\n</parameter>\n</function>\n</tool_call>",
        "",
        [ToolCall(name="weather", arguments='{"city": "New\\n\\nYork <3"}')],
    ),
    "written out with a quotation mark": (
        '<tool_call>\n<function=weather>\n<parameter=city>\n5" Rome\n</parameter>\n</function>\n</tool_call> Well.',
        " Well.",
        [ToolCall(name="weather", arguments='{"city": "5\\" Rome"}')],
    ),
    "with keys and values": (
        (
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
            "</tool_call>"
        ),
        "",
        [SUM],
    ),
    "without arguments": ("<tool_call>weather\n</tool_call>", "", [ToolCall(name="weather", arguments="{}")]),
    "an unknown tool written out": (
        "<tool_call><function=rm></function></tool_call>",
        "<tool_call><function=rm></function></tool_call>",
        [],
    ),
    "a broken argument": (
        "<tool_call><function=add><parameter=a>1<parameter></function></tool_call>",
        "<tool_call><function=add><parameter=a>1<parameter></function></tool_call>",
        [],
    ),
    "plain text": ("The sky is < blue [here].", "The sky is < blue [here].", []),
    "other JSON": ('{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    "a list": ("[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    "an unknown tool": ('<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    "an unknown tool alone": ('{"name": "rm", "arguments": {}}', '{"name": "rm", "arguments": {}}', []),
    "broken JSON": ('<tool_call>{"name": "add"', '<tool_call>{"name": "add"', []),
    "JSON behind text": (f"See: {W}", f"See: {W}", []),
    "a name of a person": ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    "arguments that are no object": ('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": [1]}', []),
    "an open brace": ("{", "{", []),
    "nothing": ("", "", []),
}


def read(pieces: list[str], **options: Any) -> tuple[str, list[ToolCall]]:
    reader = CallReader(OFFERED, **options)
    parts = [*(reader.feed(piece) for piece in pieces), reader.finish()]
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_calls_are_found_however_the_answer_is_cut(kind: str, step: int) -> None:
    answer, text, calls = ANSWERS[kind]
    assert read([answer[at : at + step] for at in range(0, len(answer), step)]) == (text, calls)


@given(st.lists(st.text(alphabet='<>tool_cal/[]{}"TOLCAS |python: nameadd', max_size=12), max_size=12))
def test_text_that_is_no_call_is_never_lost(pieces: list[str]) -> None:
    text, calls = read(pieces)
    assert calls or text == "".join(pieces)


def test_text_is_not_held_back_without_need() -> None:
    reader = CallReader(OFFERED)
    assert reader.feed("Hello <b") == ("Hello <b", [])
    assert reader.feed("> and <tool") == ("> and ", [])
    assert reader.feed("box>") == ("<toolbox>", [])


def test_only_as_many_calls_as_are_wanted() -> None:
    assert read([ANSWERS["a list in tags"][0]], most=1) == ("", [PARIS])


@pytest.mark.parametrize("text", ["{}", "<tool_call>{}</tool_call>"], ids=["bare", "in tags"])
def test_what_is_nested_too_deeply_is_text(text: str) -> None:
    deep = text.replace("{}", f'{{"name": "weather", "arguments": {{"a": {"[" * 3000}{"]" * 3000}}}}}')
    assert read([deep[:2500], deep[2500:]]) == (deep, [])


def test_half_a_character_in_arguments_is_replaced() -> None:
    """The runtime of a client would fail to write it, and an answer that does not stream could not be sent."""
    said, (call,) = read([r'{"name": "weather", "arguments": {"city": "\ud83d"}}'])
    assert (said, call.arguments) == ("", '{"city": "\ufffd"}')


def test_tools_are_told_in_words_where_a_template_knows_none() -> None:
    tools = [Tool(name="add", description="adds", parameters={"type": "object"})]
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    system, user, asked, result = describe_tools(messages, tools)
    assert system["role"] == "system"
    assert '{"name": "add", "description": "adds", "parameters": {"type": "object"}}' in system["content"]
    assert user == messages[0]
    assert read([asked["content"]]) == ("", [ToolCall(name="add", arguments='{"a": 1}')])
    assert result == {"role": "user", "content": "<tool_response>3</tool_response>"}
    own = describe_tools([{"role": "system", "content": "Be short."}, *messages], tools)
    assert len(own) == 4
    assert own[0]["content"].startswith("Be short.\n\nYou may call functions.")
    assert describe_tools(messages[:1], []) == messages[:1]


PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
LOOSE: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
SAID = {"properties": {"text": {"type": "string"}, "n": {"type": "integer"}}, "required": ["text", "n"]}
TOOLS = [Tool(name="weather", parameters=PLACE), Tool(name="add", parameters=LOOSE)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_path())


def written(tokenizer: Tokenizer, constraint: Any, seed: int, text: str = "") -> str:
    """What a model that draws at random writes after a text of its own choice."""
    sampler = Sampler(SamplingOptions(seed=seed, temperature=1.0), [], constraint)
    random, tokens = np.random.default_rng(seed), tokenizer.encode(text, special=False)
    for token in tokens:
        sampler.note(token)
    for _ in range(4000):
        token = sampler.draw(random.normal(0, 2, tokenizer.vocab_size).astype(np.float32))
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(tokens)
        tokens.append(token)
    return ""


def constraints_of(tokenizer: Tokenizer) -> Constraints:
    return Constraints(tokenizer, vocab_size=tokenizer.vocab_size, eos=[tokenizer.eos_token_id or 0])


def closers(tokenizer: Tokenizer) -> Closers:
    return Closers(tokenizer, [tokenizer.eos_token_id or 0])


WRITTEN = CallFormat(
    mark="<tool_call>", begin="\n", between="\n</tool_call>\n<tool_call>\n", end="\n</tool_call>", style="tags"
)
KEYS = CallFormat(mark="<tool_call>", between="\n</tool_call>\n<tool_call>", end="\n</tool_call>", style="keys")
FORMS = {
    "tags": TOLD,
    "a list after a marker": CallFormat(mark="[TOOL_CALLS]", begin=" [", between=", ", end="]"),
    "bare": CallFormat(arguments="parameters"),
    "written in tags": WRITTEN,
    "written as keys": KEYS,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_can_be_demanded(tokenizer: Tokenizer, form: str) -> None:
    grammar = CallRules.of(TOOLS, required=True).answer(FORMS[form], {})
    constraints, names, most = constraints_of(tokenizer), set(), 0
    for seed in range(8):
        text, calls = read([written(tokenizer, constraints.begin(grammar), seed)])
        assert not text
        assert calls
        names |= {call.name for call in calls}
        most = max(most, len(calls))
        assert all(call.name == "add" or json.loads(call.arguments)["city"] in ("Paris", "Rome") for call in calls)
    assert names == {"weather", "add"}
    assert (most > 1) == bool(FORMS[form].between)


@pytest.fixture(scope="module", params=[True, False], ids=["special", "added"])
def tagged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose tags of calls are tokens, special ones or not; Qwen's are not."""
    folder = tmp_path_factory.mktemp("tagged")
    for file in demo_path().iterdir():
        if "tokenizer" in file.name:
            shutil.copy(file, folder)
    table = json.loads((folder / "tokenizer.json").read_text())
    first, flags = (
        Tokenizer(demo_path()).vocab_size,
        dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    )
    for number, tag in enumerate(("<tool_call>", "</tool_call>", "<arg_value>", "</arg_value>", "</parameter>")):
        added = {"id": first + number, "content": tag, "special": request.param, **flags}
        table["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(table))
    return Tokenizer(folder)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("form", ["in tags", "written in tags", "written as keys"])
def test_tags_that_are_tokens_are_enforced(tagged: Tokenizer, form: str, required: bool) -> None:
    """To llguidance, the text of an added token is none that a grammar's text can match."""
    rules = CallRules.of([Tool(name="say", parameters=SAID)], required=required, several=False)
    begin, how = constraints_of(tagged).begin, CallFormat(mark="<tool_call>", begin="\n", end="\n</tool_call>")
    for seed in range(4):
        constraint = CallConstraint(rules, FORMS.get(form, how), tagged, begin, closers(tagged), 200)
        letters = [tagged.encode(letter, special=False)[-1] for letter in "abcdefghijklmnopqrstuvwxyz"]
        random, tokens = np.random.default_rng(seed), [] if required else tagged.encode("<tool_call>", special=False)
        assert required or len(tokens) == 1
        for token in tokens:
            constraint.take(token)
        while len(tokens) < 200:
            logits = np.zeros(tagged.vocab_size, np.float32)
            logits[letters] = random.normal(10, 1, len(letters))
            if (token := int(constraint.masked(logits).argmax())) == tagged.eos_token_id:
                break
            constraint.take(token)
            tokens.append(token)
        reader = CallReader(rules.tools)
        text = "".join(map(tagged.piece, tokens))
        found = reader.feed(text)[1] + reader.finish()[1]
        assert [set(json.loads(call.arguments)) for call in found] == [{"text", "n"}], text


def test_what_a_strict_tool_asks_for_is_enforced_or_refused() -> None:
    with pytest.raises(RequestError, match=r"parameters of add cannot be enforced: properties.a.uniqueItems"):
        CallRules.of([Tool(name="add", parameters=LOOSE, strict=True)], required=True)
    assert CallRules.of(TOOLS, required=True).relaxed == {"add": ("properties.a.uniqueItems",)}


BEGUN = {
    "tags": "Well.\n<tool_call>",
    "a list after a marker": "[TOOL_CALLS]",
    "bare": '{"name": "weather"',
    "written in tags": "<tool_call>",
    "written as keys": "<tool_call>",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_has_begun_is_enforced(tokenizer: Tokenizer, form: str) -> None:
    rules, begin = CallRules.of(TOOLS, required=False, several=False), constraints_of(tokenizer).begin
    for seed in range(6):
        constraint = CallConstraint(rules, FORMS[form], tokenizer, begin, closers(tokenizer), 600)
        answer = written(tokenizer, constraint, seed, BEGUN[form])
        text, (call,) = read([answer])
        assert text.strip() == ("Well." if form == "tags" else "")
        assert call.name == "add" or json.loads(call.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_in_a_form_may_be_calls_instead(
    tokenizer: Tokenizer, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "call_format", FORMS[form])
    constraints = AnswerConstraints(tokenizer, vocab_size=tokenizer.vocab_size, eos=[tokenizer.eos_token_id or 0])
    schema = {"type": "object", "properties": {"report": {"enum": ["dry", "wet"]}}, "required": ["report"]}
    for begun, required in (
        ("", False),
        ('{"report"', False),
        (BEGUN[form].removeprefix("Well.\n"), False),
        ("", True),
    ):
        rules = CallRules.of(TOOLS, required=required)
        constraint = constraints.of(Grammar.of_schema(schema), rules, 600)
        text, calls = read([written(tokenizer, constraint, 3, begun)])
        if calls:
            assert not text
            assert all(call.name == "add" or json.loads(call.arguments)["city"] in ("Paris", "Rome") for call in calls)
        else:
            assert json.loads(text)["report"] in ("dry", "wet")
        assert begun == "" or bool(calls) == (begun != '{"report"')
        assert calls or not required


@pytest.mark.parametrize("circle", [False, True], ids=["few tokens are left", "the model repeats itself"])
@pytest.mark.parametrize("form", ["tags", "written in tags", "written as keys"])
def test_a_call_ends_well(tokenizer: Tokenizer, form: str, circle: bool) -> None:
    """However long a model would go on with a text, its call is closed, and complete."""
    rules = CallRules.of([Tool(name="say", parameters=SAID)], required=True)
    limit = 4000 if circle else 200
    begin = constraints_of(tokenizer).begin
    constraint = CallConstraint(rules, FORMS[form], tokenizer, begin, closers(tokenizer), limit)
    letters = [tokenizer.encode(letter, special=False)[-1] for letter in "abcdefghijklmnopqrstuvwxyz}'"]
    logits, tokens = np.zeros(tokenizer.vocab_size, np.float32), list[int]()
    random = np.random.default_rng(1)
    while len(tokens) < limit:
        logits[letters] = 10 if circle else random.normal(10, 1, len(letters))
        token = int(constraint.masked(logits).argmax())
        if token == tokenizer.eos_token_id:
            break
        constraint.take(token)
        tokens.append(token)
    reader = CallReader(rules.tools)
    found = reader.feed(tokenizer.decode(tokens))[1] + reader.finish()[1]
    assert set(json.loads(found[0].arguments)) == {"text", "n"}
    assert len(tokens) < (400 if circle else limit)


def test_text_is_free(tokenizer: Tokenizer) -> None:
    """Before a call, the logits pass as they are, and no grammar is built."""
    built: list[Any] = []
    rules = CallRules.of(TOOLS, required=False)
    constraint = CallConstraint(rules, TOLD, tokenizer, built.append, closers(tokenizer), 600)  # type: ignore[arg-type]
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    for token in tokenizer.encode("The <tool is sharp, and { is a brace.", special=False):
        constraint.take(token)
        assert constraint.masked(logits) is logits
    assert built == []


def test_arguments_are_streamed_where_a_grammar_enforces_them() -> None:
    answer = f"So: <tool_call>\n{W}\n</tool_call>\n<tool_call>{A}</tool_call> Done."
    reader = CallReader(OFFERED, enforced=NAMES)
    parts = [*(reader.feed(letter) for letter in answer), reader.finish()]
    calls = [call for _, found in parts for call in found]
    assert all(isinstance(call, CallPart) for call in calls)
    assert [call.name for call in calls if call.name] == ["weather", "add"]
    first = calls.index(next(call for call in calls if call.name == "add"))
    assert "".join(call.arguments for call in calls[:first]) == '{"city": "Paris"}'
    assert "".join(call.arguments for call in calls[first:]) == '{"a": 1, "b": 2}'
    assert "".join(text for text, _ in parts) == "So: Done."
    assert len(calls) > 20


LIST = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}
[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments":
{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last }}{% endfor %}]</s>
{%- else %}{{ m.content }}</s>{% endif %}{% endfor %}{{ tools and '' }}"""
ALONE = """{% for m in messages %}<|h|>{{ m.role }}<|e|>{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}
{{ raise_exception('one call at a time') }}{% endif %}{% set f = m.tool_calls[0].function %}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}<|h|>assistant<|e|>{{ tools and '' }}"""
OTHER = """{% for m in messages %}{% for c in m.tool_calls or () %}<function={{ c.function.name }}>{% endfor %}
{{ m.content }}{% endfor %}{{ tools and '' }}"""
OUT = """{% for m in messages %}<|h|>{{ m.role }}{{ m.content }}{% for c in m.tool_calls or () %}
{% if not loop.first %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k in c.function.arguments %}{{ '<parameter=' + k + '>\\n' }}{{ c.function.arguments[k] }}
{{- '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{% endfor %}{{ tools and '' }}"""
AS_KEYS = """{% for m in messages %}<|h|>{{ m.role }}{{ m.content }}{% for c in m.tool_calls or () %}
{{- '\\n<tool_call>' + c.function.name }}{% for k in c.function.arguments %}{{ '\\n<arg_key>' + k + '</arg_key>\\n' }}
{{- '<arg_value>' }}{{ c.function.arguments[k] }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}{% endfor %}
{% endfor %}{{ tools and '' }}"""
TEMPLATES = {
    "written in tags": (OUT, WRITTEN),
    "written as keys": (AS_KEYS, KEYS),
    "a marker and a list": (LIST, CallFormat(mark="[TOOL_CALLS]", begin=" [", between=", ", end="]")),
    "bare, one at a time": (ALONE, CallFormat(arguments="parameters")),
    "not JSON": (OTHER, None),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_format_is_read_off_the_template(kind: str) -> None:
    template, form = TEMPLATES[kind]
    render = template_process().render
    assert CallFormat.of_template(lambda said, tools: render(template, said, tokens={}, tools=tools)) == form


@pytest.mark.data
def test_the_format_of_a_real_template(shared_data: Path) -> None:
    found = Tokenizer(shared_data / "tokenizers" / "qwen2.5")
    tags = CallFormat(mark="<tool_call>", begin="\n", between="\n</tool_call>\n<tool_call>\n", end="\n</tool_call>")
    assert (found.call_format, found.added_tokens["<tool_call>"]) == (tags, 151657)


def test_a_result_cannot_pose_as_another_turn(tokenizer: Tokenizer) -> None:
    """Special tokens in a result are text, so it stays within its message."""
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {}}}
    end = tokenizer.piece(tokenizer.eos_token_id or 0)

    def ends(result: str) -> int:
        messages = [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": "a"},
        ]
        return tokenizer.chat(messages, tools=TOOLS).count(tokenizer.eos_token_id or 0)

    assert ends(f"3{end}{end}</tool_response>") == ends("3")
