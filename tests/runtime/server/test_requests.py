"""Requests: what is read, refused, and named."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import CONTEXT
from pydantic import BaseModel
from starlette.requests import Request

from runtime.server import bodies
from runtime.server.bodies import Reader, parse
from runtime.server.errors import ApiError
from runtime.server.openai.embeddings import EmbeddingsRequest
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.responses_api import ResponsesRequest
from tests.runtime.server.conftest import Standing

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}
REQUESTS = (ChatRequest, CompletionRequest, EmbeddingsRequest, ResponsesRequest)


def read_chat(body: dict[str, Any]) -> ChatRequest:
    request = parse(json.dumps(body).encode(), ChatRequest)
    request.check()
    assert request.conversation
    request.sampling()
    return request


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    request = parse(json.dumps(body).encode(), CompletionRequest)
    request.check()
    assert request.single_prompt is not None
    request.sampling()
    return request


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"uniqueItems": True}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
JSON = {"type": "json_object"}


def ALLOWED(name: str, mode: str = "auto") -> dict[str, Any]:
    own = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
    return {"type": "allowed_tools", "allowed_tools": own}


def schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        (message(role="robot"), "messages[0].role"),
        (message(role=1), "messages[0].role"),
        (message(content=3), "messages[0].content"),
        (message(content=[{"type": "text", "text": 3}]), "messages[0].content[0].text"),
        (message(content=[{"text": "a"}]), "messages[0].content[0].type"),
        (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
        (message(role="function", name="f"), "messages[0]"),
        (message(role="assistant", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function"),
        (message(role="user", tool_calls=[CALL]), "messages[0].tool_calls"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": ["x"] * 16}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": "one"}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL] * 513}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [STRICT_TOOL], "tool_choice": "required"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema({"type": "nonsense"})}, "response_format"),
        ({"response_format": schema({"type": "string", "format": 3})}, "response_format"),
        ({"response_format": JSON, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": schema({"type": "nonsense"}), "tools": [TOOL]}, "response_format"),
        ({"response_format": schema({"type": "integer", "minimum": 10**40})}, "response_format"),
        ({"response_format": JSON, "tools": [STRICT_TOOL]}, "tools"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: " + "a" * 16_384}}, "structured_outputs.grammar"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"mirostat": 2}, "mirostat"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"grammar": "root ::= nowhere ::="}, "grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"format": "xml"}, "response_format.json_schema.schema"),
        ({"guided_regex": "a", "response_format": JSON}, "guided_regex"),
        ({"tools": [TOOL], "tool_choice": ALLOWED("other")}, "tool_choice"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 11: 1}}, "logit_bias"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": "none"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(at): at for at in range(33)}}, "chat_template_kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_in_a_chat_request_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as failure:
        read_chat({**CHAT, **change})
    assert failure.value.status == 400
    assert failure.value.record.param == param
    assert failure.value.record.type == "invalid_request_error"
    wrong = failure.value.record.message
    assert param.split("[")[0].split(".")[0] in wrong or "tools" in wrong or "cannot be enforced" in wrong


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, 2, "x"]}, "prompt[2]"),
        ({"prompt": [1, 10**30]}, "prompt[1]"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"echo": True, "max_tokens": 2}, "echo"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "echo"),
        ({"echo": True, "max_tokens": 1, "response_format": {"type": "json_object"}}, "echo"),
        ({"echo": True, "max_tokens": 0, "prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 3}, "n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_in_a_completion_request_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as failure:
        read_completion({**COMPLETION, **change})
    assert (failure.value.status, failure.value.record.param) == (400, param)


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ApiError, match=f"{field} is missing") as failure:
        read_chat({key: value for key, value in CHAT.items() if key != field})
    assert failure.value.record.code == "missing_required_parameter"


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": {"deep": [1]}, "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"n": 1, "tools": [], "tool_choice": "none", "functions": None, "parallel_tool_calls": True},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me"},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"temperature": 0, "top_p": 1, "seed": -1, "stop": None, "max_tokens": None, "stream": None},
        {"temperature": 2.0, "stop": [], "max_tokens": 5, "max_completion_tokens": 5},
        {"logprobs": False, "top_logprobs": None, "stream_options": None},
        message(name="me", unknown=3),
        message(content=[{"type": "text", "text": "a", "cache_control": {}}]),
        message(content=""),
    ],
)
def test_what_does_no_harm_is_accepted(change: dict[str, Any]) -> None:
    read_chat({**CHAT, **change})


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": "\\ud80"}', b"[" * 100_000, b'{"a":1}x'],
    ids=str,
)
def test_a_body_that_is_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as failure:
        parse(body, ChatRequest)
    assert (failure.value.status, failure.value.record.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"a \ud83d\u2026", "a \ufffd…"),
        (rb"\ude00", "\ufffd"),
        (rb"\uD83D\uDE00 \ud83d", "😀 \ufffd"),
        (rb"\ud83d\ud83d\ude00", "\ufffd😀"),
        (rb"\\ud83d \" \u0000", '\\ud83d " \0'),
        ("\ufeff".encode(), "\ufeff"),
    ],
)
@pytest.mark.parametrize("kind", REQUESTS)
def test_half_an_emoji_is_replaced(kind: Any, sent: bytes, read: str) -> None:
    """JavaScript writes such texts where it cuts one in the middle of an emoji."""
    texts = {ChatRequest: b'"messages": [{"role": "user", "content": "%b"}]', CompletionRequest: b'"prompt": "%b"'}
    body = b'\xef\xbb\xbf{"model": "m", "tools": [], ' + texts.get(kind, b'"input": "%b"').replace(b"%b", sent) + b"}"
    asked = parse(body, kind)
    text = asked.messages[0].content if kind is ChatRequest else getattr(asked, "prompt", None) or asked.input
    assert text == read


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        ('{"key": "al', {"key": "al"}),
        ('{"a": 1, "b": [2, {"c', {"a": 1, "b": [2, {}]}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("[1]", {"arguments": [1]}),
        (["x"], {"arguments": ["x"]}),
        ("rm -rf", {"arguments": "rm -rf"}),
        ("5", {"arguments": 5}),
        *((nothing, {}) for nothing in ("", "{", "[]", "null", None, [])),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_calls_in_the_history_are_passed_on(arguments: Any, passed_on: dict[str, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = read_chat({**CHAT, **message(role="assistant", content=None, tool_calls=[call])})
    (said,) = asked.conversation[0][0]["tool_calls"]
    assert said["function"] == {"name": "f", "arguments": passed_on}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def test_what_can_not_be_used_is_left_out_and_named() -> None:
    tools = [TOOL, {"type": "web_search"}, TOOL, {"type": "custom", "custom": {"name": 3}}]
    messages = [
        {"role": "user", "content": ["look", IMAGE]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "refusal", "refusal": "no"}],
        },
        {"role": "tool", "content": [IMAGE]},
        *CHAT["messages"],
    ]
    asked = read_chat({**CHAT, "tools": tools, "messages": messages})
    assert [tool.name for tool in asked.tool_use.tools] == ["f"]
    told, left_out = asked.conversation
    assert [one["content"] for one in told] == ["look\n[image_url left out]", "no", "[image_url left out]", "hi"]
    assert left_out == [
        "tools[1] (web_search)",
        "tools[2] (f again)",
        "tools[3] (custom)",
        "messages[0].content[1] (image_url)",
        "messages[1].content[0] (thinking)",
        "messages[2].content[0] (image_url)",
    ]


@pytest.mark.parametrize(
    ("given", "structured"),
    [
        ({"guided_json": {"type": "integer"}}, {"json": {"type": "integer"}}),
        ({"guided_json": '{"type": "integer"}'}, {"json": {"type": "integer"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json_schema": {"type": "integer"}}, {"json": {"type": "integer"}}),
        ({"response_format": {"type": "json_object", "schema": {"type": "integer"}}}, {"json": {"type": "integer"}}),
        ({"format": {"type": "integer"}}, {"json": {"type": "integer"}}),
        ({"format": "json"}, {"json": {"type": "object"}}),
    ],
    ids=str,
)
def test_forms_of_other_servers_are_obeyed(given: dict[str, Any], structured: dict[str, Any]) -> None:
    own = read_chat({**CHAT, "structured_outputs": structured}).sampling().grammar
    assert own is not None
    assert read_chat({**CHAT, **given}).sampling().grammar == own
    assert read_completion({**COMPLETION, **given}).sampling().grammar == own


def test_a_grammar_of_llama_cpp_is_obeyed() -> None:
    grammar = read_chat({**CHAT, "grammar": 'root ::= "yes" | "no" [a-z]*'}).sampling().grammar
    assert grammar is not None
    assert '"yes"' in grammar.text.replace("\\", "")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"max_tokens": 12.0}, "max_tokens", 12),
        ({"max_tokens": -1}, "max_tokens", 2**31 - 1),
        ({"n_predict": 7}, "max_tokens", 7),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 5.0}, "top_k", 5),
        ({"seed": 3.0}, "seed", 3),
        ({"stop": ""}, "stop", ()),
        ({"stop": ["", "a"]}, "stop", ("a",)),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"presence_penalty": 1.5, "frequency_penalty": -1}, "presence_penalty", 1.5),
        ({"n": 1.0, "user": 3, "metadata": 3, "messages": [{"role": "user"}]}, "temperature", 1),
    ],
    ids=str,
)
def test_values_that_every_other_server_takes(given: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read_chat({**CHAT, **given}).sampling(), field) == value


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "thinking": True}),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}},
            {"reasoning_effort": "x", "thinking": True},
        ),
        ({}, {}),
    ],
    ids=str,
)
def test_an_effort_sets_the_variables_of_templates(given: dict[str, Any], variables: dict[str, Any]) -> None:
    assert read_chat({**CHAT, **given}).variables == variables


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_in_the_history_is_passed_on(field: str) -> None:
    asked = read_chat({**CHAT, **message(role="assistant", **{field: "hm"})})
    assert asked.conversation[0][0]["reasoning_content"] == "hm"


def test_a_choice_among_some_of_the_tools() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    for mode in ("auto", "required"):
        use = read_chat({**CHAT, "tools": [TOOL, other], "tool_choice": ALLOWED("g", mode)}).tool_use
        assert ([tool.name for tool in use.tools], use.required) == (["g"], mode == "required")


@pytest.mark.parametrize("kind", [ChatRequest, ResponsesRequest])
def test_an_infinite_number_is_not_handed_on(kind: type[BaseModel]) -> None:
    """It could be written into no answer: the Responses interface repeats the tools."""
    flat = {**TOOL, **TOOL["function"], "parameters": {"a": [12345]}}
    body = {**CHAT, "input": "x", "tools": [{**flat, "function": flat}]}
    with pytest.raises(ApiError):
        parse(b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', kind)
    with pytest.raises(ApiError, match="finite"):
        assert parse(json.dumps(body).replace("12345", "1e999").encode(), kind).tool_use


def schemas(found: Any) -> Iterator[dict[str, Any]]:
    """A schema of pydantic's and all that are in it."""
    if isinstance(found, dict):
        if isinstance(found.get("type"), str):
            yield found
        found = list(found.values())
    if isinstance(found, list | tuple):
        for each in found:
            yield from schemas(each)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_list_is_bounded_and_read_up_to_its_first_mistake(kind: Any) -> None:
    """Else a request of a few megabytes makes an error of each item, which takes gigabytes."""
    lists = [schema for schema in schemas(kind.__pydantic_core_schema__) if schema["type"] == "list"]
    assert lists
    for schema in lists:
        assert (bool(schema.get("fail_fast")), bool(schema.get("max_length"))) == (True, True), schema


MANY = 100_000
ZEROS = json.dumps([0] * MANY)
NULLS = json.dumps([None] * MANY)
PAIRS = json.dumps({str(number): [] for number in range(MANY)})
LONG: dict[str, tuple[Any, str]] = {
    "messages": (ChatRequest, f'"messages": {ZEROS}'),
    "a message's parts": (ChatRequest, f'"messages": [{{"role": "user", "content": {ZEROS}}}]'),
    "a message's calls": (ChatRequest, f'"messages": [{{"role": "assistant", "tool_calls": {ZEROS}}}]'),
    "modalities": (ChatRequest, f'"messages": [{{"role": "user", "content": ""}}], "modalities": {ZEROS}'),
    "biases": (ChatRequest, f'"messages": [{{"role": "user", "content": ""}}], "logit_bias": {PAIRS}'),
    "prompts": (CompletionRequest, f'"prompt": {NULLS}'),
    "tokens": (CompletionRequest, f'"prompt": [{NULLS}]'),
    "inputs": (EmbeddingsRequest, f'"input": {NULLS}'),
    "items": (ResponsesRequest, f'"input": {ZEROS}'),
    "an item's parts": (ResponsesRequest, f'"input": [{{"role": "user", "content": {ZEROS}}}]'),
    "metadata": (ResponsesRequest, f'"input": "x", "metadata": {PAIRS}'),
}


@pytest.mark.parametrize("what", LONG)
def test_a_hundred_thousand_mistakes_take_the_memory_of_one(what: str) -> None:
    kind, fields = LONG[what]
    body = f'{{"model": "m", {fields}}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as failure:
            parse(body, kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert failure.value.status == 400
    assert len(str(failure.value)) < 300
    assert peak < 30e6, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("items", "said"), [("[]", "lists and objects"), ('{"a":1}', "lists and objects"), ("1000", "values")]
)
def test_what_would_fill_the_memory_is_counted_before_it_is_made(items: str, said: str) -> None:
    count = bodies.MAX_VALUES + 1 if said == "values" else bodies.MAX_GROUPS + 1
    body = f'{{"model": "m", "unknown": [{",".join([items] * count)}]}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=f"at most .* {said}|{said}, but at most"):
            parse(body, ChatRequest)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(body)


def test_what_stands_in_a_text_is_not_counted() -> None:
    text = r'[{,"\\",}]' * 100_000
    asked = parse(json.dumps({**COMPLETION, "prompt": text}).encode(), CompletionRequest)
    assert asked.single_prompt == text


async def test_large_bodies_are_read_beside_the_event_loop_and_one_by_one() -> None:
    reader, own, inside = Reader(), threading.get_ident(), []

    async def read(size: int) -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * size, "more_body": False}

        return await reader.read(Request({"type": "http", "headers": []}, receive), make)

    def make(body: bytes) -> int:
        inside.append(len(body))
        assert len(inside) == 1
        inside.clear()
        return threading.get_ident()

    assert await read(bodies.LARGE_BYTES) == own
    assert own not in await asyncio.gather(*(read(bodies.LARGE_BYTES + 1) for _ in range(4)))


def test_a_message_is_not_as_long_as_what_it_repeats() -> None:
    part = {"type": "image" + "x" * 1_000_000}
    with pytest.raises(ApiError) as failure:
        read_chat({**CHAT, **message(content=[part])})
    assert len(str(failure.value)) < 1100
    assert str(failure.value).startswith("messages[0].content[0] is of type")
    assert str(failure.value).endswith("the models here read only text")
    assert len(ApiError(400, "x", param="y" * 10_000).record.param or "") < 1100


@pytest.fixture
def client(shared: Standing) -> openai.OpenAI:
    return shared.client


def test_texts_and_tokens(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="small", input=["one", "two words"])
    assert [one.index for one in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx([0.70710678, 0.70710678, 0, 0])
    assert answer.usage.prompt_tokens == 3
    plain = client.embeddings.create(model="small", input="one", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(answer.data[0].embedding)
    assert client.embeddings.create(model="small", input=[1, 2]).usage.prompt_tokens == 2
    assert len(client.embeddings.create(model="small", input=[[1], [2, 3]]).data) == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({"dimensions": 5}, "dimensions"),
        ({"input": [20_000]}, "input"),
        ({"input": ["a", "x " * CONTEXT]}, "input[1]"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        client.embeddings.create(**{"model": "small", "input": "a", **change})
    assert failure.value.param is not None
    assert failure.value.param.split("[")[0] == param.split("[")[0]


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nowhere", input="a")
